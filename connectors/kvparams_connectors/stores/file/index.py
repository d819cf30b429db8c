"""The published index of a `file` store, in memory that several processes share.

A slot goes FREE → WRITING → READY → FREE. Finding and reading take no lock: look at the slot's word, read, and look
again; if the word has changed meanwhile, what was read means nothing. Everything else happens under the file's lock.
Records are the truth; buckets, ticks and free units follow from them and are made anew after a process has died with
the lock. A slot's word changes before its units are given to another value.
"""

import struct
import zlib
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from kvparams.native import NATIVE
from kvparams_connectors.stores.extents import Extent, ExtentAllocator
from kvparams_connectors.stores.file.file_map import NEVER_USED, RECORD_BYTES, WAYS, FileMap, current_boot
from kvparams_connectors.stores.file.locks import ProcessSeat

__all__ = ["FileIndex", "IndexEntry"]

_FREE: Final = 0
_WRITING: Final = 1
_READY: Final = 2

_DIRTY: Final = 0  # counters: somebody is changing the index, or died doing so
_TICK: Final = 1  # the use of values is counted in these
_OWNER: Final = 2  # how many owners there have been
_REPAIRS: Final = 3  # how often the index was made anew

_KEY_BYTES: Final = 128
_SLOT: Final = 0xFFFFFFFF  # the half of a bucket's entry that is the slot's number plus 1
_RECORD: Final = struct.Struct(f"<{_KEY_BYTES}sQQQII")  # key, generation, nbytes, owner, seat, number of runs
_RUN: Final = struct.Struct("<II")
_MAX_RUNS: Final = (RECORD_BYTES - 4 - _RECORD.size) // 8
_CHECKED: Final = RECORD_BYTES - 4


FoundValue = tuple[int, int, int]
"""The slot of a value, the word of that slot, and the size of the value: the beginning of an `IndexEntry`."""


class IndexEntry(NamedTuple):
    """A value in the index as it was found; valid as long as the slot's word is `word`."""

    slot: int
    word: int
    nbytes: int
    owner: int
    seat: int
    runs: tuple[Extent, ...]

    @property
    def is_ready(self) -> bool:
        """Returns whether its writer has published it."""
        return self.word & 3 == _READY


class FileIndex:
    """A `FileIndex` is a process's view of the index."""

    def __init__(self, file: FileMap, deadline: float) -> None:
        """Takes a seat among the file's users, and frees what dead users or a restart of the machine have left.

        Args:
            file: the mapped file.
            deadline: the time on the clock of `time.monotonic` until which to wait for the lock.

        Raises:
            TimeoutError: another process held the file's lock until the deadline.
            OSError: too many processes use the file.
        """
        self._file = file
        self._units, self._unit_bytes = file.shape.units, file.shape.unit_bytes
        self._words = file.words
        self._ticks = file.ticks
        self._tick_array = np.frombuffer(file.ticks, dtype=np.uint64)
        self._extents = ExtentAllocator(file.free)
        self._mask = file.shape.buckets - 1
        self._member = ProcessSeat(file.fd, len(file.owners))
        self._owner = 0  # nobody's number: entering may have to repair first
        with self.locked(deadline):
            self._owner = file.counters[_OWNER] = file.counters[_OWNER] + 1
            file.owners[self._member.seat] = self._owner
            if bytes(file.boot) != current_boot():
                # A restart may have lost any part of what was in memory only: records and data need not fit.
                for slot in range(file.shape.units):
                    self._words[slot] = _next(self._words[slot], _FREE)
                self._repair()
                file.boot[:] = current_boot()
            self._reclaim()

    @property
    def repairs(self) -> int:
        """Returns how often the index was made anew since the file was created."""
        return self._file.counters[_REPAIRS]

    def is_being_written(self, entry: IndexEntry) -> bool:
        """Returns whether a value that was being written still is, by somebody who lives."""
        return self.is_unchanged(entry) and self._alive(entry)

    def is_published(self, entry: IndexEntry) -> bool:
        """Returns whether a value that was being written is READY now."""
        return self._words[entry.slot] == entry.word & ~3 | _READY

    def leave(self) -> None:
        """Give the seat back; nothing of ours is being written any more."""
        self._member.leave()

    # ---- without the lock

    def find(self, key: str) -> IndexEntry | None:
        """The READY value of `key`."""
        entry = self._find(key)
        return entry if entry is not None and entry.is_ready else None

    def find_sizes(self, keys: Sequence[str]) -> list[FoundValue | None]:
        """The READY values of keys, for callers that do not read them; costs less than `find`."""
        if NATIVE is not None:
            file = self._file
            found = NATIVE.find_file_values(file.buckets, file.words, file.records, self._unit_bytes, list(keys))
            if found is not None:
                return found
        entries = [self.find(key) for key in keys]
        return [None if entry is None else (entry.slot, entry.word, entry.nbytes) for entry in entries]

    def is_unchanged(self, entry: IndexEntry) -> bool:
        """Returns whether the slot still is what it was when `entry` was found."""
        return self._words[entry.slot] == entry.word

    def touch(self, entries: Sequence[IndexEntry | FoundValue | None]) -> None:
        """The values count as used now, the first one as used last."""
        tick = self._file.counters[_TICK] + len(entries)
        self._file.counters[_TICK] = tick
        for number, entry in enumerate(entries):
            # Should it be evicted at this very moment, a FREE slot gets a tick: `_evict` sees to that.
            if entry is not None and self._words[entry[0]] == entry[1]:
                self._ticks[entry[0]] = tick - number

    def publish(self, entry: IndexEntry) -> IndexEntry | None:
        """Make a value of ours READY; None if it has been taken from us, so that nobody is told that it is stored."""
        if not self.is_unchanged(entry):
            return None
        self._ticks[entry.slot] = self._file.counters[_TICK]
        self._words[entry.slot] = entry.word & ~3 | _READY
        return entry._replace(word=entry.word & ~3 | _READY)

    # ---- under the lock

    @contextmanager
    def locked(self, deadline: float) -> Generator[None]:
        """Hold the lock; whoever died with it is cleaned up after first.

        Raises:
            TimeoutError: somebody else held it until the deadline.
        """
        counters = self._file.counters
        with self._file.lock.held(deadline):
            if counters[_DIRTY]:
                self._repair()
            counters[_DIRTY] = 1
            yield  # an exception leaves the mark, and the next holder repairs
            counters[_DIRTY] = 0

    def find_any(self, key: str) -> IndexEntry | None:
        """The value of `key`, also one that a living owner is still writing."""
        entry = self._find(key)
        if entry is not None and not entry.is_ready and not self._alive(entry):
            self.remove(entry)
            return None
        return entry

    def add(self, key: str, nbytes: int, units: int, keep: Collection[int]) -> IndexEntry | None:
        """A WRITING slot with room for a new value, evicting the least recently used ones as needed.

        Args:
            key: not in the index.
            nbytes: the value's size.
            units: how many units it takes, at least 1.
            keep: slots that must not be evicted.

        Returns:
            None if there is not enough room without `keep` and what is being written.
        """
        reclaimed = False
        while (runs := self._extents.allocate(units, _MAX_RUNS)) is None:
            if not self._evict(keep):
                if reclaimed:
                    return None
                self._reclaim()
                reclaimed = True
        slot = runs[0].first  # nobody else can have it
        word = _next(self._words[slot], _WRITING)
        self._write_record(slot, key.encode(), word >> 2, nbytes, runs)
        self._words[slot] = word
        if not self._link(slot, xxh3_64_intdigest(key.encode())):
            self._words[slot] = _next(word, _FREE)
            self._extents.free(runs)
            return None
        return IndexEntry(slot, word, nbytes, self._owner, self._member.seat, tuple(runs))

    def remove(self, entry: IndexEntry) -> None:
        """Free the slot and its units."""
        self._words[entry.slot] = _next(entry.word, _FREE)
        self._ticks[entry.slot] = NEVER_USED
        start = entry.slot * RECORD_BYTES
        key = bytes(self._file.records[start : start + _KEY_BYTES]).rstrip(b"\0")
        digest = xxh3_64_intdigest(key)
        packed = digest >> 32 << 32 | entry.slot + 1
        for bucket in self._two_buckets(digest):
            held = self._file.buckets[bucket : bucket + WAYS].tolist()
            if packed in held:
                self._file.buckets[bucket + held.index(packed)] = 0
        self._extents.free(entry.runs)

    # ---- helpers

    def _find(self, key: str) -> IndexEntry | None:
        raw = key.encode()
        digest = xxh3_64_intdigest(raw)
        mark = digest >> 32
        for bucket in self._two_buckets(digest):
            for packed in self._file.buckets[bucket : bucket + WAYS].tolist():
                if packed >> 32 == mark and packed & _SLOT:
                    slot = (packed & _SLOT) - 1
                    word = self._words[slot] if slot < self._units else _FREE
                    found = self._read_record(slot, word) if word & 3 != _FREE else None
                    if found is not None and found[0] == raw and self._words[slot] == word:
                        return found[1]
        return None

    def _two_buckets(self, digest: int) -> tuple[int, ...]:
        """Returns where the one or two buckets start in which an entry with this hash may stand."""
        first, second = digest & self._mask, (digest >> 12 ^ 1) & self._mask
        return (first * WAYS,) if first == second else (first * WAYS, second * WAYS)

    def _link(self, slot: int, digest: int) -> bool:
        """Enter a slot into the emptier of its two buckets; False if both are full."""
        most, target = 0, 0
        for bucket in self._two_buckets(digest):
            held = self._file.buckets[bucket : bucket + WAYS].tolist()
            if held.count(0) > most:
                most, target = held.count(0), bucket + held.index(0)
        if most:
            self._file.buckets[target] = digest >> 32 << 32 | slot + 1
        return most > 0

    def _write_record(self, slot: int, key: bytes, generation: int, nbytes: int, runs: Sequence[Extent]) -> None:
        raw = _RECORD.pack(key, generation, nbytes, self._owner, self._member.seat, len(runs))
        raw = b"".join((raw, *(_RUN.pack(*run) for run in runs))).ljust(_CHECKED, b"\0")
        start = slot * RECORD_BYTES
        self._file.records[start : start + RECORD_BYTES] = raw + zlib.crc32(raw).to_bytes(4, "little")

    def _read_record(self, slot: int, word: int) -> tuple[bytes, IndexEntry] | None:
        """The key and the entry in `slot`; None if the record is not whole or is another generation's."""
        raw = self._file.records[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES].tobytes()
        if zlib.crc32(raw[:_CHECKED]) != int.from_bytes(raw[_CHECKED:], "little"):
            return None
        key, generation, nbytes, owner, seat, count = _RECORD.unpack_from(raw)
        if generation != word >> 2 or not 1 <= count <= _MAX_RUNS:
            return None
        room = 0
        runs: list[Extent] = []
        for at in range(_RECORD.size, _RECORD.size + 8 * count, 8):
            first, units = _RUN.unpack_from(raw, at)
            if first + units > self._units:
                return None
            runs.append(Extent(first, units))
            room += units
        if room * self._unit_bytes < nbytes:
            return None
        return key.rstrip(b"\0"), IndexEntry(slot, word, nbytes, owner, seat, tuple(runs))

    def _alive(self, entry: IndexEntry) -> bool:
        """Returns whether whoever writes the value still lives."""
        if entry.owner == self._owner:
            return True
        return self._file.owners[entry.seat] == entry.owner and self._member.is_taken(entry.seat)

    def _evict(self, keep: Collection[int]) -> bool:
        """Remove the least recently used READY value that is not in `keep`; False if there is none."""
        while True:
            slot = int(np.argmin(self._tick_array))
            if slot in keep:
                others = (int(other) for other in np.argsort(self._tick_array) if int(other) not in keep)
                slot = next(others, slot)
            if self._ticks[slot] == NEVER_USED or slot in keep:
                return False
            word = self._words[slot]
            if word & 3 != _READY:  # touched while it was being evicted
                self._ticks[slot] = NEVER_USED
                continue
            found = self._read_record(slot, word)
            if found is None:
                self._repair()
            else:
                self.remove(found[1])
            return True

    def _reclaim(self) -> None:
        """Free what dead owners were writing."""
        words = np.frombuffer(self._words, dtype=np.uint64)
        for slot in np.flatnonzero(words & np.uint64(3) == _WRITING).tolist():
            found = self._read_record(slot, self._words[slot])
            if found is None:
                self._repair()
                return
            if not self._alive(found[1]):
                self.remove(found[1])

    def _repair(self) -> None:
        """Make everything anew from the records that are whole, belong to their slot and overlap with no other."""
        file = self._file
        entries: list[tuple[bytes, IndexEntry]] = []
        claims = np.zeros(file.shape.units, dtype=np.uint8)
        words = np.frombuffer(self._words, dtype=np.uint64)
        for slot in np.flatnonzero(words & np.uint64(3)).tolist():
            found = self._read_record(slot, self._words[slot])
            if found is None or found[1].runs[0].first != slot or not (found[1].is_ready or self._alive(found[1])):
                self._words[slot] = _next(self._words[slot], _FREE)
                continue
            entries.append(found)
            for run in found[1].runs:
                claims[run.first : run.first + run.units] += 1
        buckets = np.frombuffer(file.buckets, dtype=np.uint64)
        buckets.fill(0)
        file.free.fill(True)
        ticks = np.full_like(self._tick_array, NEVER_USED)
        for key, entry in entries:
            alone = all((claims[run.first : run.first + run.units] == 1).all() for run in entry.runs)
            if not alone or not self._link(entry.slot, xxh3_64_intdigest(key)):
                self._words[entry.slot] = _next(entry.word, _FREE)
                continue
            for run in entry.runs:
                file.free[run.first : run.first + run.units] = False
            if entry.is_ready:
                ticks[entry.slot] = min(self._ticks[entry.slot], file.counters[_TICK])
        np.copyto(self._tick_array, ticks)
        file.counters[_REPAIRS] += 1


def _next(word: int, state: int) -> int:
    """The word of the slot's next generation."""
    return ((word >> 2) + 1) << 2 | state
