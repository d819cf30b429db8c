"""The key file of authenticated pages, read from disk; what stands in it is `kvparams.page_auth`.

A file that others may write is refused, because whoever writes it can poison the store.
"""

import os
from pathlib import Path
from stat import S_IWOTH
from typing import Final

from kvparams.page_auth import PageAuthError, PageAuthKeys, PageAuthMethod

__all__ = ["read_page_auth_keys"]

_MAX_BYTES: Final = 64 << 10


def read_page_auth_keys(path: Path, method: PageAuthMethod = "aes-256-gmac") -> PageAuthKeys:
    """The keys in a file: one a line, 64 hexadecimal digits, the sealing one first.

    Raises:
        PageAuthError: it cannot be read, others may write it, or it holds something else; the message holds no key.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise PageAuthError(f"the keys in {path} cannot be read: {error.strerror or 'failed'}") from error
    if mode & S_IWOTH:
        raise PageAuthError(f"all users can write {path}, and so forge pages; run: chmod 600 {path}")
    if len(raw) > _MAX_BYTES:
        raise PageAuthError(f"{path} is not a key file: it is longer than {_MAX_BYTES} bytes")
    try:
        return PageAuthKeys.parse(raw.decode("ascii", "replace"), method)
    except PageAuthError as error:
        raise PageAuthError(f"{path}: {error}") from None
