"""The workers' half, without an engine: orders become jobs of the store connector, and each load is reported once.

Where blocks are kept for it, a save copies them in a lane of its own, and says when it has. A failure is a load that
did not reach its end or a save that stored nothing, never an exception. The report that names a failed request also
names its bad blocks, so the engine neither uses nor keeps them.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from kvparams.keys import ExtraKey, Page
from kvparams.params import KVTransferParams
from kvparams_connectors.engines.vllm.connector_metadata import ConnectorMetadata, LoadSpec, SaveSpec
from kvparams_connectors.jobs import Job
from kvparams_connectors.transfer.reports import LoadReport, SaveReport
from kvparams_connectors.transfer.sequence_plan import SequencePlan

__all__ = ["BackgroundExecutor", "FinishedTransfers", "PageConnector", "WorkerTransfers"]

_LOGGER: Final = logging.getLogger(__name__)

T = TypeVar("T")


class PageConnector(Protocol):
    """Describes what of `KVStoreConnector` is used here."""

    def plan(
        self, token_ids: Tokens[int], params: KVTransferParams | None, extras: Tokens[ExtraKey], known: Tokens[Page]
    ) -> SequencePlan:
        """Returns the pages of a sequence."""
        ...

    def load(self, plan: SequencePlan, block_ids: Tokens[int], start_token: int, end_token: int) -> Job[LoadReport]:
        """Begins to load pages."""
        ...

    def save(
        self, plan: SequencePlan, block_ids: Tokens[int], start_token: int, end_token: int, *, required: bool = False
    ) -> Job[SaveReport]:
        """Begins to save pages."""
        ...


class BackgroundExecutor(Protocol):
    """Does what can wait, not in the engine's thread: `jobs.WorkerPool`."""

    def submit(self, work: Callable[[Job[T]], T], deadline_s: float, *, timed_out: T, refused: T) -> Job[T]:
        """Does work in a thread; see `WorkerPool.submit`."""
        ...


@dataclass(slots=True)
class FinishedTransfers:
    """Describes what has ended since the last report."""

    request_ids: set[str] = field(default_factory=set[str])
    bad_blocks: set[int] = field(default_factory=set[int])
    """Of these requests: not filled, or filled in part."""
    failed: set[str] = field(default_factory=set[str])
    """Of these requests: loaded in part, of an engine that cannot go on from a part."""
    loads: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """Bytes and seconds of each load."""
    copied: list[int] = field(default_factory=list[int])
    """Numbers of save orders whose blocks are no longer needed."""


@dataclass(frozen=True, slots=True)
class _RunningLoad:
    order: LoadSpec
    job: Job[LoadReport] | None
    """None: it could not even be begun."""
    since: float


class WorkerTransfers:
    """A `WorkerTransfers` runs the loads and saves of one worker, on the engine's thread alone."""

    def __init__(
        self,
        connectors: Tokens[PageConnector],
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        aside: BackgroundExecutor | None = None,
        patience_s: float = 5.0,
        all_or_nothing: bool = False,
    ) -> None:
        """Takes connectors whose tensors are registered.

        Args:
            connectors: one connector per group of layers.
            block_size: the length of the engine's blocks, in tokens.
            clock: returns the time in seconds.
            aside: runs the copies of saves whose blocks are pinned, one after the other. None: saves copy in the
                engine's thread, as for blocks on a device, where a copy only adds work to the engine's stream.
            patience_s: a save that has not begun after so many seconds is dropped, so that its blocks come free.
            all_or_nothing: whether a request whose load failed in part loses all of it; otherwise it keeps the part
                before.
        """
        self._all_or_nothing = all_or_nothing
        self._connectors, self._block_size, self._clock = tuple(connectors), block_size, clock
        self._aside, self._patience_s = aside, patience_s
        self._running: list[_RunningLoad] = []
        self._copying = 0
        """Saves that were put aside and not heard of since."""
        self._copied: deque[tuple[int, Job[bool]]] = deque()
        """Those that have ended; filled by the lane's thread."""
        self._ended = 0
        self._saving: deque[Job[SaveReport]] = deque()
        """Saves on their way to the store; filled by whoever copies."""
        self.counts: Counter[str] = Counter()
        """What happened, by name, since the start."""

    def __len__(self) -> int:
        return len(self._running) + self._copying

    def ended(self) -> int:
        """Returns how many transfers have ended since the start. While it stays the same no counter has changed."""
        while self._saving and self._saving[0].done():
            self._saving.popleft()
            self._ended += 1
        return self._ended

    def begin(self, orders: ConnectorMetadata) -> None:
        """Start the step's loads; returns at once."""
        for order in orders.loads:
            job = None
            try:
                plan, connector = self._plan(order), self._connectors[order.group]
                job = connector.load(plan, order.block_ids, order.start, order.end)
            except Exception:
                _LOGGER.exception("a load could not be begun")
            self._running.append(_RunningLoad(order, job, self._clock()))

    def save(self, orders: ConnectorMetadata) -> None:
        """Make the step's saves: when this returns, the blocks that are not kept for them may be used again."""
        for order in orders.saves:
            if self._aside is None or order.pin_id is None:
                job = Job(self._clock() + self._patience_s, False)
                try:
                    job.finish(self._save(order))
                except Exception as error:  # noqa: BLE001 - told with the others
                    job.fail(error)
            else:
                job = self._aside.submit(
                    lambda _, order=order: self._save(order), self._patience_s, timed_out=False, refused=False
                )
            self._copying += 1
            number = order.pin_id or 0
            job.add_settled_callback(lambda number=number, job=job: self._copied.append((number, job)))

    def _save(self, order: SaveSpec) -> bool:
        plan, connector = self._plan(order), self._connectors[order.group]
        self._saving.append(connector.save(plan, order.block_ids, order.start, order.end, required=order.required))
        return True

    def _hear(self, seen: FinishedTransfers) -> None:
        """Records the saves that no longer need their blocks."""
        while self._copied:
            number, job = self._copied.popleft()
            self._copying -= 1
            self._ended += 1
            if number:
                seen.copied.append(number)
            try:
                self.counts["saves_late"] += not job.result(0)
            except Exception:
                self.counts["saves_failed"] += 1
                _LOGGER.exception("a save failed")

    def finished(self) -> FinishedTransfers:
        """Returns what has ended, each once."""
        seen = FinishedTransfers()
        self._hear(seen)
        if not self._running:
            return seen
        under_way = {one.order.request_id for one in self._running if one.job is not None and not one.job.done()}
        still: list[_RunningLoad] = []
        taken: dict[str, tuple[int, float]] = {}
        for one in self._running:
            order = one.order
            if order.request_id in under_way:
                still.append(one)
                continue
            report = self._report(one)
            self._ended += 1
            end = max(order.start, min(report.end_token, order.end))
            seen.request_ids.add(order.request_id)
            nbytes, seconds = taken.get(order.request_id, (0, 0.0))
            taken[order.request_id] = nbytes + report.nbytes, max(seconds, self._clock() - one.since)
            if end < order.end:
                if self._all_or_nothing:
                    self.counts["loads_short"] += order.request_id not in seen.failed
                    seen.failed.add(order.request_id)
                    continue
                self.counts["loads_short"] += 1
                size = self._block_size
                seen.bad_blocks.update(order.block_ids[end // size : -(-order.end // size)])
        self._running = still
        seen.loads.extend(taken.values())
        return seen

    def _report(self, one: _RunningLoad) -> LoadReport:
        if one.job is not None:
            try:
                return one.job.result(0)
            except Exception:
                _LOGGER.exception("a load failed")
        return LoadReport(one.order.start, one.order.start)

    def _plan(self, order: LoadSpec | SaveSpec) -> SequencePlan:
        sequence, group = order.sequence, order.group
        known = sequence.pages[group] if sequence.pages else ()
        return self._connectors[group].plan(sequence.token_ids, sequence.shared_params, sequence.extras, known)
