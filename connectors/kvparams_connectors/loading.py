"""One load: pages from the store into leased slots, verified there, written to the blocks in order.

The one rule: it stops at the first page that is missing or not what was asked for, and at the moment when nobody waits
any more; whatever was written before is a good prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvparams.pages import HEADER_BYTES, PageIdentity, Refusal, verify
from kvparams_connectors.arena import Arena, Slot
from kvparams_connectors.connector_settings import ConnectorSettings
from kvparams_connectors.jobs import Job
from kvparams_connectors.layout import PagedKVLayout
from kvparams_connectors.plan import Plan
from kvparams_connectors.reports import LoadReport, RefusedPage
from kvparams_connectors.store import Code, GetOp, KVStore, Result, Results

__all__ = ["Load"]


@dataclass(frozen=True, slots=True)
class _Portion:
    """Pages that were asked for together."""

    indexes: list[int]
    slots: list[Slot]
    job: Job[Results]

    def give_back(self) -> None:
        """Give the slots back as soon as the store does not touch them any more."""
        self.job.on_settled(lambda: [slot.give_back() for slot in self.slots])


class Load:
    """The work of one load job."""

    def __init__(
        self,
        store: KVStore,
        arena: Arena,
        layout: PagedKVLayout,
        settings: ConnectorSettings,
        plan: Plan,
        block_ids: Sequence[int],
        start_token: int,
        end_token: int,
    ) -> None:
        self._store = store
        self._arena = arena
        self._layout = layout
        self._settings = settings
        self._plan = plan
        self._block_ids = block_ids
        self._end_token = end_token
        self._wanted = [
            index for index, page in enumerate(plan.pages) if page.start < end_token and start_token < page.end
        ]
        self._report = LoadReport(start_token, start_token)

    def run(self, job: Job[LoadReport]) -> LoadReport:
        """Do it; runs in a worker thread."""
        waiting: list[_Portion] = []
        portions = 0
        try:
            while (self._wanted or waiting) and self._report.failure is None and not self._report.refused:
                while self._wanted and len(waiting) < 2:
                    # Wait for a slot only if nothing else can be done meanwhile.
                    portion = self._request(job, patient=not waiting)
                    if portion is None:
                        break
                    waiting.append(portion)
                    portions += 1
                if not waiting:
                    return replace(self._report, failure=Code.TIMEOUT)
                self._use(job, waiting[0])
                waiting.pop(0).give_back()
        finally:
            for portion in waiting:
                portion.give_back()
        if portions > 1:  # the store saw the head used before the tail; say it the other way round, once for all
            self._store.exists(self._plan.keys, self._settings.deadline_s)
        return self._report

    def _request(self, job: Job[LoadReport], *, patient: bool) -> _Portion | None:
        """Ask the store for the next pages; None if no slot comes free."""
        slots: list[Slot] = []
        while len(slots) < min(self._settings.portion_pages, len(self._wanted)):
            slot = self._arena.lease(job.remaining_s() if patient and not slots else 0.0)
            if slot is None:
                break
            slots.append(slot)
        if not slots:
            return None
        indexes, self._wanted = self._wanted[: len(slots)], self._wanted[len(slots) :]
        # The whole slot, so that a value longer than its page is seen as such.
        ops = [GetOp(self._plan.keys[index], (slot.view,)) for index, slot in zip(indexes, slots, strict=True)]
        return _Portion(indexes, slots, self._store.get(ops, job.remaining_s()))

    def _use(self, job: Job[LoadReport], portion: _Portion) -> None:
        """Verify the pages of a portion and write them to the blocks, up to the first that is not good."""
        for index, slot, result in zip(portion.indexes, portion.slots, portion.job.result(), strict=True):
            if result.code not in (Code.OK, Code.TOO_LARGE):
                self._report = replace(self._report, failure=result.code)
                return
            identity = self._plan.identity(index)
            refusal = self._judge(slot, result, identity)
            if refusal is not None:
                key = self._plan.keys[index]
                self._store.delete([key], self._settings.deadline_s)
                self._report = replace(self._report, refused=(RefusedPage(index, key, refusal.reason),))
                return
            with job.section() as in_time:
                if not in_time:
                    self._report = replace(self._report, failure=Code.TIMEOUT)
                    return
                self._write(index, slot.view[HEADER_BYTES : identity.stored_bytes], result.nbytes)
                job.offer(replace(self._report, failure=Code.TIMEOUT))

    def _judge(self, slot: Slot, result: Result, identity: PageIdentity) -> Refusal | None:
        """Why what the store gave back is not the page that was asked for; None if it is."""
        if result.code is Code.TOO_LARGE or (not self._settings.verify and result.nbytes != identity.stored_bytes):
            return Refusal("torn", f"{result.nbytes} of {identity.stored_bytes} bytes")
        return verify(slot.view[: result.nbytes], identity) if self._settings.verify else None

    def _write(self, index: int, payload: memoryview, nbytes: int) -> None:
        """Write a good page's tokens, as far as they are wanted, to the blocks."""
        page, report = self._plan.pages[index], self._report
        end = min(page.end, self._end_token)
        self._layout.scatter(
            self._block_ids, report.end_token, end - report.end_token, payload, range(page.start, page.end)
        )
        self._report = replace(report, end_token=end, pages=report.pages + 1, nbytes=report.nbytes + nbytes)
