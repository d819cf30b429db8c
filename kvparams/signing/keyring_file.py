"""The file of signing keys: read, followed while it changes, and written.

A file that anybody but its owner may read or write is refused, because its readers can sign.
"""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvparams.signing.keyring import SigningKeyring, SigningKeyringError
from kvparams.signing.shared_files import FileState, file_state, lock_folder, replace_text

__all__ = ["WatchedKeyring", "change_keyring", "create_keyring", "read_keyring"]

_MAX_BYTES: Final = 64 << 10
_OTHERS: Final = 0o077
_OWNER: Final = 0o600


def read_keyring(path: Path) -> SigningKeyring:
    """The keys in a file.

    Raises:
        SigningKeyringError: it cannot be read, others may read or write it, or it is no keyring; the message holds no
            key.
    """
    return _read(path)[0]


class WatchedKeyring:
    """The keys of a file, read again when it has changed. It never waits for anything but the disk."""

    def __init__(self, path: Path) -> None:
        """Read it.

        Raises:
            SigningKeyringError: see `read_keyring`.
        """
        self._path = path
        self.keyring, self._state = _read(path)
        self._looked_s: float | None = None

    def reload_if_changed(self) -> bool:
        """Read it again if it has changed; whether it has.

        Raises:
            SigningKeyringError: it cannot be used; the keys stay as they were, and this state is not tried again.
        """
        try:
            state: FileState | None = file_state(self._path.stat())
        except OSError:
            state = None
        if state == self._state:
            return False
        self._state = state
        self.keyring, self._state = _read(self._path)
        return True

    def current(self, now: float, every_s: float, complain: Callable[[SigningKeyringError], None]) -> SigningKeyring:
        """The keys, looked for no more often than every `every_s` seconds; `complain` hears what is wrong, once."""
        if self._looked_s is None or not 0 <= now - self._looked_s < every_s:
            self._looked_s = now
            try:
                self.reload_if_changed()
            except SigningKeyringError as error:
                complain(error)
        return self.keyring


def create_keyring(path: Path, keyring: SigningKeyring) -> None:
    """Write a file that is not there yet, for its owner only.

    Raises:
        SigningKeyringError: it is there, or cannot be written.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OWNER)
    except FileExistsError:
        raise SigningKeyringError(f"{path} exists already; add a key with `kvparams signing-keys rotate`") from None
    except OSError as error:
        raise SigningKeyringError(f"{path} cannot be written: {error.strerror or 'failed'}") from error
    with os.fdopen(file, "w") as opened:
        opened.write(keyring.text())


@contextmanager
def change_keyring(path: Path) -> Generator[list[SigningKeyring]]:
    """Opens the keys of a file for changes, as a list of one keyring.

    The keyring in the list when the block ends well is written back as a whole, so that a reader sees the old state or
    the new one.

    Raises:
        SigningKeyringError: as for `read_keyring`, or it cannot be written.
    """
    path = path.resolve()  # a link stays one
    try:
        folder = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise SigningKeyringError(f"the folder {path.parent} cannot be opened: {error.strerror or 'failed'}") from error
    with lock_folder(folder):
        held = [read_keyring(path)]
        yield held
        try:
            replace_text(path, held[0].text(), _OWNER)
        except OSError as error:
            raise SigningKeyringError(f"{path} cannot be written: {error.strerror or 'failed'}") from error


def _read(path: Path) -> tuple[SigningKeyring, FileState]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise SigningKeyringError(f"the signing keys in {path} cannot be read: {error.strerror or 'failed'}") from error
    if status.st_mode & _OTHERS:
        raise SigningKeyringError(f"other users can read or write {path}, and so sign documents; run: chmod 600 {path}")
    if len(raw) > _MAX_BYTES:
        raise SigningKeyringError(f"{path} is not a file of signing keys: it is longer than {_MAX_BYTES} bytes")
    try:
        return SigningKeyring.parse(raw), file_state(status)
    except SigningKeyringError as error:
        raise SigningKeyringError(f"{path}: {error}") from None
