"""Asks in batches which chunks of requests are stored, and answers when the store has.

vLLM asks chunk by chunk, in its scheduler, and comes back in a later step where it was told to. A request is told one
thing about a chunk, and after a load that failed it is told no: else it would load the same one for ever.
"""

import logging
from collections.abc import Collection
from typing import Final

from kvparams_connectors.engines.vllm_tier.chunk_keys import OffloadChunkLayout
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import KVStore, Result, ResultCode, Results

__all__ = ["ChunkLookup"]

_LOGGER: Final = logging.getLogger(__name__)


class ChunkLookup:
    """A `ChunkLookup` holds the lookups of all requests; one thread calls it, and never waits."""

    def __init__(self, store: KVStore, form: OffloadChunkLayout, *, lookup_s: float) -> None:
        """Asks the store nothing yet.

        Args:
            store: where chunks are looked up; the caller closes it.
            form: the layout of the chunks.
            lookup_s: a lookup without an answer after so many seconds counts as a miss.
        """
        self._store = store
        self._form = form
        self._lookup_s = lookup_s
        self._askers: dict[bytes, set[str]] = {}
        """Of each chunk that is asked for; the store may have been."""
        self._unsent: list[bytes] = []
        self._jobs: list[tuple[list[bytes], Job[Results]]] = []
        self._told: dict[str, dict[bytes, bool | None]] = {}
        """What each request was told; None: to ask again."""
        self._heard = False
        self.failed = 0
        """Questions that the store did not answer, so far."""

    @property
    def size(self) -> int:
        """Returns how much is kept; nothing, when all requests have ended and the store has answered."""
        return len(self._askers) + len(self._unsent) + len(self._jobs) + len(self._told)

    def is_stored(self, key: bytes, request: str) -> bool | None:
        """Returns whether a chunk is stored; None: not known yet, ask again in a later step."""
        if self._jobs and not self._heard:
            self._hear()
        told = self._told.get(request)
        if told is None:
            told = self._told[request] = {}
        if key in told:
            return told[key]
        if not self._form.is_known_key(key):
            told[key] = False
            return False
        told[key] = None
        askers = self._askers.get(key)
        if askers is None:
            self._askers[key] = {request}
            self._unsent.append(key)
        else:
            askers.add(request)
        return None

    def flush(self) -> None:
        """At the end of a step: hear what the store has said, and ask for all that has come up."""
        self._hear()
        self._heard = False
        unsent, self._unsent = self._unsent, []
        wanted: list[bytes] = []
        for key in unsent:
            if self._askers[key]:
                wanted.append(key)
            else:
                del self._askers[key]
        if wanted:
            self._jobs.append((wanted, self._store.exists(self._form.names(wanted), self._lookup_s)))

    def mark_missing(self, keys: Collection[bytes]) -> None:
        """These could not be loaded: whoever was told that they are there is told no from now on."""
        for told in self._told.values():
            for key in keys:
                if told.get(key):
                    told[key] = False

    def forget(self, request: str) -> None:
        """The request has ended."""
        for key, answer in self._told.pop(request, {}).items():
            if answer is None:
                self._askers[key].discard(request)

    def restart(self, form: OffloadChunkLayout) -> None:
        """Discards all results, so that waiting requests ask again; chunks have this form from now on."""
        self._form = form
        self._askers.clear()
        self._unsent.clear()
        self._jobs.clear()
        self._told.clear()

    def _hear(self) -> None:
        """Applies the store's answers, once a step; a chunk of an impossible size counts as missing."""
        self._heard = True
        waiting: list[tuple[list[bytes], Job[Results]]] = []
        for keys, job in self._jobs:
            if not job.done():
                waiting.append((keys, job))
                continue
            for key, result in zip(keys, _results(job, len(keys)), strict=True):
                self.failed += result.code not in (ResultCode.OK, ResultCode.MISS)
                there = result.matches_size(self._form.stored_bytes)
                for request in self._askers.pop(key):
                    self._told[request][key] = there
        self._jobs = waiting


def _results(job: Job[Results], number: int) -> Results:
    try:
        return job.result(0)
    except Exception:  # it must not raise, and the scheduler must not end if it does
        _LOGGER.exception("a store raised where it should have answered")
        return [Result(ResultCode.INTERNAL)] * number
