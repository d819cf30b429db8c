"""Secrets that an operator gives the proxy: the engines' keys, the key of the admin API.

They come from files, never from the command line, where everybody on the machine reads them. A
secret's text is available only through explicit calls; logs, errors and settings show its name.
"""

import re
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Final

from kvparams.errors import KVParamsError

__all__ = ["Secret", "SecretError", "is_accessible_by_others", "secret_from_file"]

_MAX_BYTES: Final = 4096
_SECRET: Final = re.compile(r"[!-~]{1,4096}")
"""What may stand in a header, without spaces: nothing that could end the line it is written on."""


class SecretError(KVParamsError, ValueError):
    """A secret cannot be read, or is not one; the message names its place, never its text."""


class Secret:
    """A short text that nobody should see."""

    __slots__ = ("_digest", "_text")

    def __init__(self, text: str) -> None:
        """1 to 4096 visible ASCII characters.

        Raises:
            SecretError: it is something else.
        """
        if _SECRET.fullmatch(text) is None:
            raise SecretError(f"a secret must be 1 to {_MAX_BYTES} visible ASCII characters without spaces")
        self._text = text
        self._digest = sha256(text.encode()).digest()

    def reveal(self) -> str:
        """Returns the text itself."""
        return self._text

    def authorization_header(self) -> bytes:
        """Returns a whole header line that shows the secret to an engine."""
        return b"authorization: Bearer %b\r\n" % self._text.encode()

    def matches(self, given: bytes) -> bool:
        """Returns whether `given` is the same text, in a time that depends on neither."""
        return compare_digest(sha256(given).digest(), self._digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and compare_digest(self._digest, other._digest)

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return "Secret(hidden)"


def secret_from_file(path: Path) -> Secret:
    """Reads a secret from a file; surrounding white space does not count.

    Raises:
        SecretError: it cannot be read, or holds no secret.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 64)
    except OSError as error:
        raise SecretError(f"the secret in {path} cannot be read: {error.strerror or 'failed'}") from error
    try:
        return Secret(raw.decode("ascii", "replace").strip())
    except SecretError as error:
        raise SecretError(f"{path}: {error}") from None


def is_accessible_by_others(path: Path) -> bool:
    """Returns whether other users of this machine may read or write the file."""
    try:
        return path.stat().st_mode & 0o077 != 0
    except OSError:  # whoever reads it says so
        return False
