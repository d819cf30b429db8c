"""Chunks on their way between vLLM's host memory and a store: sealed before they go, verified where they arrive.

They go through an arena of ours, for vLLM gives a chunk's memory to others as soon as a job is reported: a store that
is stuck keeps a slot of ours, never memory of vLLM's. When a job is done, nothing touches vLLM's memory any more,
whatever the store still does (`Job.guarded_section`).
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvparams.page_auth import PageAuthKeys
from kvparams.pages import HEADER_BYTES
from kvparams_connectors.arena import Arena, Slot
from kvparams_connectors.engines.vllm_tier.chunk_keys import OffloadChunkLayout
from kvparams_connectors.hashed_copy import copy_hashed
from kvparams_connectors.jobs import Job, WorkerPool
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode, Results
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.transfer.page_pipeline import PORTION_BYTES, PagePipeline
from kvparams_connectors.transfer.page_portions import transfer_portions

__all__ = ["NO_ROOM", "ChunkRows", "ChunkTransferResult", "HostRows", "OffloadChunkPipeline"]

_LOGGER: Final = logging.getLogger(__name__)

HostRows = npt.NDArray[np.uint8]
"""vLLM's host memory: a chunk in each row, and perhaps unused bytes behind it."""
ChunkRows = Sequence[tuple[bytes, int]]
"""vLLM's keys, and the row of each."""

NO_ROOM: Final = "no_room"
"""Among the failures: there was no slot in time."""

_ARENA_BYTES: Final = 64 << 20
_ARENA_CHUNKS: Final = 8
_AHEAD: Final = 2
"""Portions of a job on their way at a time."""
_LOAD_THREADS: Final = 4
_SAVE_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class ChunkTransferResult:
    """Describes what became of a job."""

    done: tuple[bytes, ...] = ()
    """Loaded: verified, and in their rows. Saved: stored by us or there already."""
    nbytes: int = 0
    """That moved."""
    existing: int = 0
    """Saves: chunks that were there already."""
    gone: int = 0
    """Loads: chunks that are not there any more."""
    refused: dict[str, int] = field(default_factory=dict[str, int])
    """Chunks that came and were not what was asked for, by reason."""
    failures: dict[str, int] = field(default_factory=dict[str, int])
    """Chunks that the store did not take or give, by code."""
    seconds: float = 0.0


@dataclass(slots=True)
class _ResultBuilder:
    """A `ChunkTransferResult` that grows."""

    began: float = field(default_factory=time.monotonic)
    done: list[bytes] = field(default_factory=list[bytes])
    nbytes: int = 0
    existing: int = 0
    gone: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    failures: Counter[str] = field(default_factory=Counter[str])

    def moved(self) -> ChunkTransferResult:
        took = time.monotonic() - self.began
        done, refused, failures = tuple(self.done), dict(self.refused), dict(self.failures)
        return ChunkTransferResult(done, self.nbytes, self.existing, self.gone, refused, failures, took)


class OffloadChunkPipeline:
    """An `OffloadChunkPipeline` moves the chunks of one engine."""

    def __init__(
        self,
        store: KVStore,
        form: OffloadChunkLayout,
        *,
        deadline_s: float = 5.0,
        arena_bytes: int | None = None,
        verify: bool = True,
        seals: PageAuthKeys | None = None,
    ) -> None:
        """Allocates an arena, registers it with the store, and starts the worker threads.

        Args:
            store: where chunks are kept; the caller closes it.
            form: the layout of the chunks.
            deadline_s: the time limit of a load or save from its submission, in seconds.
            arena_bytes: the size of the memory for chunks in transfer, in bytes. None: 64 MiB, and at least 8 chunks.
            verify: False uses chunks without verification.
            seals: the keys of authenticated pages; None: chunks carry a checksum and no tag.
        """
        self._store = store
        self._form = form
        self._deadline_s = deadline_s
        keys = None if seals is None else seals.for_tenant(None)
        self._pipeline = PagePipeline(store, keys, deadline_s, "chunk", verify)
        stored = form.stored_bytes
        self._arena = Arena(arena_bytes or max(_ARENA_BYTES, _ARENA_CHUNKS * (stored + 64)), stored)
        self._portion = max(1, PORTION_BYTES // stored)
        self._loads = WorkerPool("kvparams-tier-load", threads=_LOAD_THREADS)
        self._saves = WorkerPool("kvparams-tier-save", threads=_SAVE_THREADS)
        self._closed = False
        store.register(self._arena)

    @property
    def free_slots(self) -> int:
        """Returns how many more chunks could be on their way."""
        return self._arena.free_slots

    def load(self, rows: HostRows, chunks: ChunkRows) -> Job[ChunkTransferResult]:
        """Get chunks into their rows; those that are missing, damaged or late leave theirs as they were."""
        form = self._form
        return self._submit(self._loads, chunks, lambda job: self._load(job, form, rows, chunks))

    def save(self, rows: HostRows, chunks: ChunkRows) -> Job[ChunkTransferResult]:
        """Store chunks that are not there yet."""
        form = self._form
        return self._submit(self._saves, chunks, lambda job: self._save(job, form, rows, chunks))

    def restart(self, form: OffloadChunkLayout) -> None:
        """Chunks that are moved from now on have this form, of the same size."""
        self._form = form

    def self_test(self) -> bool:
        """Send one chunk through the whole path.

        Returns:
            False if the store did not take or give it, which is not the path's fault.

        Raises:
            StoreError: it came back other than it went in.
        """
        size = self._form.payload_bytes
        rows = np.frombuffer(bytearray(2 * size), np.uint8).reshape(2, size)
        rows[0] = np.frombuffer(os.urandom(min(size, 4096)) * -(-size // 4096), np.uint8)[:size]
        key = os.urandom(32) + self._form.groups[0].number.to_bytes(4, "big")  # nobody else asks for it
        try:
            saved = self.save(rows[:1], [(key, 0)]).result()
            if not saved.done:
                _LOGGER.warning(
                    "self-test: the store did not accept a chunk (%s); until it does, all KV is computed",
                    saved.failures,
                )
                return False
            loaded = self.load(rows, [(key, 1)]).result()
            if loaded.refused:
                raise StoreError(f"self-test: a chunk that was just stored came back as {', '.join(loaded.refused)}")
            if not loaded.done:
                _LOGGER.warning("self-test: the store did not return a chunk (%s)", loaded.failures)
                return False
            if not np.array_equal(rows[0], rows[1]):
                raise StoreError("self-test: a chunk changed between save and load")
            return True
        finally:
            self._store.delete([self._form.name(key)], self._deadline_s).result()

    def close(self) -> None:
        """Wait, within bounds, for what was submitted. Nothing touches vLLM's memory afterwards."""
        self._closed = True
        for lane in (self._loads, self._saves):
            lane.close()

    # ---- in the threads

    def _submit(
        self, lane: WorkerPool, chunks: ChunkRows, work: Callable[[Job[ChunkTransferResult]], ChunkTransferResult]
    ) -> Job[ChunkTransferResult]:
        late = ChunkTransferResult(failures={ResultCode.TIMEOUT.value: len(chunks)})
        refused = ChunkTransferResult(failures={ResultCode.UNAVAILABLE.value: len(chunks)})
        return lane.submit(work, self._deadline_s, timed_out=late, refused=refused)

    def _load(
        self, job: Job[ChunkTransferResult], form: OffloadChunkLayout, rows: HostRows, chunks: ChunkRows
    ) -> ChunkTransferResult:
        def begin(part: ChunkRows, slots: Sequence[Slot]) -> Job[Results]:
            ops = [GetOp(form.name(key), (slot.view,)) for (key, _), slot in zip(part, slots, strict=True)]
            return self._store.get(ops, job.remaining_s())

        def end(count: _ResultBuilder, chunk: tuple[bytes, int], slot: Slot, result: Result) -> None:
            key, row = chunk
            why = self._pipeline.why_unusable(result, form.identity(key), (slot.view,))
            if why is ResultCode.MISS:
                count.gone += 1
            elif isinstance(why, ResultCode):
                count.failures[why.value] += 1
            elif why is not None:
                count.refused[why.reason] += 1
                self._pipeline.refuse(form.name(key), why)
            else:
                with job.guarded_section() as wanted:
                    if wanted and not self._closed:
                        np.copyto(rows[row, : form.payload_bytes], _payload(slot))
                        count.done.append(key)
                        count.nbytes += form.payload_bytes

        return self._transfer(job, chunks, begin, end, _ResultBuilder())

    def _save(
        self, job: Job[ChunkTransferResult], form: OffloadChunkLayout, rows: HostRows, chunks: ChunkRows
    ) -> ChunkTransferResult:
        count = _ResultBuilder()
        there = self._store.exists(form.names([key for key, _ in chunks]), job.remaining_s()).result()
        absent: list[tuple[bytes, int]] = []
        for chunk, result in zip(chunks, there, strict=True):
            if result.matches_size(form.stored_bytes):
                count.existing += 1
                count.done.append(chunk[0])
            else:
                absent.append(chunk)

        def begin(part: ChunkRows, slots: Sequence[Slot]) -> Job[Results] | None:
            ops: list[PutOp] = []
            for (key, row), slot in zip(part, slots, strict=True):
                with job.guarded_section() as wanted:
                    if not wanted or self._closed:
                        return None
                    [checksum] = copy_hashed([[(_payload(slot), rows[row, : form.payload_bytes])]])
                ops.append(self._pipeline.sealed_put(form.name(key), form.identity(key), (slot.view,), checksum))
            return self._store.put(ops, job.remaining_s())

        def end(count: _ResultBuilder, chunk: tuple[bytes, int], slot: Slot, result: Result) -> None:
            if result.code is ResultCode.OK:
                count.nbytes += form.payload_bytes
            elif result.code is ResultCode.EXISTS:
                count.existing += 1
            else:
                count.failures[result.code.value] += 1
                return
            count.done.append(chunk[0])

        return self._transfer(job, absent, begin, end, count)

    def _transfer(
        self,
        job: Job[ChunkTransferResult],
        chunks: ChunkRows,
        begin: Callable[[ChunkRows, Sequence[Slot]], Job[Results] | None],
        end: Callable[[_ResultBuilder, tuple[bytes, int], Slot, Result], None],
        count: _ResultBuilder,
    ) -> ChunkTransferResult:
        """Portion by portion; `begin` gives one to the store, or None if the wait is over, `end` looks at a chunk."""
        left = len(chunks)
        job.set_partial_result(count.moved())
        with closing(
            transfer_portions(
                chunks,
                self._arena,
                begin,
                portion_items=self._portion,
                ahead=_AHEAD,
                remaining_s=job.remaining_s,
            )
        ) as portions:
            for portion in portions:
                left -= len(portion.items)
                for chunk, slot, result in zip(portion.items, portion.slots, portion.job.result(), strict=True):
                    end(count, chunk, slot, result)
                job.set_partial_result(count.moved())
        if left and not job.done() and not self._closed:  # what a closing tier did not begin had room
            count.failures[NO_ROOM] += left
        return count.moved()


def _payload(slot: Slot) -> npt.NDArray[np.uint8]:
    return np.frombuffer(slot.view, np.uint8)[HEADER_BYTES:]
