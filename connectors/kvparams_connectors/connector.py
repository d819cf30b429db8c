"""From token ids and paged tensors to jobs of a store: longest stored prefix, save, load, release.

A save copies the KV out of the blocks before it returns, so the engine may reuse them at once. A load reads pages in
order into leased slots and stops at the first that is missing or not what was asked for. The one rule: a page is
verified in its slot before any of it is written to a block, and no block is written once the wait for the load is over.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from kvparams.keys import Extra, Namespace
from kvparams.pages import HEADER_BYTES, seal
from kvparams.params import KVTransferParams
from kvparams_connectors.arena import Arena, Slot
from kvparams_connectors.connector_settings import ConnectorSettings
from kvparams_connectors.jobs import Job, Lane
from kvparams_connectors.layout import PagedKVLayout
from kvparams_connectors.loading import Load
from kvparams_connectors.plan import Plan, make_plan
from kvparams_connectors.reports import ConnectorStats, Hit, LoadReport, ReleaseReport, SaveReport
from kvparams_connectors.store import Code, KVStore, PutOp, Results

__all__ = ["ConnectorSettings", "KVStoreConnector", "Plan"]

_MAX_TAILS: Final = 65_536
"""Partial pages remembered for `release`; older ones are left to the store's eviction."""


class KVStoreConnector:
    """One engine's way to a store. Its methods may be called from any thread and return at once."""

    def __init__(
        self,
        store: KVStore,
        namespace: Namespace,
        layout: PagedKVLayout,
        settings: ConnectorSettings | None = None,
    ) -> None:
        """Args:
            store: stays the caller's; `close` does not close it.
            namespace: without cache salt and LoRA, which each request brings.
            layout: the engine's tensors.
            settings: None means the defaults.

        Raises:
            LayoutError: the tensors are not what the namespace describes.
        """
        layout.check(namespace)
        self._store = store
        self._namespace = namespace
        self._layout = layout
        self._settings = settings or ConnectorSettings()
        self._arena = Arena(self._settings.arena_bytes, HEADER_BYTES + layout.payload_bytes(namespace.page_tokens))
        store.register(self._arena)
        self._saves = Lane("kvparams-save")
        self._loads = Lane("kvparams-load", threads=self._settings.load_threads)
        self._lock = threading.Lock()
        self._stats = ConnectorStats(self._arena.slots, self._arena.slots)
        self._tails: OrderedDict[str, int] = OrderedDict()

    def plan(
        self, token_ids: Sequence[int], params: KVTransferParams | None = None, extras: Iterable[Extra] = ()
    ) -> Plan:
        """The pages of a sequence and their keys, the partial last page included; see `make_plan`."""
        return make_plan(self._namespace, self._layout.rectangle, token_ids, params, extras)

    def lookup(self, plan: Plan) -> Job[Hit]:
        """How much of the sequence is stored without a gap. A page of the wrong size counts as not stored."""

        def longest(results: Results) -> Hit:
            nbytes = 0
            for index, result in enumerate(results):
                expected = plan.identity(index).stored_bytes
                if result.code is not Code.OK or result.nbytes != expected:
                    failure = None if result.code in (Code.OK, Code.MISS) else result.code
                    return Hit(plan.pages[index].start, index, nbytes, failure)
                nbytes += expected
            return Hit(plan.tokens, len(plan.pages), nbytes)

        return self._store.exists(plan.keys, self._settings.deadline_s).then(longest)

    # ---- save

    def save(self, plan: Plan, block_ids: Sequence[int], start_token: int, end_token: int) -> Job[SaveReport]:
        """Store the pages that end in (start_token, end_token].

        Their whole content must stand in the blocks, so also tokens before `start_token`. It is copied before this
        returns: the blocks may be reused at once. Best effort: pages for which no slot is free are dropped, and the
        report says so.

        Args:
            plan: of a sequence with at least `end_token` tokens.
            block_ids: the sequence's block table from token 0.
            start_token: up to where the sequence was saved before.
            end_token: up to where the blocks are filled.

        Raises:
            IndexError: `block_ids` does not reach `end_token`, or a block does not exist.
        """
        held: dict[int, Slot] = {}
        dropped = 0
        for index, page in enumerate(plan.pages):
            if not start_token < page.end <= end_token:
                continue
            if plan.savable is not None and plan.keys[index] not in plan.savable:
                continue
            slot = self._arena.lease()
            if slot is None:
                dropped += 1
                continue
            held[index] = slot
            payload = slot.view[HEADER_BYTES : plan.identity(index).stored_bytes]
            try:
                self._layout.gather(block_ids, page.start, page.tokens, payload)
            except BaseException:
                _give_back(held)
                raise
        with self._lock:
            self._stats.pages_dropped += dropped
        report = SaveReport(dropped=dropped)
        job = self._saves.submit(
            lambda job: self._save(job, plan, held, report),
            self._settings.deadline_s,
            timed_out=replace(report, failed={Code.TIMEOUT: len(held)}),
            refused=replace(report, failed={Code.UNAVAILABLE: len(held)}),
        )
        job.on_settled(lambda: _give_back(held))
        return job

    def _save(self, job: Job[SaveReport], plan: Plan, held: dict[int, Slot], report: SaveReport) -> SaveReport:
        """Seal and put the pages in `held`; slots that go to the store are taken out of it."""
        indexes = sorted(held)
        found = self._store.exists([plan.keys[index] for index in indexes], job.remaining_s()).result()
        identities = {index: plan.identity(index) for index in indexes}
        stored = [
            index
            for index, result in zip(indexes, found, strict=True)
            if result.code is Code.OK and result.nbytes == identities[index].stored_bytes
        ]
        ops: list[PutOp] = []
        lent: dict[int, Slot] = {}
        for index in indexes:
            if index in stored:
                continue
            slot = lent[index] = held.pop(index)
            buffer = slot.view[: identities[index].stored_bytes]
            seal(buffer, identities[index])
            ops.append(PutOp(plan.keys[index], (buffer,)))
        put = self._store.put(ops, job.remaining_s())
        put.on_settled(lambda: _give_back(lent))
        failed: dict[Code, int] = {}
        saved = existing = nbytes = 0
        for result in put.result():
            if result.code is Code.OK:
                saved, nbytes = saved + 1, nbytes + result.nbytes
            elif result.code is Code.EXISTS:
                existing += 1
            else:
                failed[result.code] = failed.get(result.code, 0) + 1
        report = replace(report, saved=saved, existing=existing + len(stored), failed=failed, nbytes=nbytes)
        self._count_save(plan, indexes, report)
        return report

    def _count_save(self, plan: Plan, indexes: Sequence[int], report: SaveReport) -> None:
        with self._lock:
            stats = self._stats
            stats.pages_saved += report.saved
            stats.bytes_saved += report.nbytes
            stats.pages_existing += report.existing
            for code, count in report.failed.items():
                stats.store_failures[code.value] = stats.store_failures.get(code.value, 0) + count
            for index in indexes:
                if plan.pages[index].tokens < plan.namespace.page_tokens:
                    key = plan.keys[index]
                    self._tails[key] = self._tails.pop(key, 0) + 1
                    if len(self._tails) > _MAX_TAILS:
                        self._tails.popitem(last=False)

    # ---- load

    def load(self, plan: Plan, block_ids: Sequence[int], start_token: int, end_token: int) -> Job[LoadReport]:
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
        load = Load(self._store, self._arena, self._layout, self._settings, plan, block_ids, start_token, end_token)
        return self._loads.submit(
            lambda job: self._loaded(load.run(job)),
            self._settings.deadline_s,
            timed_out=replace(nothing, failure=Code.TIMEOUT),
            refused=replace(nothing, failure=Code.UNAVAILABLE),
        )

    def _loaded(self, report: LoadReport) -> LoadReport:
        with self._lock:
            stats = self._stats
            stats.pages_loaded += report.pages
            stats.bytes_loaded += report.nbytes
            stats.tokens_loaded += report.end_token - report.start_token
            for page in report.refused:
                stats.pages_refused[page.reason] = stats.pages_refused.get(page.reason, 0) + 1
            if report.failure not in (None, Code.MISS):
                name = report.failure.value
                stats.store_failures[name] = stats.store_failures.get(name, 0) + 1
        return report

    # ---- the rest

    def release(self, plan: Plan) -> Job[ReleaseReport]:
        """The transfer is over: delete what only it needed.

        That is its partial last page, if this connector saved it and no other save of the same page is still to be
        released. Full pages stay: they are the shared cache, and the store's eviction ends their life.
        """
        with self._lock:
            mine: list[str] = []
            for key in plan.keys[-1:]:
                count = self._tails.pop(key, 0)
                if count > 1:
                    self._tails[key] = count - 1
                elif count == 1:
                    mine.append(key)
        deleted = self._store.delete(mine, self._settings.deadline_s)
        return deleted.then(lambda results: ReleaseReport(sum(result.code is Code.OK for result in results)))

    def stats(self) -> ConnectorStats:
        """A copy of the counters, and the arena's state."""
        with self._lock:
            stats = self._stats
            return replace(
                stats,
                slots_free=self._arena.free,
                pages_refused=dict(stats.pages_refused),
                store_failures=dict(stats.store_failures),
            )

    def close(self) -> None:
        """Wait, within bounds, for saves and loads that are under way; the store stays open."""
        self._saves.close()
        self._loads.close()


def _give_back(held: dict[int, Slot]) -> None:
    while held:
        held.popitem()[1].give_back()
