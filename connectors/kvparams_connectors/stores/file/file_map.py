"""The file of a `file` store: what lies where in it, and how it comes to be.

    superblock  one page: what the file is (fixed after creation), then counters that change
    buckets     u64 each, 8 to a bucket: upper half of the key's hash, slot number plus 1; 0 is empty
    words       u64 per slot: generation times 4, plus a state (FREE, WRITING, READY)
    ticks       u64 per slot: when it was last used; NEVER unless READY
    free        one byte per unit: 1 if it is free
    records     256 bytes per slot: key, size, owner, runs of units, checksum
    data        units of equal size

Every block of the file is allocated before it is mapped, so that a full disk is an error at creation and never a SIGBUS
in the middle of a copy.
"""

import errno
import mmap
import os
import stat
import struct
import time
import zlib
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from kvparams_connectors.store_url import StoreError
from kvparams_connectors.stores.extents import SKEW, ByteArray
from kvparams_connectors.stores.file.locks import FileLock

__all__ = ["NEVER_USED", "RECORD_BYTES", "WAYS", "FileGeometry", "FileMap", "current_boot", "open_map"]

RECORD_BYTES: Final = 256
WAYS: Final = 8
"""Entries of a bucket."""
NEVER_USED: Final = 2**64 - 1
"""The tick of a slot that must not be evicted: larger than any other."""

_DEFAULT_SIZE: Final = 1 << 30
_DEFAULT_UNIT: Final = 64 << 10
_MAGIC: Final = b"KVPFILE\0"
_VERSION: Final = 1
_PAGE: Final = 4096
_FIXED: Final = struct.Struct("<8sII3Q")  # magic, version, state, size, unit bytes, units
_CREATING: Final = 1
_READY: Final = 2
_COUNTERS_AT: Final = 1024
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class FileGeometry(NamedTuple):
    """The sizes that everything else follows from."""

    size_bytes: int
    unit_bytes: int
    units: int
    """Also the number of slots: every value takes at least one unit."""

    @property
    def buckets(self) -> int:
        """A power of two; half as many as slots or more, so that buckets stay a quarter full at most."""
        return 1 << max(0, (self.units - 1).bit_length() - 1)

    def offsets(self) -> list[int]:
        """Returns where buckets, words, ticks, free, records and data start, and where the data ends."""
        sizes = (self.buckets * WAYS * 8, self.units * 8, self.units * 8, self.units, self.units * RECORD_BYTES)
        at = [_PAGE]
        for size in sizes:
            at.append(-(-(at[-1] + size) // _PAGE) * _PAGE)
        at[-1] += SKEW
        return [*at, at[-1] + self.units * self.unit_bytes]

    @classmethod
    def fitting(cls, size_bytes: int, unit_bytes: int) -> "FileGeometry":
        """As many units as fit into a file of `size_bytes` together with their index."""
        units = size_bytes // unit_bytes
        while units > 0 and cls(size_bytes, unit_bytes, units).offsets()[-1] > size_bytes:
            units -= max(1, (cls(size_bytes, unit_bytes, units).offsets()[-1] - size_bytes) // (2 * unit_bytes))
        return cls(size_bytes, unit_bytes, units)


class FileMap:
    """The mapped file and its parts."""

    def __init__(self, fd: int, lock: FileLock, shape: FileGeometry) -> None:
        self.fd: Final = fd
        self.lock: Final = lock
        self.shape: Final = shape
        self._map = mmap.mmap(fd, shape.size_bytes)
        whole = memoryview(self._map)
        buckets, words, ticks, free, records, data, end = shape.offsets()
        self.counters: Final = whole[_COUNTERS_AT : _COUNTERS_AT + 64].cast("Q")
        """See `kvparams_connectors.stores.file.index`."""
        self.boot: Final = whole[_COUNTERS_AT + 64 : _COUNTERS_AT + 64 + 16]
        self.owners: Final = whole[2048:_PAGE].cast("Q")
        """Per seat: which owner holds it, or held it last."""
        self.buckets: Final = whole[buckets : buckets + shape.buckets * WAYS * 8].cast("Q")
        self.words: Final = whole[words : words + shape.units * 8].cast("Q")
        self.ticks: Final = whole[ticks : ticks + shape.units * 8].cast("Q")
        self.free: Final = np.frombuffer(whole[free : free + shape.units], dtype=np.bool_)
        self.records: Final = whole[records : records + shape.units * RECORD_BYTES]
        self.data: Final[ByteArray] = np.frombuffer(whole[data:end], dtype=np.uint8)

    def close(self) -> None:
        """Let go of the file; the mapping ends with the last view of it."""
        os.close(self.fd)


def current_boot() -> bytes:
    """16 bytes that change when the machine restarts."""
    return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))


def open_map(path: Path, size_bytes: int | None, unit_bytes: int | None, *, timeout_s: float) -> FileMap:
    """Open the file, or create it; of several processes that try at once, one creates it and the others wait.

    Args:
        path: the file.
        size_bytes: of the whole file; None takes an existing file as it is and gives a new one the default.
        unit_bytes: likewise.
        timeout_s: how long to wait for another process that creates it.

    Raises:
        StoreError: it is something else, of another version or size, somebody else's, or the disk is full.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise StoreError(f"file store: cannot open {path}: {error.strerror}") from error
    try:
        lock = FileLock(fd)
        _check_file(path, fd)
        with lock.held(time.monotonic() + timeout_s):
            shape = _read(path, fd, size_bytes, unit_bytes)
            if shape is None:
                shape = FileGeometry.fitting(size_bytes or _DEFAULT_SIZE, unit_bytes or _DEFAULT_UNIT)
                _create(path, fd, shape)
        return FileMap(fd, lock, shape)
    except TimeoutError as error:
        os.close(fd)
        raise StoreError(f"file store: {path} is being created by another process for over {timeout_s} s") from error
    except BaseException:
        os.close(fd)
        raise


def _check_file(path: Path, fd: int) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(f"file store: {path} is not a regular file")
    if status.st_uid != os.geteuid():
        raise StoreError(
            f"file store: {path} belongs to user {status.st_uid}, who could change its content; choose another path"
        )


def _read(path: Path, fd: int, size_bytes: int | None, unit_bytes: int | None) -> FileGeometry | None:
    """Returns what an existing file says; None if it is empty or was never finished."""
    raw = os.pread(fd, _FIXED.size + 4, 0)
    if not raw:
        return None
    if len(raw) < _FIXED.size + 4 or raw[: len(_MAGIC)] != _MAGIC:
        raise StoreError(f"file store: {path} is not a store; choose another path")
    _, version, state, size, unit, units = _FIXED.unpack_from(raw)
    if version != _VERSION:
        raise StoreError(
            f"file store: {path} has format version {version} and this build reads {_VERSION}; delete it or choose "
            "another path"
        )
    if zlib.crc32(raw[: _FIXED.size]) != int.from_bytes(raw[_FIXED.size :], "little"):
        raise StoreError(f"file store: {path} is damaged; delete it")
    if state == _CREATING:
        return None
    for name, asked, there in (("size", size_bytes, size), ("unit", unit_bytes, unit)):
        if asked is not None and asked != there:
            raise StoreError(
                f"file store: {path} has {name}={there}, not {name}={asked}; remove the setting, delete the file, "
                "or choose another path"
            )
    shape = FileGeometry(size, unit, units)
    if os.fstat(fd).st_size != size or shape.offsets()[-1] > size:
        raise StoreError(f"file store: {path} was cut to {os.fstat(fd).st_size} of {size} bytes; delete it")
    return shape


def _create(path: Path, fd: int, shape: FileGeometry) -> None:
    if shape.units < 1:
        raise StoreError(
            f"file store: size {shape.size_bytes} is too small for one unit of {shape.unit_bytes} bytes and its index"
        )
    os.ftruncate(fd, 0)
    _write_fixed(fd, shape, _CREATING)
    try:
        os.posix_fallocate(fd, 0, shape.size_bytes)
    except OSError as error:
        os.ftruncate(fd, 0)
        if error.errno != errno.ENOSPC:
            raise StoreError(f"file store: cannot allocate {path}: {error.strerror}") from error
        raise StoreError(
            f"file store: no room for {shape.size_bytes} bytes at {path}; choose a smaller size"
        ) from error
    _, _, ticks, free, *_ = shape.offsets()  # everything else starts as zeros
    os.pwrite(fd, b"\xff" * (shape.units * 8), ticks)
    os.pwrite(fd, b"\1" * shape.units, free)
    os.pwrite(fd, current_boot(), _COUNTERS_AT + 64)
    _write_fixed(fd, shape, _READY)


def _write_fixed(fd: int, shape: FileGeometry, state: int) -> None:
    raw = _FIXED.pack(_MAGIC, _VERSION, state, *shape)
    os.pwrite(fd, raw + zlib.crc32(raw).to_bytes(4, "little"), 0)
