"""Saves pages: copies them out of the blocks in portions, and seals and puts earlier portions meanwhile.

When `start` has returned, nothing reads the blocks any more (on a device: no work that the engine launches afterwards
can change the bytes that are read). A slot is given back only when neither a copy nor the store uses it.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvparams.pages import HEADER_BYTES, PageIdentity
from kvparams_connectors.arena import Slot
from kvparams_connectors.jobs import Job, WorkerPool
from kvparams_connectors.store import PutOp, Result, ResultCode, Results
from kvparams_connectors.transfer.block_copier import PageCopy
from kvparams_connectors.transfer.devices import DeviceEvent
from kvparams_connectors.transfer.in_place_save import InPlaceSave
from kvparams_connectors.transfer.page_pipeline import STORED_CODES
from kvparams_connectors.transfer.page_portions import release_slots
from kvparams_connectors.transfer.reports import SaveReport
from kvparams_connectors.transfer.sequence_plan import SequencePlan
from kvparams_connectors.transfer.transfer_context import TransferContext

__all__ = ["SaveOperation"]


@dataclass(slots=True)
class _SavePortion:
    """Pages that are put together."""

    held: dict[int, Slot] = field(default_factory=dict[int, Slot])
    """By part: slots that the store has not been given."""
    checksums: dict[int, int] = field(default_factory=dict[int, int])
    """By part: of its payload, where that was written in the thread that saves."""
    results: dict[int, Result] = field(default_factory=dict[int, Result])
    """By part: what became of it."""
    pages: list[int] = field(default_factory=list[int])
    copied: DeviceEvent | None = None
    """When the payloads are in the slots; None: they are."""
    given: bool = False
    """The store has it, and what the store says decides."""

    def give_back(self) -> None:
        """Give back the slots that the store was not given, once nothing is copied to them any more."""
        if self.held and self.copied is not None:
            self.copied.wait()
        release_slots(self.held.values())
        self.held.clear()


class SaveOperation:
    """The work of one save job."""

    def __init__(
        self,
        gear: TransferContext,
        lane: WorkerPool,
        plan: SequencePlan,
        pages: Sequence[int],
        ended: Callable[[SaveReport], None],
    ) -> None:
        """Begins with nothing saved; `start` copies the pages.

        Args:
            gear: the connector's store, arena and settings.
            lane: the threads that seal portions and put them into the store.
            plan: the pages of the sequence.
            pages: the indexes of the pages to save.
            ended: called with the report when all work has ended, before the job is done.
        """
        deadline_s = gear.settings.deadline_s
        self._gear, self._lane, self._plan, self._pages, self._ended = gear, lane, plan, pages, ended
        self.job = Job(time.monotonic() + deadline_s, SaveReport(failed={ResultCode.TIMEOUT: len(pages)}))
        self._found: Job[Results] | None = None
        """Which parts the store has, of those that are put."""
        self._known: Results | None = None
        """What `start` has seen of that."""
        self._offset: dict[int, int] = {}
        self._identity: dict[int, PageIdentity] = {}
        self._pipeline = gear.pages_of(plan)
        self._lock = threading.Lock()
        self._report = SaveReport()
        self._undecided = len(pages)
        self._portions = 0
        self._portion = gear.settings.save_portion(len(plan.units) * gear.arena.slot_bytes)
        self._open = 1
        """Portions under way, and `start`."""

    def _parts(self, pages: Sequence[int]) -> Sequence[int]:
        """Returns the parts of pages that are to be stored."""
        plan, savable = self._plan, self._plan.storable_keys
        if savable is None:
            return plan.parts(pages[0]) if len(pages) == 1 else [part for page in pages for part in plan.parts(page)]
        return [part for page in pages for part in plan.parts(page) if plan.keys[part] in savable]

    def start(self, block_ids: Sequence[int], *, required: bool) -> None:
        """Copy the pages out of the blocks and set off what follows; `required` waits for room on the way."""
        portion = _SavePortion()
        copies: list[PageCopy] = []
        try:
            pages = self._save_in_place(block_ids)
            self._ask(pages)
            for page in pages:
                parts = self._parts([page])
                if self._stored_already(parts):
                    self._decide(1, SaveReport(existing=1))
                    continue
                slots = self._lease(len(parts), len(copies), required=required)
                if not slots:
                    if copies:  # room comes of what is under way, so let it go
                        self._dispatch(block_ids, portion, copies)
                        portion, copies = _SavePortion(), []
                        slots = self._lease(len(parts), 0, required=required)
                    if not slots:
                        self._decide(1, SaveReport(dropped=1))
                        continue
                portion.pages.append(page)
                for part, slot in zip(parts, slots, strict=True):
                    portion.held[part] = slot
                    copies.append(self._copy(page, part, slot))
                if len(portion.pages) == self._portion:
                    self._dispatch(block_ids, portion, copies)
                    portion, copies = _SavePortion(), []
            if copies:
                self._dispatch(block_ids, portion, copies)
        except BaseException:
            portion.give_back()
            raise
        finally:
            self._close()

    def _save_in_place(self, block_ids: Sequence[int]) -> Sequence[int]:
        """Saves pages into a store in this process's memory; returns the pages that have to be put."""
        memory, copier = self._gear.memory, self._gear.copier.host
        if memory is None or copier is None or self._pipeline.keys is not None or self._lane.is_closed:
            return self._pages
        save = InPlaceSave(memory, copier, self._plan)
        try:
            return save.save(block_ids, self._pages, [self._parts([page]) for page in self._pages])
        finally:
            self._decide(save.report.saved + save.report.existing, save.report)
            memory.use_values([self._plan.keys[part] for part in self._parts(self._pages)])

    def _ask(self, pages: Sequence[int]) -> None:
        """Asks the store which of the pages it has."""
        if pages:
            parts = self._parts(pages)
            self._found = self._gear.store.exists([self._plan.keys[part] for part in parts], self.job.remaining_s())
            self._offset = {part: number for number, part in enumerate(parts)}
            self._identity = {part: self._plan.identity(part) for part in parts}

    def _stored_already(self, parts: Sequence[int]) -> bool:
        """Returns whether it is known by now that all these parts are stored; never waits."""
        if self._known is None and self._found is not None and self._found.done():
            self._known = self._found.result(0)
        return self._known is not None and all(self._is_stored(part, self._known) for part in parts)

    def _is_stored(self, part: int, found: Results) -> bool:
        return found[self._offset[part]].matches_size(self._identity[part].stored_bytes)

    def _lease(self, count: int, ahead: int, *, required: bool) -> list[Slot]:
        """Slots for a page; none if there is no room. `ahead`: copies that will take room before these."""
        # Somebody who holds slots that nobody works on yet must not wait for others.
        patient = required and not ahead
        if not required and self._gear.copier.free_copies() < ahead + count:
            return []
        return self._gear.arena.lease_many(count, count, self.job.remaining_s() if patient else 0.0)

    def _copy(self, page: int, part: int, slot: Slot) -> PageCopy:
        where = self._plan.pages[page]
        unit = self._plan.units[part % len(self._plan.units)]
        payload = slot.view[HEADER_BYTES : self._identity[part].stored_bytes]
        return PageCopy(unit, where.start, where.tokens, range(where.start, where.end), payload)

    def _dispatch(self, block_ids: Sequence[int], portion: _SavePortion, copies: Sequence[PageCopy]) -> None:
        """Copy a portion out of the blocks and have it put."""
        parts = list(portion.held)

        def there(index: int, checksum: int) -> None:
            portion.checksums[parts[index]] = checksum

        portion.copied = self._gear.copier.gather(block_ids, copies, there)
        with self._lock:
            self._open += 1
            self._portions += 1
        put = self._lane.submit(
            lambda _: self._put(portion),
            self.job.remaining_s(),
            timed_out=ResultCode.TIMEOUT,
            refused=ResultCode.UNAVAILABLE,
        )
        put.add_settled_callback(lambda: self._settled(portion, put))

    def _put(self, portion: _SavePortion) -> ResultCode:
        """Seal and put the parts that are not stored yet; in the lane."""
        if portion.copied is not None:
            portion.copied.wait()
        found = [] if self._found is None else self._found.result()
        for part in [part for part in portion.held if self._is_stored(part, found)]:
            portion.results[part] = Result(ResultCode.EXISTS)
            portion.held.pop(part).release()
        if not portion.held:
            return ResultCode.EXISTS
        parts = sorted(portion.held)
        ops = [self._op(part, portion.held[part], portion.checksums.get(part)) for part in parts]
        put = self._gear.store.put(ops, self.job.remaining_s())
        slots = [portion.held.pop(part) for part in parts]
        portion.given = True

        def settled() -> None:
            release_slots(slots)
            with suppress(Exception):  # a defect of the store: the parts have no result, so the report says INTERNAL
                portion.results.update(zip(parts, put.result(0), strict=True))
            self._account(portion, ResultCode.INTERNAL)

        put.add_settled_callback(settled)
        return ResultCode.OK

    def _op(self, part: int, slot: Slot, payload_checksum: int | None) -> PutOp:
        """Returns the put operation of a part.

        It is sealed now if that reads no payload, or if a tag is needed.
        """
        key, identity = self._plan.keys[part], self._identity[part]
        page = slot.view[: identity.stored_bytes]
        if payload_checksum is None:
            return self._pipeline.put_sealed_when_read(key, identity, page)
        return self._pipeline.sealed_put(key, identity, (page,), payload_checksum)

    def _settled(self, portion: _SavePortion, put: Job[ResultCode]) -> None:
        """The lane is through with a portion."""
        portion.give_back()
        if portion.given:
            return
        try:
            code = put.result(0)
        except Exception:  # noqa: BLE001 - a defect; the report says so, and the slots are back
            code = ResultCode.INTERNAL
        self._account(portion, code)

    def _account(self, portion: _SavePortion, missing: ResultCode) -> None:
        """A portion has ended; parts without a result of their own have `missing`."""
        saved = existing = nbytes = 0
        lost = Result(missing)
        failures: Counter[ResultCode] = Counter()
        for page in portion.pages:
            results = [portion.results.get(part, lost) for part in self._parts([page])]
            failed = [one.code for one in results if one.code not in STORED_CODES]
            stored = [one.nbytes for one in results if one.code is ResultCode.OK]
            nbytes += sum(stored)
            if failed:
                failures[failed[0]] += 1
            elif stored:
                saved += 1
            else:
                existing += 1
        self._decide(len(portion.pages), SaveReport(saved, existing, failed=failures, nbytes=nbytes))
        self._close()

    def _decide(self, pages: int, seen: SaveReport) -> None:
        """Add so many pages to the report, and to what it says should the deadline pass now."""
        with self._lock:
            self._report += seen
            self._undecided -= pages
            late = self._report
            if self._undecided:
                late += SaveReport(failed={ResultCode.TIMEOUT: self._undecided})
        self.job.set_partial_result(late)

    def _close(self) -> None:
        """Ends one of the operations that keep the job open; the last one ends the job."""
        with self._lock:
            self._open -= 1
            if self._open:
                return
        if self._portions > 1:  # the store saw the head before the tail; say it the other way round, once for all
            self._gear.store.exists([self._plan.keys[part] for part in self._parts(self._pages)], 1.0)
        self._ended(self._report)
        self.job.finish(self._report)
