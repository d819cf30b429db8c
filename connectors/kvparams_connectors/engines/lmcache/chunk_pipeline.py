"""Chunks on their way between LMCache's memory and a store: sealed in front, verified where they arrive.

Nothing is copied: a header of ours and the chunk where it lies go out together, and come in together. The owner of a
chunk's memory keeps it until the store's job has settled, even if the wait has timed out.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvparams.page_auth import PageAuthKeys
from kvparams.pages import HEADER_BYTES, PageRefusal
from kvparams_connectors.arena import Arena, Slot
from kvparams_connectors.engines.lmcache.chunk_keys import LMCacheChunk
from kvparams_connectors.jobs import Job, finished_job
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode, Results
from kvparams_connectors.transfer.page_pipeline import PORTION_BYTES, PagePipeline, is_answer
from kvparams_connectors.transfer.page_portions import PagePortion, begin_portion

__all__ = ["ChunkBuffer", "LMCacheChunkPipeline", "RefCounted"]

_HEADERS: Final = 4096
"""Chunks that may be on their way at a time; what comes on top is not stored, or not found."""
_PROBE_KEY: Final = "kvparams-probe"


class RefCounted(Protocol):
    """Memory that counts who needs it."""

    def ref_count_up(self) -> None:
        """Counts one more user."""
        ...

    def ref_count_down(self) -> None:
        """Counts one user less; the last one frees the memory."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkBuffer:
    """A chunk and its memory."""

    chunk: LMCacheChunk
    memory: memoryview
    """Contiguous bytes. To put: exactly the chunk. To get: room for a full one."""
    owner: RefCounted
    """Of the memory; counted up for as long as the store may touch it."""


class LMCacheChunkPipeline:
    """An `LMCacheChunkPipeline` moves one engine's chunks; its coroutines run on the caller's event loop."""

    def __init__(
        self, store: KVStore, *, deadline_s: float = 5.0, lookup_s: float = 1.0, seals: PageAuthKeys | None = None
    ) -> None:
        """Allocates the memory for headers; chunks stay in LMCache's memory.

        Args:
            store: where chunks are kept; the caller closes it.
            deadline_s: the time limit of a put or get, in seconds.
            lookup_s: the time limit of a lookup, in seconds.
            seals: the keys of authenticated pages; None: pages carry a checksum and no tag.
        """
        self._store = store
        self._deadline_s = deadline_s
        self._lookup_s = lookup_s
        keys = None if seals is None else seals.for_tenant(None)
        self._pipeline = PagePipeline(store, keys, deadline_s, "LMCache chunk")
        self._headers = Arena(_HEADERS * HEADER_BYTES, HEADER_BYTES)
        self._refused = 0

    @property
    def refused(self) -> int:
        """Chunks that the store gave back and that were not what was asked for, so far."""
        return self._refused

    def lookup(self, chunks: Sequence[LMCacheChunk]) -> Job[int]:
        """Returns the number of stored chunks before the first that is missing.

        A chunk of an impossible size counts as missing.
        """

        def leading(results: Results) -> int:
            for number, (chunk, found) in enumerate(zip(chunks, results, strict=True)):
                if found.code is not ResultCode.OK or (found.has_size and not chunk.fits_size(found.nbytes)):
                    return number
            return len(chunks)

        return self._store.exists([chunk.key for chunk in chunks], self._lookup_s).then(leading)

    def ping(self) -> Job[bool]:
        """Returns whether the store answers."""
        return self._store.exists([_PROBE_KEY], self._lookup_s).then(is_answer)

    def remove(self, chunk: LMCacheChunk) -> Job[bool]:
        """Delete a chunk; whether it was there."""
        return self._store.delete([chunk.key], self._deadline_s).then(lambda results: results[0].code is ResultCode.OK)

    async def put(self, cargo: Sequence[ChunkBuffer]) -> list[ResultCode]:
        """Seal and store chunks; what became of each: OK, EXISTS, or why it is not stored.

        Returns when the store has said so or the deadline is over.
        """

        def begin(part: Sequence[ChunkBuffer], headers: Sequence[Slot]) -> Job[Results]:
            ops: list[PutOp] = []
            for one, header in zip(part, headers, strict=True):
                tokens = one.chunk.layout.tokens(one.memory.nbytes)
                ops.append(
                    PutOp("", ())  # a key that no store takes: this one is INVALID, the others go on
                    if tokens is None
                    else self._pipeline.sealed_put(one.chunk.key, one.chunk.identity(tokens), (header.view, one.memory))
                )
            return _keep(part, self._store.put(ops, self._deadline_s))

        portions: list[PagePortion[ChunkBuffer, Results]] = []
        for portion in self._portions(cargo, begin):
            portion.give_back()
            portions.append(portion)
            await asyncio.sleep(0)  # LMCache's loop has other work, and the store sends meanwhile
        return [result.code for portion in portions for result in await portion.job]

    async def get(self, cargo: Sequence[ChunkBuffer]) -> list[int | None]:
        """Reads chunks into their memory and verifies them there.

        Returns the tokens of each, or None where it is missing, damaged or late. The memory of such a chunk has
        undefined contents.
        """

        def begin(part: Sequence[ChunkBuffer], headers: Sequence[Slot]) -> Job[Results]:
            ops = [GetOp(one.chunk.key, (header.view, one.memory)) for one, header in zip(part, headers, strict=True)]
            return _keep(part, self._store.get(ops, self._deadline_s))

        portions: list[PagePortion[ChunkBuffer, Results]] = []
        found: list[int | None] = []
        try:
            portions.extend(self._portions(cargo, begin))
            for portion in portions:
                results = await portion.job
                found += (
                    [
                        self._judge(one, header, result)
                        for one, header, result in zip(portion.items, portion.slots, results, strict=True)
                    ]
                    if portion.slots
                    else [None] * len(results)
                )
                await asyncio.sleep(0)
        finally:  # the headers are needed until they have been looked at; also when LMCache has cancelled us
            for portion in portions:
                portion.give_back()
        return found

    def _portions(
        self,
        cargo: Sequence[ChunkBuffer],
        begin: Callable[[Sequence[ChunkBuffer], Sequence[Slot]], Job[Results]],
    ) -> Iterator[PagePortion[ChunkBuffer, Results]]:
        """Submits chunks to the store, each portion with headers for all of its chunks.

        It submits none if there are too few headers left. It never waits: that would stop the loop on which the
        operations that hold the headers end.
        """
        for part in _cut(cargo):
            headers = self._headers.lease_many(len(part), len(part))
            portion = begin_portion(part, headers, begin if headers else _refuse)
            assert portion is not None
            yield portion

    def _judge(self, one: ChunkBuffer, header: Slot, result: Result) -> int | None:
        """Returns how many tokens the chunk that came has; None if there is none, or it is not what was asked for."""
        if result.code not in (ResultCode.OK, ResultCode.TOO_LARGE):
            return None
        tokens = one.chunk.layout.tokens(result.nbytes - HEADER_BYTES)
        if tokens is None:
            why = PageRefusal("torn", f"{result.nbytes} bytes are none that it can have")
        else:
            why = self._pipeline.why_unusable(result, one.chunk.identity(tokens), (header.view, one.memory))
        if not isinstance(why, PageRefusal):
            return tokens
        self._refused += 1
        self._pipeline.refuse(one.chunk.key, why)
        return None


def _keep(part: Sequence[ChunkBuffer], job: Job[Results]) -> Job[Results]:
    """Keep the memory of a job until the store has let go of it."""
    for one in part:
        one.owner.ref_count_up()

    def let_go() -> None:
        for one in part:
            one.owner.ref_count_down()

    job.add_settled_callback(let_go)
    return job


def _refuse(part: Sequence[ChunkBuffer], _: Sequence[Slot]) -> Job[Results]:
    return finished_job([Result(ResultCode.UNAVAILABLE)] * len(part))


def _cut(cargo: Sequence[ChunkBuffer]) -> Iterator[Sequence[ChunkBuffer]]:
    """Pieces of about `PORTION_BYTES`, at least one chunk each."""
    start = nbytes = 0
    for end, one in enumerate(cargo):
        nbytes += one.memory.nbytes
        if nbytes > PORTION_BYTES and end > start:
            yield cargo[start:end]
            start, nbytes = end, one.memory.nbytes
    if start < len(cargo):
        yield cargo[start:]
