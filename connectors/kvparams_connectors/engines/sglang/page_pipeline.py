"""Pages on their way between SGLang's host pool and a store: sealed when they go, verified before they come in.

Pages of few pieces are written from the pool where they lie; of many pieces, gathered first. What is read lands in
memory of ours, is verified there, and only then copied into the pool: SGLang takes a page back as soon as a call has
returned, and a store that is late would write into somebody else's. The one rule: memory of the pool is written by the
thread that SGLang waits for, and by nobody else.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Final

from kvparams.page_auth import TenantPageAuthKeys
from kvparams.pages import HEADER_BYTES, REASONS_USABLE_BY_OTHERS, seal, seal_detached, verify
from kvparams_connectors.arena import Arena, Slot
from kvparams_connectors.engines.sglang.page_buffers import PageBuffers, gather_page, scatter_page
from kvparams_connectors.engines.sglang.page_keys import HiCachePageLayout, HiCacheStoredPage
from kvparams_connectors.engines.sglang.transfer_batch import (
    BatchPortion,
    BeginPortion,
    PageTransferItem,
    TransferBatch,
)
from kvparams_connectors.engines.sglang.transfer_stats import HiCacheStats, TransferSample
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode, Results

__all__ = ["HiCachePagePipeline"]

_LOGGER: Final = logging.getLogger(__name__)

_HEADERS: Final = 1024
_PORTION_BYTES: Final = 8 << 20
"""So much is given to the store at a time; the next is sealed, or the last verified, meanwhile."""
_PORTION_PAGES: Final = 64
_FEW_PIECES: Final = 8
"""A page of more is gathered: a store takes them one by one."""
_STORED: Final = frozenset({ResultCode.OK, ResultCode.EXISTS})
_NO_ANSWER: Final = frozenset({ResultCode.UNAVAILABLE, ResultCode.TIMEOUT, ResultCode.DENIED, ResultCode.INTERNAL})


class HiCachePagePipeline:
    """One rank's way to a store. Any thread may use it; its calls wait, and return by the deadline."""

    def __init__(
        self,
        store: KVStore,
        form: HiCachePageLayout,
        tally: HiCacheStats,
        *,
        arena_bytes: int,
        deadline_s: float = 5.0,
        lookup_s: float = 1.0,
        keys: TenantPageAuthKeys | None = None,
        verified: bool = True,
    ) -> None:
        """Args:
        store: stays the caller's.
        form: of the pages.
        tally: what is counted goes there.
        arena_bytes: for pages on their way.
        deadline_s: of `put` and `get`.
        lookup_s: of `lookup`.
        keys: of authenticated pages.
        verified: False uses whatever the store gives back.
        """
        self._store = store
        self._form = form
        self._tally = tally
        self._deadline_s = deadline_s
        self._lookup_s = lookup_s
        self._keys = keys
        self._verified = verified
        self._stored_bytes = HEADER_BYTES + form.payload_bytes
        self._arena = Arena(arena_bytes, self._stored_bytes)
        store.register(self._arena)
        self._headers = Arena(_HEADERS * HEADER_BYTES, HEADER_BYTES)
        self._portion = min(_PORTION_PAGES, max(1, _PORTION_BYTES // self._stored_bytes))

    def lookup(self, names: Sequence[str]) -> int:
        """How many of these pages are stored, counted until the first that is not. One of another size is not."""
        results = self._store.exists([self._form.page(name).key for name in names], self._lookup_s).result()
        for number, found in enumerate(results):
            if not found.matches_size(self._stored_bytes):
                if found.code not in (ResultCode.OK, ResultCode.MISS):
                    self._tally.add(f"store_failures.{found.code.value}")
                return number
        return len(names)

    def delete(self, names: Sequence[str]) -> None:
        """Delete pages, best effort; returns at once."""
        self._store.delete([self._form.page(name).key for name in names], self._deadline_s)

    # ---- from the pool to the store

    def put(self, names: Sequence[str], places: Sequence[PageBuffers]) -> list[ResultCode]:
        """Store pages.

        Args:
            names: SGLang's, of the pages.
            places: where they lie, all in the same number of stretches; the caller's again when this returns.

        Returns:
            For each page OK, EXISTS, or why it is not stored. Behind a portion that the store did not answer no more
            is begun.
        """
        began = time.monotonic()
        in_place = all(len(place) <= _FEW_PIECES for place in places)
        arena, begin = (self._headers, self._seal_in_place) if in_place else (self._arena, self._seal_gathered)
        codes: list[ResultCode] = []
        moved = 0
        with closing(self._flights(names, places, arena, begin, began)) as flights:
            for portion in flights:
                results = portion.job.result()
                if in_place:
                    self._take_back(portion, results)
                codes += [result.code for result in results]
                moved += sum(result.nbytes for result in results if result.code is ResultCode.OK)
                if any(result.code in _NO_ANSWER for result in results):
                    flights.stop_beginning()
        codes += [ResultCode.UNAVAILABLE] * (len(names) - len(codes))
        saved = sum(code in _STORED for code in codes)
        self._tally.add("pages_saved", saved)
        for code in set(codes) - _STORED:
            self._tally.add(f"store_failures.{code.value}", codes.count(code))
        if saved:
            self._tally.wrote(TransferSample(saved, moved, time.monotonic() - began))
        return codes

    def _seal_in_place(self, cargo: Sequence[PageTransferItem], slots: Sequence[Slot], left_s: float) -> Job[Results]:
        ops: list[PutOp] = []
        for one, slot in zip(cargo, slots, strict=True):
            pieces = [stretch.data for stretch in one.place]
            seal_detached(slot.view, pieces, one.page.identity, self._keys)
            ops.append(PutOp(one.page.key, (slot.view, *pieces)))
        return self._store.put(ops, left_s)

    def _seal_gathered(self, cargo: Sequence[PageTransferItem], slots: Sequence[Slot], left_s: float) -> Job[Results]:
        for one, slot in zip(cargo, slots, strict=True):
            gather_page(one.place, slot.view[HEADER_BYTES:])
            seal(slot.view, one.page.identity, self._keys)
        ops = [PutOp(one.page.key, (slot.view,)) for one, slot in zip(cargo, slots, strict=True)]
        return self._store.put(ops, left_s)

    def _take_back(self, portion: BatchPortion, results: Results) -> None:
        """A store that still reads when SGLang has its memory back may store a mixture. No reader would use it, but it
        would keep the good page out; so it is deleted."""
        late = [
            one.page.key
            for one, result in zip(portion.cargo, results, strict=True)
            if result.code is ResultCode.TIMEOUT
        ]
        if late:
            portion.job.add_settled_callback(lambda: self._store.delete(late, self._deadline_s))

    # ---- from the store to the pool

    def get(self, names: Sequence[str], places: Sequence[PageBuffers]) -> int:
        """Read pages.

        Args:
            names: SGLang's, of the pages.
            places: where they go.

        Returns:
            How many lie there now, counted until the first that is missing, damaged or late; where that one and those
            behind it would go nothing has been written.
        """
        began = time.monotonic()
        loaded = 0
        with closing(self._flights(names, places, self._arena, self._ask, began)) as flights:
            for portion in flights:
                arrived = self._arrived(portion)
                loaded += arrived
                if arrived < len(portion.cargo):
                    break
        self._tally.add("pages_loaded", loaded)
        if loaded:
            self._tally.read(TransferSample(loaded, loaded * self._stored_bytes, time.monotonic() - began))
        return loaded

    def _ask(self, cargo: Sequence[PageTransferItem], slots: Sequence[Slot], left_s: float) -> Job[Results]:
        ops = [GetOp(one.page.key, (slot.view,)) for one, slot in zip(cargo, slots, strict=True)]
        return self._store.get(ops, left_s)

    def _arrived(self, portion: BatchPortion) -> int:
        """Verify and copy; how many until the first that is not good."""
        results = portion.job.result()
        for number, (one, slot, result) in enumerate(zip(portion.cargo, portion.slots, results, strict=True)):
            if not self._good(one.page, slot, result):
                return number
            scatter_page(slot.view[HEADER_BYTES:], one.place)
        return len(portion.cargo)

    def _good(self, page: HiCacheStoredPage, slot: Slot, result: Result) -> bool:
        """Whether a slot holds the page that was asked for."""
        if result.code not in (ResultCode.OK, ResultCode.TOO_LARGE):
            if result.code is not ResultCode.MISS:
                self._tally.add(f"store_failures.{result.code.value}")
            return False
        if result.code is ResultCode.TOO_LARGE or result.nbytes != self._stored_bytes:
            reason, message = "torn", f"{result.nbytes} bytes instead of {self._stored_bytes}"
        else:
            refusal = verify(slot.view, page.identity, self._keys) if self._verified else None
            if refusal is None:
                return True
            reason, message = refusal.reason, refusal.message
        self._tally.add(f"pages_refused.{reason}")
        _LOGGER.warning("HiCache page %s was not used: %s: %s", page.key, reason, message)
        if reason not in REASONS_USABLE_BY_OTHERS:
            self._store.discard([page.key], self._deadline_s)
        return False

    def _flights(
        self, names: Sequence[str], places: Sequence[PageBuffers], arena: Arena, begin: BeginPortion, began: float
    ) -> TransferBatch:
        cargo = [PageTransferItem(self._form.page(name), place) for name, place in zip(names, places, strict=True)]
        return TransferBatch(cargo, arena, begin, portion=self._portion, give_up=began + self._deadline_s)
