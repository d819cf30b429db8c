"""Chunks on their way between LMCache's memory and a store: sealed in front, verified where they arrive.

Nothing is copied: a header of ours and the chunk where it lies go out together, and come in together. The one rule:
whoever owns a chunk's memory keeps it until the store's job has settled, whatever became of the wait.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from kvparams.page_auth import PageAuthKeys
from kvparams.pages import HEADER_BYTES, REASONS_USABLE_BY_OTHERS, seal_detached, verify_detached
from kvparams_connectors.arena import Arena, Slot
from kvparams_connectors.engines.lmcache.chunk_keys import LMCacheChunk
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode, Results

__all__ = ["ChunkBuffer", "LMCacheChunkPipeline", "RefCounted"]

_LOGGER: Final = logging.getLogger(__name__)

_HEADERS: Final = 4096
"""Chunks that may be on their way at a time; what comes on top is not stored, or not found."""
_PORTION_BYTES: Final = 8 << 20
"""So much is given to the store at a time, and the next is sealed, or the last verified, meanwhile."""
_NO_ANSWER: Final = frozenset({ResultCode.UNAVAILABLE, ResultCode.TIMEOUT, ResultCode.DENIED, ResultCode.INTERNAL})
_PROBE_KEY: Final = "kvparams-probe"


class RefCounted(Protocol):
    """Memory that counts who needs it."""

    def ref_count_up(self) -> None: ...
    def ref_count_down(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ChunkBuffer:
    """A chunk and its memory."""

    chunk: LMCacheChunk
    memory: memoryview
    """Contiguous bytes. To put: exactly the chunk. To get: room for a full one."""
    owner: RefCounted
    """Of the memory; counted up for as long as the store may touch it."""


class LMCacheChunkPipeline:
    """One engine's way to a store. Its coroutines run on the loop of whoever calls them."""

    def __init__(
        self, store: KVStore, *, deadline_s: float = 5.0, lookup_s: float = 1.0, seals: PageAuthKeys | None = None
    ) -> None:
        """Args:
        store: stays the caller's.
        deadline_s: of a put or get.
        lookup_s: of the question what is there.
        seals: keys of authenticated pages.
        """
        self._store = store
        self._deadline_s = deadline_s
        self._lookup_s = lookup_s
        self._keys = None if seals is None else seals.for_tenant(None)
        self._headers = Arena(_HEADERS * HEADER_BYTES, HEADER_BYTES)
        self._refused = 0

    @property
    def refused(self) -> int:
        """Chunks that the store gave back and that were not what was asked for, so far."""
        return self._refused

    def lookup(self, chunks: Sequence[LMCacheChunk]) -> Job[int]:
        """How many of the chunks are stored, counted until the first that is not. One of a size that it cannot have
        counts as not stored."""

        def leading(results: Results) -> int:
            for number, (chunk, found) in enumerate(zip(chunks, results, strict=True)):
                if found.code is not ResultCode.OK or (found.has_size and not chunk.fits_size(found.nbytes)):
                    return number
            return len(chunks)

        return self._store.exists([chunk.key for chunk in chunks], self._lookup_s).then(leading)

    def ping(self) -> Job[bool]:
        """Whether the store answers."""
        return self._store.exists([_PROBE_KEY], self._lookup_s).then(
            lambda results: all(result.code not in _NO_ANSWER for result in results)
        )

    def remove(self, chunk: LMCacheChunk) -> Job[bool]:
        """Delete a chunk; whether it was there."""
        return self._store.delete([chunk.key], self._deadline_s).then(lambda results: results[0].code is ResultCode.OK)

    async def put(self, cargo: Sequence[ChunkBuffer]) -> list[ResultCode]:
        """Seal and store chunks; what became of each: OK, EXISTS, or why it is not stored.

        Returns when the store has said so or the deadline is over.
        """
        jobs: list[tuple[int, Job[Results]]] = []
        for part in _portions(cargo):
            headers = self._headers.lease_many(len(part), len(part))
            if not headers:
                jobs.append((len(part), _ended(ResultCode.UNAVAILABLE, len(part))))
                continue
            try:
                ops = [self._sealed(one, header) for one, header in zip(part, headers, strict=True)]
            except BaseException:
                _give_back(headers)
                raise
            jobs.append((len(part), self._held(part, headers, self._store.put(ops, self._deadline_s))))
            await asyncio.sleep(0)  # LMCache's loop has other work, and the store sends meanwhile
        return [result.code for _, job in jobs for result in await job]

    async def get(self, cargo: Sequence[ChunkBuffer]) -> list[int | None]:
        """Read chunks into their memory and verify them there: how many tokens each has, or None where it is missing,
        damaged or late. Memory of a chunk that is None holds anything."""
        jobs: list[tuple[Sequence[ChunkBuffer], list[Slot], Job[Results]]] = []
        for part in _portions(cargo):
            headers = self._headers.lease_many(len(part), len(part))
            if not headers:
                jobs.append((part, [], _ended(ResultCode.UNAVAILABLE, len(part))))
                continue
            ops = [GetOp(one.chunk.key, (header.view, one.memory)) for one, header in zip(part, headers, strict=True)]
            # The headers are needed until they have been looked at as well.
            job = self._store.get(ops, self._deadline_s)
            jobs.append((part, headers, self._held(part, [], job)))
        found: list[int | None] = []
        try:
            for part, headers, job in jobs:
                results = await job
                found += (
                    [
                        self._judge(one, header, result)
                        for one, header, result in zip(part, headers, results, strict=True)
                    ]
                    if headers
                    else [None] * len(part)
                )
                await asyncio.sleep(0)
        finally:  # also when LMCache has cancelled us
            for _, headers, job in jobs:
                job.add_settled_callback(lambda headers=headers: _give_back(headers))
        return found

    def _sealed(self, one: ChunkBuffer, header: Slot) -> PutOp:
        tokens = one.chunk.layout.tokens(one.memory.nbytes)
        if tokens is None:  # a key that no store takes: this one is INVALID, the others go on
            return PutOp("", ())
        seal_detached(header.view, one.memory, one.chunk.identity(tokens), self._keys)
        return PutOp(one.chunk.key, (header.view, one.memory))

    def _held(self, part: Sequence[ChunkBuffer], headers: Sequence[Slot], job: Job[Results]) -> Job[Results]:
        """Keep the memory of a job until the store has let go of it."""
        for one in part:
            one.owner.ref_count_up()

        def let_go() -> None:
            _give_back(headers)
            for one in part:
                one.owner.ref_count_down()

        job.add_settled_callback(let_go)
        return job

    def _judge(self, one: ChunkBuffer, header: Slot, result: Result) -> int | None:
        """How many tokens the chunk that came has; None if there is none, or it is not what was asked for."""
        if result.code not in (ResultCode.OK, ResultCode.TOO_LARGE):
            return None
        nbytes = result.nbytes - HEADER_BYTES
        tokens = one.chunk.layout.tokens(nbytes)
        if tokens is None or result.code is ResultCode.TOO_LARGE:
            reason, message = "torn", f"{result.nbytes} bytes are none that it can have"
        else:
            refusal = verify_detached(header.view, one.memory[:nbytes], one.chunk.identity(tokens), self._keys)
            if refusal is None:
                return tokens
            reason, message = refusal.reason, refusal.message
        self._refused += 1
        _LOGGER.warning("LMCache chunk %s was not used: %s: %s", one.chunk.key, reason, message)
        if reason not in REASONS_USABLE_BY_OTHERS:
            self._store.discard([one.chunk.key], self._deadline_s)
        return None


def _give_back(headers: Sequence[Slot]) -> None:
    for header in headers:
        header.release()


def _ended(code: ResultCode, number: int) -> Job[Results]:
    job: Job[Results] = Job(0.0, [Result(code)] * number)
    job.finish([Result(code)] * number)
    return job


_C = TypeVar("_C", bound=ChunkBuffer)


def _portions(cargo: Sequence[_C]) -> Iterator[Sequence[_C]]:
    """Pieces of about `_PORTION_BYTES`, at least one chunk each."""
    start = nbytes = 0
    for end, one in enumerate(cargo):
        nbytes += one.memory.nbytes
        if nbytes > _PORTION_BYTES and end > start:
            yield cargo[start:end]
            start, nbytes = end, one.memory.nbytes
    if start < len(cargo):
        yield cargo[start:]
