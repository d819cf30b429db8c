"""The demo's own folder, with its logs and its stores: removed at the end, or by the next demo if this one was killed.

A folder is removed by whoever holds its lock, and a living demo holds the lock of its own.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

__all__ = ["own_folder", "remove_stale"]

_PREFIX: Final = "kvparams-demo-"
_YOUNG_S: Final = 60.0
"""A folder that was just made may not be locked yet."""


@contextmanager
def own_folder(base: Path) -> Generator[Path]:
    """A new folder in `base`, removed at the end; those that killed demos left there are removed now."""
    remove_stale(base)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=base) as directory, closing(_Lock(Path(directory))):
        yield Path(directory)


def remove_stale(base: Path, young_s: float = _YOUNG_S) -> None:
    """Remove the demos' folders in `base` that nobody has locked and that have not changed for `young_s` seconds."""
    for path in base.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # somebody else's, locked, or gone by now
            if path.stat().st_mtime < time.time() - young_s:
                with closing(_Lock(path)):
                    shutil.rmtree(path, ignore_errors=True)


class _Lock:
    """The lock of a folder; it ends with the process at the latest. Raises BlockingIOError: another has it."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)
