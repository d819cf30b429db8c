"""Pages on their way between SGLang's host pool and a store: sealed when they go, verified before they come in.

Pages of few pieces are written from the pool where they lie; of many pieces, gathered first. What is read lands in
memory of ours, is verified there, and only then copied into the pool: SGLang takes a page back as soon as a call has
returned, and a store that is late would write into somebody else's. So only the thread that SGLang waits for writes to
the pool's memory.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Final

from kvparams.page_auth import TenantPageAuthKeys
from kvparams.pages import HEADER_BYTES
from kvparams_connectors.arena import Arena, Slot
from kvparams_connectors.engines.sglang.page_buffers import PageBuffers, gather_page, scatter_page
from kvparams_connectors.engines.sglang.page_keys import HiCachePageLayout, HiCacheStoredPage
from kvparams_connectors.engines.sglang.transfer_stats import HiCacheStats, TransferSample
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode, Results
from kvparams_connectors.transfer.page_pipeline import PORTION_BYTES, STORED_CODES, PagePipeline, is_answer
from kvparams_connectors.transfer.page_portions import PagePortion, transfer_portions

__all__ = ["HiCachePagePipeline"]

_ARENA_BYTES: Final = 64 << 20
_ARENA_PAGES: Final = 8
_HEADERS: Final = 1024
_PORTION_PAGES: Final = 64
_AHEAD: Final = 3
"""Portions on their way at a time."""
_FEW_PIECES: Final = 8
"""A page of more is gathered: a store takes them one by one."""


_Placed = tuple[HiCacheStoredPage, PageBuffers]
"""A page, and where it lies."""
_Begin = Callable[[Sequence[_Placed], Sequence[Slot], float], Job[Results]]


class HiCachePagePipeline:
    """A `HiCachePagePipeline` moves the pages of one rank; any thread may use it.

    Its calls wait, and return by the deadline.
    """

    def __init__(
        self,
        store: KVStore,
        form: HiCachePageLayout,
        tally: HiCacheStats,
        *,
        arena_bytes: int | None = None,
        deadline_s: float = 5.0,
        lookup_s: float = 1.0,
        keys: TenantPageAuthKeys | None = None,
        verified: bool = True,
    ) -> None:
        """Allocates an arena and registers it with the store.

        Args:
            store: where pages are kept; the caller closes it.
            form: the layout of the pages.
            tally: the counters of this rank.
            arena_bytes: the size of the memory for pages that are being read or gathered, in bytes. None: 64 MiB, and
                at least 8 pages.
            deadline_s: the time limit of `put` and `get`, in seconds.
            lookup_s: the time limit of `lookup`, in seconds.
            keys: the keys of authenticated pages; None: pages carry a checksum and no tag.
            verified: False uses pages without verification.
        """
        self._store = store
        self._form = form
        self._tally = tally
        self._deadline_s = deadline_s
        self._lookup_s = lookup_s
        self._pipeline = PagePipeline(store, keys, deadline_s, "HiCache page", verified)
        self._stored_bytes = HEADER_BYTES + form.payload_bytes
        arena_bytes = arena_bytes or max(_ARENA_BYTES, _ARENA_PAGES * self._stored_bytes)
        self._arena = Arena(arena_bytes, self._stored_bytes)
        store.register(self._arena)
        self._headers = Arena(_HEADERS * HEADER_BYTES, HEADER_BYTES)
        self._portion = min(_PORTION_PAGES, max(1, PORTION_BYTES // self._stored_bytes))

    def lookup(self, names: Sequence[str]) -> int:
        """Returns the number of stored pages before the first that is missing; another size counts as missing."""
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
        arena, seal = (self._headers, self._seal_in_place) if in_place else (self._arena, self._seal_gathered)
        codes: list[ResultCode] = []
        moved = 0
        answers = True

        def begin(cargo: Sequence[_Placed], slots: Sequence[Slot], left_s: float) -> Job[Results]:
            return self._store.put(seal(cargo, slots), left_s)

        with closing(self._portions(names, places, arena, began, begin, lambda: answers)) as portions:
            for portion in portions:
                results = portion.job.result()
                if in_place:
                    self._take_back(portion, results)
                codes += [result.code for result in results]
                moved += sum(result.nbytes for result in results if result.code is ResultCode.OK)
                answers = answers and is_answer(results)
        codes += [ResultCode.UNAVAILABLE] * (len(names) - len(codes))
        saved = sum(code in STORED_CODES for code in codes)
        self._tally.add("pages_saved", saved)
        for code in set(codes) - STORED_CODES:
            self._tally.add(f"store_failures.{code.value}", codes.count(code))
        if saved:
            self._tally.wrote(TransferSample(saved, moved, time.monotonic() - began))
        return codes

    def _seal_in_place(self, cargo: Sequence[_Placed], slots: Sequence[Slot]) -> list[PutOp]:
        ops: list[PutOp] = []
        for (page, place), slot in zip(cargo, slots, strict=True):
            buffers = (slot.view, *[stretch.data for stretch in place])
            ops.append(self._pipeline.sealed_put(page.key, page.identity, buffers))
        return ops

    def _seal_gathered(self, cargo: Sequence[_Placed], slots: Sequence[Slot]) -> list[PutOp]:
        ops: list[PutOp] = []
        for (page, place), slot in zip(cargo, slots, strict=True):
            checksum = gather_page(place, slot.view[HEADER_BYTES:])
            ops.append(self._pipeline.sealed_put(page.key, page.identity, (slot.view,), checksum))
        return ops

    def _take_back(self, portion: PagePortion[_Placed, Results], results: Results) -> None:
        """Deletes a page that the store may still read when SGLang has its memory back.

        The store may then hold a mixture. No reader would use it, but it would keep the good page out.
        """
        late = [
            page.key
            for (page, _), result in zip(portion.items, results, strict=True)
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
        with closing(self._portions(names, places, self._arena, began, self._request)) as portions:
            for portion in portions:
                arrived = self._arrived(portion)
                loaded += arrived
                if arrived < len(portion.items):
                    break
        self._tally.add("pages_loaded", loaded)
        if loaded:
            self._tally.read(TransferSample(loaded, loaded * self._stored_bytes, time.monotonic() - began))
        return loaded

    def _request(self, cargo: Sequence[_Placed], slots: Sequence[Slot], left_s: float) -> Job[Results]:
        ops = [GetOp(page.key, (slot.view,)) for (page, _), slot in zip(cargo, slots, strict=True)]
        return self._store.get(ops, left_s)

    def _arrived(self, portion: PagePortion[_Placed, Results]) -> int:
        """Verify and copy; how many until the first that is not good."""
        for number, ((page, place), slot, result) in enumerate(
            zip(portion.items, portion.slots, portion.job.result(), strict=True)
        ):
            why = self._pipeline.why_unusable(result, page.identity, (slot.view,))
            if isinstance(why, ResultCode):
                if why is not ResultCode.MISS:
                    self._tally.add(f"store_failures.{why.value}")
                return number
            if why is not None:
                self._tally.add(f"pages_refused.{why.reason}")
                self._pipeline.refuse(page.key, why)
                return number
            scatter_page(slot.view[HEADER_BYTES:], place)
        return len(portion.items)

    def _portions(
        self,
        names: Sequence[str],
        places: Sequence[PageBuffers],
        arena: Arena,
        began: float,
        begin: _Begin,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Generator[PagePortion[_Placed, Results]]:
        """Yields portions; none is begun, and no slot waited for, once `goes_on` says no."""

        def remaining_s() -> float:
            return max(0.0, began + self._deadline_s - time.monotonic())

        return transfer_portions(
            [(self._form.page(name), place) for name, place in zip(names, places, strict=True)],
            arena,
            lambda cargo, slots: begin(cargo, slots, remaining_s()),
            portion_items=self._portion,
            ahead=_AHEAD,
            remaining_s=lambda: remaining_s() if goes_on() else 0.0,
        )
