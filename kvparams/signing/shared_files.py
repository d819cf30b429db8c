"""Small files of keys that one process changes while others read them.

A reader sees the old state or the new one as a whole. Errors are the operating system's; callers add their own words.
"""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

__all__ = ["FileState", "file_state", "lock_folder", "replace_text"]

FileState = tuple[int, int, int, int]
"""Which state of a file was read: another one has another."""


def file_state(status: os.stat_result) -> FileState:
    """Device, inode, bytes and nanoseconds of the last change."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextmanager
def lock_folder(folder: int) -> Generator[None]:
    """Locks the files of this folder against other changes, and closes `folder` at the end.

    A lock on a file that is replaced would be lost with the file.
    """
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def replace_text(path: Path, text: str, mode: int) -> None:
    """Put `text` in the place of what stands at `path`, readable as `mode` says.

    Raises:
        OSError: it cannot be written; the file is as it was.
    """
    with NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
