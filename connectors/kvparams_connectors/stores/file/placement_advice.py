"""Says for `kvparams doctor` where the file of a `file` store lies.

It reads the mount table and asks the file system; it opens nothing.
"""

import os
from pathlib import Path
from typing import Final

from kvparams_connectors.advice import Advice

__all__ = ["file_advice", "file_system_of"]

_MOUNTS: Final = Path("/proc/mounts")
_NETWORK: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "fuse.sshfs", "9p"})


def file_system_of(path: Path, mounts: str) -> str:
    """The type of the file system that holds `path`, after a text like that of /proc/mounts; empty if none does."""
    best, found = "", ""
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        point = words[1].replace("\\040", " ")
        inside = point == "/" or path == Path(point) or Path(point) in path.parents
        if inside and len(point) >= len(best):
            best, found = point, words[2]
    return found


def file_advice(path: Path) -> list[Advice]:
    """Returns whether this is a good place for the file."""
    try:
        kind = file_system_of(path.resolve(), _MOUNTS.read_text())
        status = os.statvfs(path)
    except OSError as error:
        return [Advice("warning", f"the file system of {path} cannot be examined: {error.strerror}", "")]
    if kind in _NETWORK:
        todo = "locks and mapped memory do not work between machines there: use a local disk, or a store with a server"
        return [Advice("error", f"{path} is on {kind}, a network file system", todo)]
    found = [
        Advice("ok", f"{path} is on {kind}")
        if kind in ("tmpfs", "hugetlbfs", "ramfs")
        else Advice("warning", f"{path} is on {kind or 'an unknown file system'}", "use tmpfs (/dev/shm) for speed")
    ]
    if kind == "tmpfs" and (free := status.f_bavail * status.f_frsize) < 64 << 20:
        todo = (
            "other writers will run out of space: make the tmpfs larger (mount -o remount,size=), or the store smaller"
        )
        found.append(Advice("warning", f"its tmpfs has {free >> 20} MiB left", todo))
    return found
