"""Loads pages from the store into leased slots, verifies them there, and writes them to the blocks in order.

Three portions are on their way at a time: while one is written, the next is verified and the one behind it read.

A load stops at the first page that is missing or not the requested one, and when its caller waits no more. Everything
that was written before is a good prefix.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from kvparams_connectors.arena import Slot
from kvparams_connectors.jobs import Job, WorkerPool
from kvparams_connectors.store import GetOp, Result, ResultCode, Results
from kvparams_connectors.transfer.devices import DeviceEvent
from kvparams_connectors.transfer.in_place_load import InPlaceLoad
from kvparams_connectors.transfer.incremental_verifier import IncrementalVerifier
from kvparams_connectors.transfer.page_portions import transfer_portions
from kvparams_connectors.transfer.page_writer import LoadablePage, PageWriter
from kvparams_connectors.transfer.reports import LoadReport, RefusedPage
from kvparams_connectors.transfer.sequence_plan import SequencePlan
from kvparams_connectors.transfer.transfer_context import TransferContext

__all__ = ["LoadOperation", "pages_in_range"]

_PORTIONS: Final = 3
"""On their way at a time."""
_Verifiers = dict[int, IncrementalVerifier]
"""By part, what is found when it arrives."""


@dataclass(frozen=True, slots=True)
class _PortionVerdict:
    """Describes what became of the pages of a portion."""

    good: list[LoadablePage]
    """In order, without a gap."""
    end: ResultCode | RefusedPage | None = None
    """Why there are no more; None if all are good."""


class LoadOperation:
    """The work of one load job."""

    def __init__(
        self,
        gear: TransferContext,
        checks: WorkerPool,
        plan: SequencePlan,
        block_ids: Sequence[int],
        start_token: int,
        end_token: int,
        fence: DeviceEvent | None,
    ) -> None:
        """Selects the pages of the load; nothing is read yet.

        Args:
            gear: the connector's store, arena and settings.
            checks: the threads that verify pages.
            plan: the pages of the sequence.
            block_ids: the block table of the sequence, from token 0.
            start_token: the first position to write, in tokens.
            end_token: the position after the last one to write.
            fence: an event of the engine's stream; blocks are written after it. None: there is no stream.
        """
        self._gear, self._checks = gear, checks
        self._plan = plan
        self._wanted = pages_in_range(plan, start_token, end_token)
        self._writer = PageWriter(gear, plan, block_ids, start_token, end_token, fence)
        self._unasked = 0
        """Pages that the store has to be asked for, and has not been."""
        self._portions = 0
        self._pipeline = gear.pages_of(plan)

    def run(self, job: Job[LoadReport]) -> LoadReport:
        """Do it; runs in a worker thread."""
        each = len(self._plan.units)
        writer, memory, wanted = self._writer, self._gear.memory, self._wanted
        if memory is not None:
            wanted = InPlaceLoad(memory, self._pipeline, self._plan, writer).run(job, wanted)
            for refused in writer.report.refused:
                self._pipeline.discard(refused.key, refused.reason)
        self._unasked = len(wanted)
        portions = transfer_portions(
            wanted,
            self._gear.arena,
            lambda pages, slots: self._request(job, pages, slots),
            portion_items=self._gear.settings.load_portion(each * self._gear.arena.slot_bytes),
            ahead=_PORTIONS,
            remaining_s=job.remaining_s,
            slots_per_item=each,
        )
        with closing(portions):
            for portion in portions:
                self._use(job, portion.job.result())
                if writer.is_over:
                    break
            else:
                if self._unasked:
                    writer.end(ResultCode.TIMEOUT)
                    return writer.report
        # The store saw the head used before the tail; say it the other way round, once for all.
        if memory is not None:
            memory.use_values(self._plan.keys)
        elif self._portions > 1:
            self._gear.store.exists(self._plan.keys, self._gear.settings.deadline_s)
        return writer.report

    def _request(self, job: Job[LoadReport], pages: Sequence[int], slots: Sequence[Slot]) -> Job[_PortionVerdict]:
        """Ask the store for pages, and have what comes verified."""
        self._portions += 1
        self._unasked -= len(pages)
        parts = [part for page in pages for part in self._plan.parts(page)]
        arrivals: _Verifiers = {}
        ops = [self._get(part, slot, arrivals) for part, slot in zip(parts, slots, strict=True)]
        get = self._gear.store.get(ops, job.remaining_s())
        verdict = Job(job.deadline, _PortionVerdict([], ResultCode.TIMEOUT))
        get.add_settled_callback(lambda: self._verify(parts, slots, arrivals, get, verdict))
        return verdict

    def _get(self, part: int, slot: Slot, arrivals: _Verifiers) -> GetOp:
        """The question for a part: the whole slot, so that a value longer than its page is seen as such."""
        op, verifier = self._pipeline.get_verified_on_arrival(
            self._plan.keys[part], self._plan.identity(part), slot.view
        )
        if verifier is not None:
            arrivals[part] = verifier
        return op

    def _verify(
        self,
        parts: Sequence[int],
        slots: Sequence[Slot],
        arrivals: _Verifiers,
        get: Job[Results],
        verdict: Job[_PortionVerdict],
    ) -> None:
        """The store is through with a portion: have it verified, unless nobody waits any more."""
        late = _PortionVerdict([], ResultCode.TIMEOUT)
        if verdict.done():
            verdict.finish(late)
            return

        def conclude(judged: Callable[[], _PortionVerdict]) -> None:
            try:
                found = judged()
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the load
                verdict.fail(error)
            else:
                verdict.finish(found)

        def judge() -> _PortionVerdict:
            return self._judge(parts, [slot.view for slot in slots], arrivals, get.result(0))

        if all(
            part in arrivals and arrivals[part].verified is not None for part in parts
        ):  # nothing is left to compute
            conclude(judge)
            return
        check = self._checks.submit(
            lambda _: judge(),
            verdict.remaining_s(),
            timed_out=late,
            refused=_PortionVerdict([], ResultCode.UNAVAILABLE),
        )
        check.add_settled_callback(lambda: conclude(lambda: check.result(0)))

    def _judge(
        self, parts: Sequence[int], views: Sequence[memoryview], arrivals: _Verifiers, results: Results
    ) -> _PortionVerdict:
        """Verify the pages of a portion, up to the first that is not good."""
        each = len(self._plan.units)
        good: list[LoadablePage] = []
        for first in range(0, len(parts), each):
            of_page = slice(first, first + each)
            end = self._check(parts[of_page], views[of_page], arrivals, results[of_page])
            if end is not None:
                return _PortionVerdict(good, end)
            good.append(LoadablePage(parts[first] // each, views[of_page]))
        return _PortionVerdict(good)

    def _use(self, job: Job[LoadReport], verdict: _PortionVerdict) -> None:
        """Write the good pages of a portion to the blocks, and say why there are no more."""
        self._writer.write(job, verdict.good)
        if verdict.end is None or self._writer.is_over:
            return
        self._writer.end(verdict.end)
        if isinstance(verdict.end, RefusedPage):
            self._pipeline.discard(verdict.end.key, verdict.end.reason)

    def _check(
        self, parts: Sequence[int], views: Sequence[memoryview], arrivals: _Verifiers, results: Results
    ) -> ResultCode | RefusedPage | None:
        """Returns why a page is not used; None: all of its parts are good."""
        for part, view, result in zip(parts, views, results, strict=True):
            seen = arrivals[part].verified if part in arrivals else None
            if seen is not None and result == Result(ResultCode.OK, seen[0]):
                refusal = seen[1]
            else:
                refusal = self._pipeline.why_unusable(result, self._plan.identity(part), (view,))
            if isinstance(refusal, ResultCode):
                return refusal
            if refusal is not None:
                return RefusedPage(part // len(self._plan.units), self._plan.keys[part], refusal.reason)
        return None


def pages_in_range(plan: SequencePlan, start_token: int, end_token: int) -> list[int]:
    """Indexes of the pages that hold some of the tokens [start_token, end_token)."""
    return [page.index for page in plan.pages if page.start < end_token and start_token < page.end]
