"""Reading values from Mooncake: where they lie, their bytes, and whether they still lie there.

A lease keeps a value in its place while it is read, unless somebody removes it by force, as `delete` has to: then its
memory may be another's while we read. Bytes count only if the value lay in the same place before and after, or if the
caller checks them itself (`GetOp.caller_verifies`), which spares the master two questions.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvparams_connectors.store import GetOp, Result, ResultCode, Results
from kvparams_connectors.stores.mooncake.client import MooncakeClient
from kvparams_connectors.stores.mooncake.library import ReplicaPlacement, replica_placement
from kvparams_connectors.stores.mooncake.registered_memory import (
    MemoryRegion,
    RegisteredMemory,
    leading_ranges,
    memory_regions,
)
from kvparams_connectors.stores.mooncake.status_codes import MooncakeStatus, result_code
from kvparams_connectors.stores.mooncake.writer import EMPTY

__all__ = ["MooncakeReader"]


@dataclass(slots=True)
class _ReadItem:
    """A `_ReadItem` is a value to read."""

    index: int
    key: str
    pieces: list[MemoryRegion]
    checked: bool = False
    before: ReplicaPlacement = field(default_factory=list[tuple[str, int, int]])
    size: int = 0
    room: int = 0
    result: Result = Result(ResultCode.TIMEOUT)  # noqa: RUF009 - it is frozen


class MooncakeReader:
    """Reads batches; several threads may."""

    def __init__(self, client: MooncakeClient, memory: RegisteredMemory, prefix: str) -> None:
        self._client: Final = client
        self._memory: Final = memory
        self._prefix: Final = prefix

    def get(self, ops: Sequence[GetOp], deadline: float) -> Results:
        """See `KVStore.get`."""
        results = [Result(ResultCode.TIMEOUT)] * len(ops)
        left = list(range(len(ops)))
        while left and time.monotonic() < deadline:
            items: dict[str, _ReadItem] = {}
            again: list[int] = []
            for index in left:
                op = ops[index]
                if op.key in items:  # the library takes a key only once
                    again.append(index)
                    continue
                try:
                    items[op.key] = _ReadItem(
                        index, self._prefix + op.key, memory_regions(op.buffers), op.caller_verifies
                    )
                except ValueError:  # the caller released a buffer that it had leased to us
                    results[index] = Result(ResultCode.INVALID)
            self._read(self._read_checked(list(items.values()), deadline), deadline)
            for item in items.values():
                results[item.index] = item.result
            left = again
        return results

    def exists(self, keys: Sequence[str], deadline: float) -> Results:
        """Answers `KVStore.exists` with one question to the master, without sizes.

        The master answers questions for sizes with all that it knows of the values' locations, which takes longer than
        the bar for a whole lookup. Values that are found are leased, the first key last.
        """
        answers = self._client.exists([self._prefix + key for key in reversed(keys)], deadline)
        results = {answer: _found(answer) for answer in set(answers)}
        return [results[answer] for answer in reversed(answers)]

    def _read_checked(self, items: list[_ReadItem], deadline: float) -> list[_ReadItem]:
        """Read what the caller checks itself, as it is; those that are left for `_read`."""
        regions = self._memory.regions
        simple: list[_ReadItem] = []
        left: list[_ReadItem] = []
        for item in items:
            fits = item.checked and len(item.pieces) == 1 and regions.covers(item.pieces)
            (simple if fits else left).append(item)
        if not simple:
            return left
        memory = [([item.pieces[0].address], [item.pieces[0].nbytes]) for item in simple]
        addresses, sizes = [parts for parts, _ in memory], [lengths for _, lengths in memory]
        answers = self._client.get_whole([item.key for item in simple], addresses, sizes, deadline)
        for item, answer in zip(simple, answers, strict=True):
            # Its room may be too small, or it may be what stands for no bytes: that is told apart there.
            if answer in (MooncakeStatus.OK, MooncakeStatus.INVALID, len(EMPTY)):
                left.append(item)
            else:
                item.result = Result(result_code(answer), max(0, answer))
        return left

    def _read(self, items: list[_ReadItem], deadline: float) -> None:
        """Set the result of each of these, whose keys differ."""
        if not items:
            return
        before = self._client.copies([item.key for item in items], deadline)
        self._say_absent([item for item in items if item.key not in before], deadline)
        regions = self._memory.regions
        direct: list[_ReadItem] = []
        staged: list[_ReadItem] = []
        short: list[_ReadItem] = []
        for item in items:
            if item.key not in before:
                continue
            item.before = replica_placement(before[item.key])
            item.size = item.before[0][2]
            item.room = sum(piece.nbytes for piece in item.pieces)
            if item.size == len(EMPTY):
                short.append(item)
            elif item.room < item.size:
                item.result = Result(ResultCode.TOO_LARGE, item.size)
            elif regions.covers(item.pieces):
                direct.append(item)
            else:
                staged.append(item)
        if direct:
            self._read_direct(direct, deadline)
        if staged:
            self._read_staged(staged, deadline)
        for item, content in zip(short, self._short(short, deadline), strict=True):
            _use_short(item, content)
        read = [item for item in items if item.result.code is ResultCode.OK]
        if read:
            after = self._client.copies([item.key for item in read], deadline)
            self._say_absent([item for item in read if item.key not in after], deadline)
            for item in read:
                if item.key in after and not _same_place(item.before, replica_placement(after[item.key])):
                    item.result = Result(ResultCode.MISS)  # it was removed and put again

    def _say_absent(self, items: list[_ReadItem], deadline: float) -> None:
        """A value that was not found is a miss, or nobody could be asked."""
        if items:
            for item, answer in zip(items, self._client.exists([item.key for item in items], deadline), strict=True):
                item.result = Result(ResultCode.MISS if answer >= 0 else result_code(answer))

    def _read_direct(self, items: list[_ReadItem], deadline: float) -> None:
        memory = [leading_ranges(item.pieces, item.size) for item in items]
        addresses, sizes = [parts for parts, _ in memory], [lengths for _, lengths in memory]
        answers = self._client.get_whole([item.key for item in items], addresses, sizes, deadline)
        for item, answer in zip(items, answers, strict=True):
            item.result = _said(item, answer, item.size)

    def _read_staged(self, items: list[_ReadItem], deadline: float) -> None:
        """Read values through the staging area, as much at a time as fits."""
        slot = self._memory.staging.lease(max(0.0, deadline - time.monotonic()))
        if slot is None:
            return
        try:
            [area] = memory_regions([slot.view])
            parts: list[tuple[_ReadItem, int, int, int]] = []  # item, where it lies in the value and the area, length
            used = 0
            for item in items:
                done = 0
                item.result = Result(ResultCode.OK, item.size)
                while done < item.size and item.result.code is ResultCode.OK:
                    length = min(item.size - done, area.nbytes - used)
                    parts.append((item, done, used, length))
                    done += length
                    used += length
                    if used == area.nbytes:
                        self._read_parts(parts, area, deadline)
                        parts, used = [], 0
            if parts:
                self._read_parts(parts, area, deadline)
        finally:
            slot.release()

    def _read_parts(self, parts: list[tuple[_ReadItem, int, int, int]], area: MemoryRegion, deadline: float) -> None:
        if time.monotonic() >= deadline:
            for item, *_ in parts:
                item.result = Result(ResultCode.TIMEOUT)
            return
        answers = self._client.get_ranges(
            [item.key for item, *_ in parts],
            area.address,
            [target for _, _, target, _ in parts],
            [source for _, source, _, _ in parts],
            [length for *_, length in parts],
            deadline,
        )
        for (item, source, target, length), answer in zip(parts, answers, strict=True):
            said = _said(item, answer, length)
            if said.code is not ResultCode.OK:
                item.result = said
            else:
                _copy_out(area.data[target : target + length], item.pieces, source)

    def _short(self, items: list[_ReadItem], deadline: float) -> list[bytes | None]:
        """The contents of values as short as the one that stands for no bytes; None where `result` says why not."""
        contents: list[bytes | None] = []
        for item in items:
            content = memoryview(bytearray(item.size))
            copy = _ReadItem(0, item.key, memory_regions([content]), size=item.size)
            self._read_staged([copy], deadline)
            item.result = copy.result
            contents.append(bytes(content) if copy.result.code is ResultCode.OK else None)
        return contents


def _found(answer: int) -> Result:
    return (
        Result(ResultCode.OK, has_size=False)
        if answer > 0
        else Result(ResultCode.MISS if answer == 0 else result_code(answer))
    )


def _same_place(before: ReplicaPlacement, after: ReplicaPlacement) -> bool:
    """Returns whether at least one of the copies lies where it lay."""
    return before == after or any(copy in after for copy in before)


def _said(item: _ReadItem, answer: int, expected: int) -> Result:
    if answer == expected:
        return Result(ResultCode.OK, item.size)
    if answer >= 0 or answer == MooncakeStatus.INVALID:  # another size: it is another value by now
        return Result(ResultCode.MISS)
    return Result(result_code(answer))


def _use_short(item: _ReadItem, content: bytes | None) -> None:
    if content is None:
        return
    if content == EMPTY:
        item.result = Result(ResultCode.OK, 0)
    elif item.room < item.size:
        item.result = Result(ResultCode.TOO_LARGE, item.size)
    else:
        _copy_out(np.frombuffer(content, dtype=np.uint8), item.pieces, 0)


def _copy_out(content: NDArray[np.uint8], pieces: Sequence[MemoryRegion], start: int) -> None:
    """Copy `content` to where the bytes of the value from `start` on belong."""
    done = 0
    for piece in pieces:
        if start >= piece.nbytes:
            start -= piece.nbytes
            continue
        length = min(piece.nbytes - start, content.size - done)
        if length == 0:
            return
        np.copyto(piece.data[start : start + length], content[done : done + length])
        done += length
        start = 0
