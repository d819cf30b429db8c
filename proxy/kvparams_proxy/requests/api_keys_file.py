"""The file of client keys: one JSON object a line, with a hash in place of each key.

    {"id":"3f9a0c41d2e7","tenant":"acme","hash":"sha256:9b2c...","priority":0,"created":"2026-01-02T03:04:05Z"}

Keys are made here, from 256 bits of randomness; nobody chooses one. So a plain SHA-256 at rest is right: a slow hash
(argon2, scrypt) makes guessing words dear, but there is nothing to guess in 2^256, and it would cost every request
milliseconds. An invalid line makes the whole file invalid; the error gives its number.
"""

import json
import os
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from secrets import token_hex, token_urlsafe
from stat import S_IWOTH
from typing import Final

from kvparams.errors import JSONTextError, KVParamsError
from kvparams.jsontext.document import JSONLimits, load_object
from kvparams.signing.shared_files import FileState, file_state, lock_folder, replace_text

__all__ = [
    "KEY_BYTES",
    "APIKeyRecord",
    "APIKeysError",
    "create_api_key",
    "edit_api_keys",
    "hash_api_key",
    "read_api_keys",
]

KEY_BYTES: Final = 60
"""Of a key as clients send it: `kvp_`, an id of 12, `_`, a secret of 43."""

_MAX_BYTES: Final = 16 << 20
_MAX_KEYS: Final = 50_000
_LINE: Final = JSONLimits(max_bytes=4096, max_depth=2)
_ID: Final = re.compile(r"[0-9a-f]{12}")
_TENANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HASH: Final = re.compile(r"sha256:([0-9a-f]{64})")
_MAX_PRIORITY: Final = 1000
_NAMES: Final = frozenset(("id", "tenant", "hash", "priority", "created", "expires"))
_NEEDED: Final = ("id", "tenant", "hash", "created")


class APIKeysError(KVParamsError, ValueError):
    """The file of client keys cannot be used, or not in this way; the message never holds a key."""


@dataclass(frozen=True, slots=True)
class APIKeyRecord:
    """A client key, as the file keeps it.

    Raises:
        APIKeysError: a value is not one that the file may hold.
    """

    id: str
    """12 hexadecimal digits; part of the key, so that it is found without trying all of them."""
    tenant: str
    """Whose key it is; one tenant may have several."""
    digest: bytes
    """SHA-256 of the whole key, 32 bytes."""
    created: datetime
    priority: int = 0
    """Of this key's requests where they have to wait; higher goes first."""
    expires: datetime | None = None
    """From when on it is refused."""

    def __post_init__(self) -> None:
        if _ID.fullmatch(self.id) is None:
            raise APIKeysError("`id` must be 12 hexadecimal digits")
        if _TENANT.fullmatch(self.tenant) is None:
            raise APIKeysError("`tenant` must be 1 to 128 letters, digits and ._-, the first a letter or digit")
        if not -_MAX_PRIORITY <= self.priority <= _MAX_PRIORITY:
            raise APIKeysError(f"`priority` must be a whole number from {-_MAX_PRIORITY} to {_MAX_PRIORITY}")


def create_api_key(
    tenant: str, created: datetime, *, priority: int = 0, expires: datetime | None = None
) -> tuple[str, APIKeyRecord]:
    """Creates a key and its record. The key itself is stored nowhere: a lost key must be replaced.

    Raises:
        APIKeysError: see `APIKeyRecord`.
    """
    id = token_hex(6)
    key = f"kvp_{id}_{token_urlsafe(32)}"
    return key, APIKeyRecord(id, tenant, hash_api_key(key.encode()), created, priority, expires)


def hash_api_key(key: bytes) -> bytes:
    """Returns the hash that is kept in place of a key: 32 bytes."""
    return sha256(key).digest()


def read_api_keys(path: Path) -> tuple[dict[str, APIKeyRecord], FileState]:
    """Reads the keys in a file, by id, and the file's state.

    Raises:
        APIKeysError: it cannot be read, others than its owner and group may write to it, or a line is wrong.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise APIKeysError(f"the keys file {path} cannot be read: {error.strerror or 'failed'}") from error
    if status.st_mode & S_IWOTH:
        raise APIKeysError(f"all users of this machine can write the keys file {path}; run: chmod o-w {path}")
    if len(raw) > _MAX_BYTES:
        raise APIKeysError(f"the keys file {path} is larger than {_MAX_BYTES} bytes")
    records: dict[str, APIKeyRecord] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = _record(line)
            if record.id in records:
                raise APIKeysError(f"the id {record.id} appears twice")
            if len(records) == _MAX_KEYS:
                raise APIKeysError(f"more than {_MAX_KEYS} keys")
        except (APIKeysError, JSONTextError) as error:
            raise APIKeysError(f"the keys file {path}, line {number}: {error}") from None
        records[record.id] = record
    return records, file_state(status)


@contextmanager
def edit_api_keys(path: Path) -> Generator[dict[str, APIKeyRecord]]:
    """Yields the keys in a file, by id, to be changed.

    They are written back as a whole when the block ends well, so that a proxy that reads the file meanwhile sees the
    old state or the new one. A missing file is created, for its owner only.

    Raises:
        APIKeysError: as for `read_api_keys`, or it cannot be written.
    """
    path = path.resolve()  # a link stays one
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise APIKeysError(f"the folder {path.parent} cannot be opened: {error.strerror or 'failed'}") from error
    with lock_folder(folder):
        records = read_api_keys(path)[0] if path.exists() else {}
        yield records
        _write(path, records.values())


def _write(path: Path, records: Iterable[APIKeyRecord]) -> None:
    lines = "".join(f"{_line(record)}\n" for record in records)
    try:
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        replace_text(path, lines, mode)
    except OSError as error:
        raise APIKeysError(f"the keys file {path} cannot be written: {error.strerror or 'failed'}") from error


def _line(record: APIKeyRecord) -> str:
    document: dict[str, object] = {
        "id": record.id,
        "tenant": record.tenant,
        "hash": f"sha256:{record.digest.hex()}",
        "priority": record.priority,
        "created": _text(record.created),
    }
    if record.expires is not None:
        document["expires"] = _text(record.expires)
    return json.dumps(document, separators=(",", ":"))


def _record(line: bytes) -> APIKeyRecord:
    document, _ = load_object(line, _LINE)
    if strange := sorted(document.keys() - _NAMES):
        raise APIKeysError(f"`{strange[0][:64]}` is not a known member; known: {', '.join(sorted(_NAMES))}")
    if missing := [name for name in _NEEDED if name not in document]:
        raise APIKeysError(f"`{missing[0]}` is missing")
    digest = _HASH.fullmatch(_string(document, "hash"))
    if digest is None:
        raise APIKeysError("`hash` must be `sha256:` and 64 hexadecimal digits; make keys with `kvparams keys create`")
    priority = document.get("priority", 0)
    if type(priority) is not int:
        raise APIKeysError("`priority` must be a whole number")
    expires = _moment(document, "expires") if "expires" in document else None
    created = _moment(document, "created")
    return APIKeyRecord(
        _string(document, "id"), _string(document, "tenant"), bytes.fromhex(digest[1]), created, priority, expires
    )


def _string(document: Mapping[str, object], name: str) -> str:
    value = document[name]
    if not isinstance(value, str):
        raise APIKeysError(f"`{name}` must be a string")
    return value


def _moment(document: Mapping[str, object], name: str) -> datetime:
    try:
        moment = datetime.fromisoformat(_string(document, name))
    except ValueError:
        moment = datetime.min
    if moment.tzinfo is None or not 2000 <= moment.year <= 9000:
        raise APIKeysError(f"`{name}` must be a time such as 2026-01-02T03:04:05Z")
    return moment


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).replace(microsecond=0, tzinfo=None).isoformat() + "Z"
