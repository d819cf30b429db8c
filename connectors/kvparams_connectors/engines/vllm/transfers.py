"""The workers' half, without an engine: orders become jobs of the store connector, and each load is reported once.

The one rule: what went wrong is a load that did not reach its end, never an exception; its blocks are named in the same
report as the request, so the engine neither uses nor keeps them.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvparams.keys import Extra
from kvparams.params import KVTransferParams
from kvparams_connectors.engines.vllm.orders import LoadOrder, SaveOrder, Sequence, StepOrders
from kvparams_connectors.jobs import Job
from kvparams_connectors.plan import Plan
from kvparams_connectors.reports import LoadReport, SaveReport

__all__ = ["Connector", "Finished", "Transfers"]

_LOGGER: Final = logging.getLogger(__name__)


class Connector(Protocol):
    """What of `KVStoreConnector` is used here."""

    def plan(self, token_ids: Tokens[int], params: KVTransferParams | None, extras: Tokens[Extra]) -> Plan: ...
    def load(self, plan: Plan, block_ids: Tokens[int], start_token: int, end_token: int) -> Job[LoadReport]: ...
    def save(
        self, plan: Plan, block_ids: Tokens[int], start_token: int, end_token: int, *, required: bool = False
    ) -> Job[SaveReport]: ...


@dataclass(slots=True)
class Finished:
    """What has ended since the last report."""

    request_ids: set[str] = field(default_factory=set[str])
    bad_blocks: set[int] = field(default_factory=set[int])
    """Of these requests: not filled, or filled in part."""
    loads: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    """Bytes and seconds of each load."""


@dataclass(frozen=True, slots=True)
class _Running:
    order: LoadOrder
    job: Job[LoadReport] | None
    """None: it could not even be begun."""
    since: float


class Transfers:
    """One worker's loads and saves. Used by the engine's thread alone."""

    def __init__(self, connector: Connector, block_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`block_size`: tokens of the engine's blocks."""
        self._connector, self._block_size, self._clock = connector, block_size, clock
        self._running: list[_Running] = []
        self.counts: Counter[str] = Counter()
        """What happened, by name, since the start."""

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, orders: StepOrders) -> None:
        """Start the step's loads; returns at once."""
        for order in orders.loads:
            job = None
            try:
                job = self._connector.load(self._plan(order.sequence), order.block_ids, order.start, order.end)
            except Exception:
                _LOGGER.exception("a load could not be begun")
            self._running.append(_Running(order, job, self._clock()))

    def save(self, orders: StepOrders) -> None:
        """Make the step's saves: when this returns, the blocks may be used again."""
        for order in orders.saves:
            try:
                self._save(order)
            except Exception:
                self.counts["saves_failed"] += 1
                _LOGGER.exception("a save failed")

    def _save(self, order: SaveOrder) -> None:
        plan = self._plan(order.sequence)
        self._connector.save(plan, order.block_ids, order.start, order.end, required=order.required)

    def finished(self) -> Finished:
        """Loads that have ended, each once."""
        seen = Finished()
        if not self._running:
            return seen
        still: list[_Running] = []
        for one in self._running:
            if one.job is not None and not one.job.done():
                still.append(one)
                continue
            order = one.order
            report = self._report(one)
            end = max(order.start, min(report.end_token, order.end))
            seen.request_ids.add(order.request_id)
            seen.loads.append((report.nbytes, self._clock() - one.since))
            if end < order.end:
                self.counts["loads_short"] += 1
                size = self._block_size
                seen.bad_blocks.update(order.block_ids[end // size : -(-order.end // size)])
        self._running = still
        return seen

    def _report(self, one: _Running) -> LoadReport:
        if one.job is not None:
            try:
                return one.job.result(0)
            except Exception:
                _LOGGER.exception("a load failed")
        return LoadReport(one.order.start, one.order.start)

    def _plan(self, sequence: Sequence) -> Plan:
        return self._connector.plan(sequence.token_ids, sequence.shared, sequence.extras)
