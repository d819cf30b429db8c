"""The key file of authenticated pages, read from disk; what stands in it is `kvparams.seals`.

The one rule: a file that others may write is refused, because whoever writes it can poison the store.
"""

import os
from pathlib import Path
from stat import S_IWOTH
from typing import Final

from kvparams.seals import Method, SealError, SealKeys

__all__ = ["read_seal_keys"]

_MAX_BYTES: Final = 64 << 10


def read_seal_keys(path: Path, method: Method = "aes-256-gmac") -> SealKeys:
    """The keys in a file: one a line, 64 hexadecimal digits, the sealing one first.

    Raises:
        SealError: it cannot be read, others may write it, or it holds something else; the message holds no key.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise SealError(f"the keys in {path} cannot be read: {error.strerror or 'failed'}") from error
    if mode & S_IWOTH:
        raise SealError(f"everybody may write {path}, and so the store: chmod 600 {path}")
    if len(raw) > _MAX_BYTES:
        raise SealError(f"{path} is longer than {_MAX_BYTES} bytes: it is no key file")
    try:
        return SealKeys.parse(raw.decode("ascii", "replace"), method)
    except SealError as error:
        raise SealError(f"{path}: {error}") from None
