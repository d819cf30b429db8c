"""From token ids and paged tensors to jobs of a store: longest stored prefix, save, load, release.

A save copies the KV out of the blocks before it returns, so the engine may reuse them at once. A load reads pages in
order into leased slots and stops at the first that is missing or not what was asked for. The one rule: a page is
verified in its slot before any of it is written to a block, and no block is written once the wait for the load is over.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvparams.keys import Extra, Namespace, Page, page_chain, page_key
from kvparams.pages import HEADER_BYTES, PageIdentity, Refusal, identify, seal, verify
from kvparams.params import KVTransferParams
from kvparams_connectors.arena import Arena, Slot
from kvparams_connectors.jobs import Job, Lane
from kvparams_connectors.layout import PagedKVLayout
from kvparams_connectors.reports import ConnectorStats, Hit, LoadReport, RefusedPage, ReleaseReport, SaveReport
from kvparams_connectors.store import Code, GetOp, KVStore, PutOp, Result, Results

__all__ = ["ConnectorSettings", "KVStoreConnector", "Plan"]

_MAX_TAILS: Final = 65_536
"""Partial pages remembered for `release`; older ones are left to the store's eviction."""


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """How a connector uses its store."""

    deadline_s: float = 5.0
    """For each job, from its submission on."""
    arena_bytes: int = 64 << 20
    """For pages on their way: a save that finds no room drops pages, a load waits for it."""
    portion_pages: int = 8
    """A load asks the store for so many pages at a time, and for the next ones while it verifies."""
    load_threads: int = 2
    """How many loads make progress at a time."""
    verify: bool = True
    """False uses whatever the store gives back. It exists to show what verification is good for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sequence is to a store: its pages and their keys. Pure data; nothing has been asked or moved."""

    namespace: Namespace
    """The connector's, with the request's cache salt and LoRA."""
    tokens: int
    pages: tuple[Page, ...]
    """In order; the last one may be partial."""
    keys: tuple[str, ...]
    """One per page."""
    promised_tokens: int
    """Up to where the params' load keys promise stored KV; 0 if they promise nothing."""
    foreign_keys: int
    """Load or store keys in the params that are no key of this sequence. They are never used."""
    savable: frozenset[str] | None
    """If the params name store keys: only these are stored."""


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
        """The pages of a sequence and their keys, the partial last page included.

        Keys are always derived from the token ids. Load keys in `params` are a promise, never an address: one that is
        not among the derived keys is counted and not used. Store keys in `params`, if there are any, limit what is
        stored. Cache salt and LoRA come from `params.isolation`.

        Raises:
            ValueError: a token id is not an integer in [0, 2^32).
        """
        namespace = self._namespace
        if params is not None and params.isolation is not None:
            isolation = params.isolation
            namespace = replace(namespace, lora=isolation.lora, cache_salt=isolation.cache_salt)
        pages = page_chain(namespace, token_ids, extras)
        keys = tuple(page_key(namespace, page, self._layout.rectangle) for page in pages)
        load_keys = frozenset((params and params.load_keys) or ())
        store_keys = None if params is None or params.store_keys is None else frozenset(params.store_keys)
        promised = max((page.end for page, key in zip(pages, keys, strict=True) if key in load_keys), default=0)
        foreign = len((load_keys | (store_keys or frozenset())).difference(keys))
        return Plan(namespace, len(token_ids), pages, keys, promised, foreign, store_keys)

    def lookup(self, plan: Plan) -> Job[Hit]:
        """How much of the sequence is stored without a gap. A page of the wrong size counts as not stored."""

        def longest(results: Results) -> Hit:
            nbytes = 0
            for index, result in enumerate(results):
                expected = self._identity(plan, index).stored_bytes
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
            payload = slot.view[HEADER_BYTES : self._identity(plan, index).stored_bytes]
            try:
                self._layout.gather(block_ids, page.start, page.tokens, payload)
            except IndexError:
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
        found = self._store.exists([plan.keys[index] for index in indexes], _remaining(job)).result()
        identities = {index: self._identity(plan, index) for index in indexes}
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
        put = self._store.put(ops, _remaining(job))
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
        return self._loads.submit(
            lambda job: self._load(job, plan, block_ids, start_token, end_token),
            self._settings.deadline_s,
            timed_out=replace(nothing, failure=Code.TIMEOUT),
            refused=replace(nothing, failure=Code.UNAVAILABLE),
        )

    def _load(
        self, job: Job[LoadReport], plan: Plan, block_ids: Sequence[int], start_token: int, end_token: int
    ) -> LoadReport:
        wanted = [index for index, page in enumerate(plan.pages) if page.start < end_token and start_token < page.end]
        report = LoadReport(start_token, start_token)
        waiting: list[_Portion] = []
        try:
            while wanted or waiting:
                while wanted and len(waiting) < 2:
                    # Wait for a slot only if nothing else can be done meanwhile.
                    portion = self._request(job, plan, wanted, patient=not waiting)
                    if portion is None:
                        break
                    waiting.append(portion)
                if not waiting:
                    return self._loaded(replace(report, failure=Code.TIMEOUT))
                portion = waiting.pop(0)
                try:
                    report = self._use(job, plan, portion, block_ids, end_token, report)
                finally:
                    portion.job.on_settled(portion.give_back)
                if report.failure is not None or report.refused:
                    break
        finally:
            for portion in waiting:
                portion.job.on_settled(portion.give_back)
        return self._loaded(report)

    def _request(self, job: Job[LoadReport], plan: Plan, wanted: list[int], *, patient: bool) -> "_Portion | None":
        """Ask the store for the next pages; takes them out of `wanted`. None if no slot comes free."""
        slots: list[Slot] = []
        while len(slots) < min(self._settings.portion_pages, len(wanted)):
            slot = self._arena.lease(_remaining(job) if patient and not slots else 0.0)
            if slot is None:
                break
            slots.append(slot)
        if not slots:
            return None
        indexes = wanted[: len(slots)]
        del wanted[: len(slots)]
        # The whole slot, so that a value longer than its page is seen as such.
        ops = [GetOp(plan.keys[index], (slot.view,)) for index, slot in zip(indexes, slots, strict=True)]
        return _Portion(indexes, slots, self._store.get(ops, _remaining(job)))

    def _use(
        self,
        job: Job[LoadReport],
        plan: Plan,
        portion: "_Portion",
        block_ids: Sequence[int],
        end_token: int,
        report: LoadReport,
    ) -> LoadReport:
        """Verify the pages of a portion and write them to the blocks, up to the first that is not good."""
        results = portion.job.result()
        for index, slot, result in zip(portion.indexes, portion.slots, results, strict=True):
            if result.code not in (Code.OK, Code.TOO_LARGE):
                return replace(report, failure=result.code)
            page, identity = plan.pages[index], self._identity(plan, index)
            refusal = self._judge(slot, result, identity)
            if refusal is not None:
                self._store.delete([plan.keys[index]], self._settings.deadline_s)
                return replace(report, refused=(RefusedPage(index, plan.keys[index], refusal.reason),))
            end = min(page.end, end_token)
            payload = slot.view[HEADER_BYTES : identity.stored_bytes]
            with job.section() as in_time:
                if not in_time:
                    return replace(report, failure=Code.TIMEOUT)
                tokens = end - report.end_token
                self._layout.scatter(block_ids, report.end_token, tokens, payload, range(page.start, page.end))
                report = replace(report, end_token=end, pages=report.pages + 1, nbytes=report.nbytes + result.nbytes)
                job.offer(replace(report, failure=Code.TIMEOUT))
        return report

    def _judge(self, slot: Slot, result: Result, identity: PageIdentity) -> Refusal | None:
        """Why what the store gave back is not the page that was asked for; None if it is."""
        if result.code is Code.TOO_LARGE or (not self._settings.verify and result.nbytes != identity.stored_bytes):
            return Refusal("torn", f"{result.nbytes} of {identity.stored_bytes} bytes")
        return verify(slot.view[: result.nbytes], identity) if self._settings.verify else None

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

    def _identity(self, plan: Plan, index: int) -> PageIdentity:
        return identify(plan.namespace, plan.pages[index], self._layout.rectangle)


@dataclass(frozen=True, slots=True)
class _Portion:
    """Pages asked for together."""

    indexes: list[int]
    slots: list[Slot]
    job: Job[Results]

    def give_back(self) -> None:
        for slot in self.slots:
            slot.give_back()


def _give_back(held: dict[int, Slot]) -> None:
    while held:
        held.popitem()[1].give_back()


def _remaining(job: Job[SaveReport] | Job[LoadReport]) -> float:
    return max(0.0, job.deadline - time.monotonic())
