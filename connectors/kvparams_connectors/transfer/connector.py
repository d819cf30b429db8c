"""From token ids and paged tensors to jobs of a store: longest stored prefix, save, load, release.

A save copies the KV out of the blocks before it returns, so the engine may reuse them at once. A load reads pages in
order into leased slots and stops at the first that is missing or not what was asked for. A page is verified in its slot
before any of it is written to a block, and no block is written once the wait for the load is over.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from kvparams.keys import ExtraKey, Namespace, Page
from kvparams.page_auth import PageAuthKeys
from kvparams.pages import HEADER_BYTES
from kvparams.params import KVTransferParams
from kvparams_connectors.arena import Arena
from kvparams_connectors.jobs import Job, WorkerPool
from kvparams_connectors.store import KVStore, ResultCode
from kvparams_connectors.transfer.block_copier import BlockCopier, make_block_copier
from kvparams_connectors.transfer.connector_settings import ConnectorSettings
from kvparams_connectors.transfer.layout import PagedKVLayout
from kvparams_connectors.transfer.load import LoadOperation, pages_in_range
from kvparams_connectors.transfer.load_rate import LoadRate
from kvparams_connectors.transfer.reports import ConnectorStats, LoadReport, PrefixHit, ReleaseReport, SaveReport
from kvparams_connectors.transfer.save import SaveOperation
from kvparams_connectors.transfer.sequence_plan import SequencePlan, find_stored_prefix, make_plan
from kvparams_connectors.transfer.transfer_context import TransferContext

__all__ = ["ConnectorSettings", "KVStoreConnector", "SequencePlan"]

_MAX_TAILS: Final = 65_536
"""Partial pages remembered for `release`; older ones are left to the store's eviction."""
_CLOSE_S: Final = 10.0
_LOAD_THREADS: Final = 2
"""How many loads make progress at a time."""


class KVStoreConnector:
    """A `KVStoreConnector` moves one engine's KV; any thread may call its methods, which return at once."""

    def __init__(
        self,
        store: KVStore,
        namespace: Namespace,
        layout: PagedKVLayout,
        settings: ConnectorSettings | None = None,
        *,
        seals: PageAuthKeys | None = None,
        mover: BlockCopier | None = None,
    ) -> None:
        """Allocates an arena, registers it with the store, and starts the worker threads.

        Args:
            store: where pages are kept; the caller closes it.
            namespace: the model and layout of the KV, without cache salt and LoRA, which each request adds.
            layout: the tensors of the engine's KV cache.
            settings: None: the defaults.
            seals: the keys of authenticated pages, for a store that others can write to; None: pages carry a checksum
                and no tag.
            mover: copies KV between blocks and host memory; None: the copier for the tensors' device.

        Raises:
            LayoutError: the tensors do not match the namespace, or hold a unit of the grid only partly.
        """
        layout.check(namespace)
        self._store = store
        self._namespace = namespace
        self._layout = layout
        self._settings = settings = settings or ConnectorSettings()
        self._units = layout.units(settings.grid, namespace.geometry, load_only=settings.load_only)
        payload_bytes = max(layout.payload_bytes(namespace.page_tokens, unit) for unit in self._units)
        if mover is None:
            bounce_bytes = max(settings.bounce_bytes, len(self._units) * (payload_bytes + 256))  # at least one page
            mover = make_block_copier(layout, payload_bytes=payload_bytes, bounce_bytes=bounce_bytes)
        slot_bytes = HEADER_BYTES + payload_bytes
        arena_bytes = max(settings.arena_bytes, len(self._units) * (slot_bytes + 64))  # at least one page
        self._arena = Arena(arena_bytes, slot_bytes, allocate=mover.allocate)
        store.register(self._arena)
        self._gear = TransferContext(store, self._arena, layout, mover, settings, seals)
        self._rate = LoadRate(settings.recompute_tokens_per_s, settings.store_bytes_per_s)
        self._saves = WorkerPool("kvparams-save")
        self._loads = WorkerPool("kvparams-load", threads=_LOAD_THREADS)
        self._checks = WorkerPool("kvparams-verify", threads=_LOAD_THREADS)
        self._changed = threading.Condition(threading.Lock())
        self._stats = ConnectorStats(self._arena.slots, self._arena.slots)
        self._tails: OrderedDict[str, int] = OrderedDict()
        self._open_saves = 0

    def plan(
        self,
        token_ids: Sequence[int],
        params: KVTransferParams | None = None,
        extras: Iterable[ExtraKey] = (),
        known: Sequence[Page] = (),
    ) -> SequencePlan:
        """The pages of a sequence and their keys, the partial last page included; see `make_plan`."""
        return make_plan(self._namespace, self._layout.shard, token_ids, params, extras, self._units, known)

    def lookup(self, plan: SequencePlan) -> Job[PrefixHit]:
        """Returns how much of the sequence is stored without a gap; see `find_stored_prefix`."""
        self._locate(plan)
        found = self._store.exists(plan.keys, self._settings.deadline_s)
        return found.then(lambda results: find_stored_prefix(plan, results))

    def _locate(self, plan: SequencePlan) -> None:
        if plan.source is not None:
            self._store.hint_location(plan.keys, plan.source)

    # ---- save

    def save(
        self, plan: SequencePlan, block_ids: Sequence[int], start_token: int, end_token: int, *, required: bool = False
    ) -> Job[SaveReport]:
        """Store the pages that end in (start_token, end_token].

        Their whole content must stand in the blocks, so also tokens before `start_token`. When this returns, the blocks
        may be reused at once: on the CPU they have been copied, on a device the copying stands before whatever the
        calling thread's stream is given next. The report says what became of every page.

        Args:
            plan: of a sequence with at least `end_token` tokens.
            block_ids: the sequence's block table from token 0.
            start_token: up to where the sequence was saved before.
            end_token: up to where the blocks are filled.
            required: wait for room on the way, at most until the deadline. False never waits: pages for which there is
                none are dropped.

        Raises:
            IndexError: `block_ids` does not reach `end_token`, or a block does not exist.
        """
        pages = (
            []
            if self._settings.load_only
            else [
                page.index
                for page in plan.pages
                if start_token < page.end <= end_token
                and (
                    plan.storable_keys is None
                    or any(plan.keys[part] in plan.storable_keys for part in plan.parts(page.index))
                )
            ]
        )
        if pages:
            first, last = plan.pages[pages[0]], plan.pages[pages[-1]]
            self._layout.pieces(block_ids, first.start, last.end - first.start)  # raises before anything is begun
        save = SaveOperation(self._gear, self._saves, plan, pages, lambda report: self._saved(plan, pages, report))
        with self._changed:
            self._open_saves += 1
        save.start(block_ids, required=required)
        return save.job

    def _saved(self, plan: SequencePlan, pages: Sequence[int], report: SaveReport) -> None:
        with self._changed:
            stats = self._stats
            stats.pages_saved += report.saved
            stats.bytes_saved += report.nbytes
            stats.pages_existing += report.existing
            stats.pages_dropped += report.dropped
            for code, count in report.failed.items():
                stats.store_failures[code.value] = stats.store_failures.get(code.value, 0) + count
            for page in pages:
                if plan.pages[page].tokens < plan.namespace.page_tokens and report.saved + report.existing:
                    key = plan.keys[plan.parts(page).start]
                    self._tails[key] = self._tails.pop(key, 0) + 1
                    if len(self._tails) > _MAX_TAILS:
                        self._tails.popitem(last=False)
            self._open_saves -= 1
            self._changed.notify_all()

    # ---- load

    def load(self, plan: SequencePlan, block_ids: Sequence[int], start_token: int, end_token: int) -> Job[LoadReport]:
        """Fill the blocks with the stored KV of the tokens [start_token, end_token), as far as it is there and good.

        The blocks belong to the job until it is done. Then the tokens [start_token, report.end_token) are filled, and
        no other position has been or will be written.

        Args:
            plan: of a sequence with at least `end_token` tokens.
            block_ids: the sequence's block table from token 0.
            start_token: the first position to write; need not be a page's start.
            end_token: the position behind the last one to write; need not be a page's end.
        """
        nothing = LoadReport(start_token, start_token)
        if not self._worth(plan, start_token, end_token):
            job = Job(time.monotonic() + self._settings.deadline_s, nothing)
            job.finish(self._loaded(replace(nothing, skipped=True)))
            return job
        self._locate(plan)
        load = LoadOperation(
            self._gear, self._checks, plan, block_ids, start_token, end_token, self._gear.copier.fence()
        )
        return self._loads.submit(
            lambda job: self._measured(load, job),
            self._settings.deadline_s,
            timed_out=replace(nothing, failure=ResultCode.TIMEOUT),
            refused=replace(nothing, failure=ResultCode.UNAVAILABLE),
        )

    def _worth(self, plan: SequencePlan, start_token: int, end_token: int) -> bool:
        if self._settings.recompute_tokens_per_s is None:
            return True
        nbytes = sum(
            plan.identity(part).stored_bytes
            for page in pages_in_range(plan, start_token, end_token)
            for part in plan.parts(page)
        )
        return self._rate.is_worth_loading(nbytes, end_token - start_token)

    def _measured(self, load: LoadOperation, job: Job[LoadReport]) -> LoadReport:
        start = time.monotonic()
        report = load.run(job)
        if report.pages or report.failure is ResultCode.TIMEOUT:
            self._rate.observe(report.nbytes, time.monotonic() - start)
        return self._loaded(report)

    def _loaded(self, report: LoadReport) -> LoadReport:
        with self._changed:
            stats = self._stats
            stats.loads_skipped += report.skipped
            stats.pages_loaded += report.pages
            stats.bytes_loaded += report.nbytes
            stats.tokens_loaded += report.end_token - report.start_token
            for page in report.refused:
                stats.pages_refused[page.reason] = stats.pages_refused.get(page.reason, 0) + 1
            if report.failure not in (None, ResultCode.MISS):
                name = report.failure.value
                stats.store_failures[name] = stats.store_failures.get(name, 0) + 1
        return report

    # ---- the rest

    def release(self, plan: SequencePlan) -> Job[ReleaseReport]:
        """The transfer is over: delete what only it needed.

        That is its partial last page, if this connector saved it and no other save of the same page is still to be
        released. Full pages stay: they are the shared cache, and the store's eviction ends their life.
        """
        last = list(plan.keys[-len(plan.units) :])
        mine: list[str] = []
        with self._changed:
            count = self._tails.pop(last[0], 0) if last else 0
            if count > 1:
                self._tails[last[0]] = count - 1
            elif count == 1:
                mine = last
        deleted = self._store.delete(mine, self._settings.deadline_s)
        return deleted.then(lambda results: ReleaseReport(sum(result.code is ResultCode.OK for result in results)))

    def stats(self) -> ConnectorStats:
        """A copy of the counters, and the arena's state."""
        with self._changed:
            stats = self._stats
            return replace(
                stats,
                load_bytes_per_s=self._rate.bytes_per_s,
                slots_free=self._arena.free_slots,
                pages_refused=dict(stats.pages_refused),
                store_failures=dict(stats.store_failures),
            )

    def close(self) -> None:
        """Wait, within bounds, for saves and loads that are under way; the store stays open."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open_saves, _CLOSE_S)
        self._saves.close()
        self._loads.close()
        self._checks.close()
