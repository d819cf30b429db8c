"""Putting values into Mooncake: started, written, made visible, each in one call for the whole batch.

`batch_put_from` answers success for a key that exists, without writing; so it is done in its three steps, of which the
first says exactly whose key it is.

Invariant: a value is made visible only if each of its bytes was written; the library would make it visible in any case.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvparams_connectors.store import PutOp, Result, ResultCode, Results
from kvparams_connectors.stores.mooncake.client import PATIENCE_S, MooncakeClient
from kvparams_connectors.stores.mooncake.registered_memory import (
    MemoryRegion,
    RegisteredMemory,
    leading_ranges,
    memory_regions,
)
from kvparams_connectors.stores.mooncake.status_codes import MooncakeStatus, result_code

__all__ = ["EMPTY", "MooncakeWriter"]

EMPTY: Final = bytes.fromhex("6b763e70bdb2a0c9a1b5e4d8f2076c3d8b1f4a95e36270cd19f8a4537be62d0e")
"""What stands for a value of no bytes, which Mooncake does not take. A value of just these bytes is refused."""

_FULL_PATIENCE_S: Final = 0.5
"""The master begins to evict when it has refused; so long is asked again."""
_FULL_REST_S: Final = 1.0
"""After that in vain, so long is not waited again."""
_OURS_S: Final = 25.0
"""What was started longer ago is not made visible: after 30 s the master may give its place away
(`--put_start_discard_timeout_sec`)."""
_PAUSES_S: Final = (0.001, 0.02)


@dataclass(slots=True)
class _WriteItem:
    """A `_WriteItem` is a value to put."""

    index: int
    key: str
    pieces: list[MemoryRegion]
    nbytes: int
    written: int = 0
    failure: ResultCode | None = None


class MooncakeWriter:
    """Puts batches; several threads may."""

    def __init__(self, client: MooncakeClient, memory: RegisteredMemory, prefix: str, max_value_bytes: int) -> None:
        self._client: Final = client
        self._memory: Final = memory
        self._prefix: Final = prefix
        self._max_value_bytes: Final = max_value_bytes
        self._empty: Final = memory_regions([memoryview(EMPTY)])
        self._full_until = 0.0

    def put(self, ops: Sequence[PutOp], deadline: float) -> Results:
        """See `KVStore.put`."""
        results = [Result(ResultCode.TIMEOUT)] * len(ops)
        left: list[_WriteItem] = []
        first: dict[str, int] = {}
        again: list[tuple[int, int]] = []
        for index, op in enumerate(ops):
            item = self._item(index, op)
            if isinstance(item, ResultCode):
                results[index] = Result(item)
            elif op.key in first:
                again.append((index, first[op.key]))
            else:
                first[op.key] = index
                left.append(item)
        self._put(left, results, deadline)
        for index, earlier in again:
            there = results[earlier].code in (ResultCode.OK, ResultCode.EXISTS)
            results[index] = Result(ResultCode.EXISTS) if there else results[earlier]
        return results

    def _item(self, index: int, op: PutOp) -> "_WriteItem | ResultCode":
        try:
            pieces = memory_regions(op.buffers)
        except ValueError:  # the caller released a buffer that it had leased to us
            return ResultCode.INVALID
        nbytes = sum(piece.nbytes for piece in pieces)
        if nbytes > self._max_value_bytes:
            return ResultCode.TOO_LARGE
        if nbytes == len(EMPTY) and b"".join(piece.data.tobytes() for piece in pieces) == EMPTY:
            return ResultCode.INVALID
        if nbytes == 0:
            pieces, nbytes = self._empty, len(EMPTY)
        return _WriteItem(index, self._prefix + op.key, pieces, nbytes)

    def _put(self, left: list[_WriteItem], results: Results, deadline: float) -> None:
        """Try until there is nothing left to try or it is no use."""
        started = time.monotonic()
        pause = _PAUSES_S[0]
        while left and time.monotonic() < deadline:
            left = self._round(left, results, deadline)
            waited = time.monotonic() - started
            if any(results[item.index].code is ResultCode.FULL for item in left):
                if waited >= _FULL_PATIENCE_S:
                    self._full_until = time.monotonic() + _FULL_REST_S
                if time.monotonic() < self._full_until:
                    left = [item for item in left if results[item.index].code is not ResultCode.FULL]
            if waited >= PATIENCE_S:
                return
            if left:
                time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
                pause = min(2 * pause, _PAUSES_S[1])

    def _round(self, left: list[_WriteItem], results: Results, deadline: float) -> list[_WriteItem]:
        """Put these; those that have to be tried again, with what to say if that is in vain."""
        free = self._client.claim(item.key for item in left)
        mine = [item for item in left if item.key in free]
        busy = [item for item in left if item.key not in free]
        again: list[_WriteItem] = []
        try:
            again = self._start_and_fill(mine, busy, results, deadline) if mine else []
        finally:
            self._client.unclaim(free)
        if busy:
            there = self._client.exists([item.key for item in busy], deadline)
            for item, answer in zip(busy, there, strict=True):
                if answer == 0:  # not visible yet: it will be, or its writer gives up
                    results[item.index] = Result(ResultCode.TIMEOUT)
                    again.append(item)
                else:
                    results[item.index] = Result(ResultCode.EXISTS if answer > 0 else result_code(answer))
        return again

    def _start_and_fill(
        self, mine: list[_WriteItem], busy: list[_WriteItem], results: Results, deadline: float
    ) -> list[_WriteItem]:
        """Put what can be started; those for which there is no room. Adds to `busy` what somebody else has started."""
        ours: list[_WriteItem] = []
        full: list[_WriteItem] = []
        stale: list[str] = []
        answers = self._client.put_start([item.key for item in mine], [item.nbytes for item in mine], deadline)
        for item, answer in zip(mine, answers, strict=True):
            if answer == MooncakeStatus.OK:
                ours.append(item)
            elif answer == MooncakeStatus.NO_ROOM:
                results[item.index] = Result(ResultCode.FULL)
                full.append(item)
            elif answer in (MooncakeStatus.EXISTS, MooncakeStatus.NOT_READY):
                busy.append(item)
            elif answer == MooncakeStatus.INVALID:  # we started it once and could not end it: the master was away
                busy.append(item)
                stale.append(item.key)
            else:
                results[item.index] = Result(result_code(answer))
        if stale:
            self._client.put_revoke(stale, deadline)
        if ours:
            self._fill(ours, results, deadline)
        return full

    def _fill(self, ours: list[_WriteItem], results: Results, deadline: float) -> None:
        """Write values that were started and make them visible, or forget them."""
        started = time.monotonic()
        regions = self._memory.regions
        direct: list[_WriteItem] = []
        staged: list[_WriteItem] = []
        for item in ours:
            (direct if regions.covers(item.pieces) else staged).append(item)
        if direct:
            self._write(direct, [leading_ranges(item.pieces, item.nbytes) for item in direct], deadline)
        if staged:
            self._copy_and_write(staged, deadline)
        good = [item for item in ours if item.failure is None and item.written == item.nbytes]
        if time.monotonic() - started > _OURS_S:
            for item in good:
                item.failure = ResultCode.TIMEOUT
        elif good:
            ended = self._client.put_end([item.key for item in good], deadline)
            for item, answer in zip(good, ended, strict=True):
                if answer != MooncakeStatus.OK:
                    item.failure = result_code(answer) if answer < 0 else ResultCode.INTERNAL
        bad = [item for item in ours if item.failure is not None or item.written != item.nbytes]
        if bad and not self._client.stalls.is_open(time.monotonic()):
            self._client.put_revoke([item.key for item in bad], deadline)
        for item in ours:
            nbytes = 0 if item.pieces is self._empty else item.nbytes
            results[item.index] = Result(ResultCode.OK, nbytes)
        for item in bad:
            failure = item.failure or ResultCode.TIMEOUT
            results[item.index] = Result(
                ResultCode.UNAVAILABLE if failure in (ResultCode.MISS, ResultCode.INVALID) else failure
            )

    def _write(self, items: list[_WriteItem], memory: list[tuple[list[int], list[int]]], deadline: float) -> None:
        """Write the next bytes of each item from these addresses."""
        offsets: list[list[int]] = []
        for item, (_, lengths) in zip(items, memory, strict=True):
            at = item.written
            offsets.append([at := at + length for length in lengths])
            offsets[-1] = [end - length for end, length in zip(offsets[-1], lengths, strict=True)]
        addresses = [parts for parts, _ in memory]
        sizes = [lengths for _, lengths in memory]
        answers = self._client.put_ranges([item.key for item in items], addresses, sizes, offsets, deadline)
        for item, lengths, answer in zip(items, sizes, answers, strict=True):
            if answer == sum(lengths):
                item.written += answer
            else:
                item.failure = result_code(answer) if answer < 0 else ResultCode.INTERNAL

    def _copy_and_write(self, items: list[_WriteItem], deadline: float) -> None:
        """Write values through the staging area, as much at a time as fits."""
        slot = self._memory.staging.lease(max(0.0, deadline - time.monotonic()))
        if slot is None:
            return
        try:
            [area] = memory_regions([slot.view])
            waiting: list[_WriteItem] = []
            memory: list[tuple[list[int], list[int]]] = []
            used = 0
            for item in items:
                done = 0
                while done < item.nbytes and item.failure is None and time.monotonic() < deadline:
                    length = min(item.nbytes - done, area.nbytes - used)
                    _copy_part(item.pieces, done, area.data[used : used + length])
                    waiting.append(item)
                    memory.append(([area.address + used], [length]))
                    done += length
                    used += length
                    if used == area.nbytes:
                        self._write(waiting, memory, deadline)
                        waiting, memory, used = [], [], 0
            if waiting:
                self._write(waiting, memory, deadline)
        finally:
            slot.release()


def _copy_part(pieces: Sequence[MemoryRegion], start: int, target: NDArray[np.uint8]) -> None:
    """Copy the bytes of these pieces from `start` on, as many as `target` takes."""
    filled = 0
    for piece in pieces:
        if start >= piece.nbytes:
            start -= piece.nbytes
            continue
        length = min(piece.nbytes - start, target.size - filled)
        if length == 0:
            return
        np.copyto(target[filled : filled + length], piece.data[start : start + length])
        filled += length
        start = 0
