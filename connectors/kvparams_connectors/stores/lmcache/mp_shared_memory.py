"""The shared memory of LMCache's multi-process server, mapped, and a value in one of its chunks.

    u64 length of the value, little-endian; 24 bytes of SHA-256 of its key; the value; what is behind it means nothing

The digest is there because a chunk that was given out and never written can come to be seen: the server publishes what
a client has reserved when it takes the client for dead (`_release_entry` in modules/engine_driven_transfer.py of
0.5.6), and what lies in it then is another key's old value. Memory is used only while the name still leads to the file
that was mapped; a server that was started anew under the same name has another one, and what is written to the old one
is lost.
"""

import hashlib
import mmap
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from kvparams_connectors.store_url import StoreError
from kvparams_connectors.stores.extents import Extent, copy_in, copy_out

__all__ = ["HEAD_BYTES", "ChunkSlot", "SharedPoolMemory"]

_FOLDER: Final = Path("/dev/shm")
_NAME: Final = re.compile(r"/?[A-Za-z0-9._-]{1,200}")
_HEAD: Final = struct.Struct("<Q24s")
HEAD_BYTES: Final = _HEAD.size
"""In front of a value in its chunk."""

ChunkSlot = tuple[int, int]
"""Offset and length of a chunk."""


class SharedPoolMemory:
    """A `SharedPoolMemory` maps all of the server's memory for values."""

    def __init__(self, name: str, size: int) -> None:
        """Maps the server's pool into this process.

        Args:
            name: the name of the shared memory; empty: the server shares none.
            size: the size of the pool, in bytes.

        Raises:
            StoreError: the server shares no memory, or it runs on another machine.
        """
        if not name or not _NAME.fullmatch(name):
            raise StoreError(
                "lmcache-mp store: the server shares no memory; start it with --supported-transfer-mode engine_driven "
                "and --shm-name NAME"
            )
        self._path = _FOLDER / name.lstrip("/")
        try:
            with self._path.open("r+b") as file:
                self._file = os.fstat(file.fileno()).st_ino
                self._map = mmap.mmap(file.fileno(), size)
        except (OSError, ValueError) as error:
            raise StoreError(
                f"lmcache-mp store: the server's shared memory {self._path} cannot be mapped ({error}); an engine uses "
                "the server of its own machine"
            ) from error
        self._bytes = np.frombuffer(self._map, np.uint8)

    @property
    def current(self) -> bool:
        """Returns whether the name still leads here."""
        try:
            return self._path.stat().st_ino == self._file
        except OSError:
            return False

    def slot(self, context: Any) -> ChunkSlot | None:
        """The one chunk that an answer tells of; None if it tells of none, or of memory that is not there."""
        answer = cast("dict[str, Any]", context) if isinstance(context, dict) else {}
        slots = cast("list[Any]", answer["slots"]) if isinstance(answer.get("slots"), list) else []
        if len(slots) != 1:
            return None
        offset, length = int(slots[0]["offset"]), int(slots[0]["length"])
        if offset < 0 or length < HEAD_BYTES or offset + length > self._bytes.size:
            return None
        return offset, length

    def write(self, slot: ChunkSlot, key: str, buffers: Sequence[memoryview], nbytes: int) -> None:
        """Put a value into a chunk that is ours."""
        offset, length = slot
        if nbytes > length - HEAD_BYTES:
            raise ValueError(f"{nbytes} bytes do not fit into a chunk of {length}")
        _HEAD.pack_into(self._map, offset, nbytes, _digest(key))
        copy_in(self._bytes, 1, [Extent(offset + HEAD_BYTES, max(1, nbytes))], buffers, nbytes)

    def size(self, slot: ChunkSlot, key: str) -> int | None:
        """Returns how long the value of `key` in a chunk is; None if it is not that key's, or cannot be so long."""
        offset, length = slot
        nbytes, digest = _HEAD.unpack_from(self._map, offset)
        return nbytes if digest == _digest(key) and nbytes <= length - HEAD_BYTES else None

    def read(self, slot: ChunkSlot, buffers: Sequence[memoryview], nbytes: int) -> None:
        """Copy the value out of a chunk that is locked for us."""
        copy_out(self._bytes, 1, [Extent(slot[0] + HEAD_BYTES, max(1, nbytes))], buffers, nbytes)

    def close(self) -> None:
        """Unmap it; nothing of it may be used any more."""
        del self._bytes
        self._map.close()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()[:24]
