"""Collects what all workers contribute to a snapshot of the live page, when one of them is asked for it.

The supervisor does not read the parts. Requests within a second are answered with the same parts, however many workers
have viewers.
"""

import asyncio
import json
from typing import Final, NamedTuple

from kvparams_proxy.workers.channel import Frame, FrameKind
from kvparams_proxy.workers.metrics_hub import MetricsHub
from kvparams_proxy.workers.worker_link import REQUEST_HEAD
from kvparams_proxy.workers.worker_process import WorkerProcess
from kvparams_proxy.workers.worker_rounds import ROUND_HEAD, WorkerRounds

__all__ = ["PartCoordinator"]

_FRESH_S: Final = 0.7


class _PartsRequest(NamedTuple):
    worker: WorkerProcess
    number: bytes


class PartCoordinator:
    """Asks workers for their parts. `KINDS` are the frames that it handles."""

    KINDS: Final = (FrameKind.PARTS_WANTED, FrameKind.PART)

    def __init__(self, metrics: MetricsHub) -> None:
        """`metrics` has the counts of workers that have exited."""
        self._metrics = metrics
        self._rounds = WorkerRounds[_PartsRequest](FrameKind.COLLECT_PART, self._answer)
        self._parts: dict[WorkerProcess, bytes] = {}
        self._collected_s = float("-inf")

    def started(self, worker: WorkerProcess) -> None:
        """Adds a worker."""
        self._rounds.started(worker)

    def ended(self, worker: WorkerProcess) -> None:
        """Removes a worker that has exited."""
        self._parts.pop(worker, None)
        self._rounds.ended(worker)

    def received(self, worker: WorkerProcess, frame: Frame) -> None:
        """Handles a frame of one of `KINDS`."""
        if frame.kind is FrameKind.PARTS_WANTED:
            self._rounds.ask(_PartsRequest(worker, frame.payload[: REQUEST_HEAD.size]))
        elif self._rounds.arrived(worker, frame.payload):
            self._parts[worker] = frame.payload[ROUND_HEAD.size :]

    async def _answer(self, asked: list[_PartsRequest]) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - self._collected_s >= _FRESH_S:
            self._parts.clear()
            await self._rounds.collect()
            self._collected_s = loop.time()
        ended = json.dumps({"ended": self._metrics.ended_counts()}).encode()
        for worker, number in asked:
            own_first = sorted(self._parts, key=lambda other: other is not worker)
            answer = b"\n".join((*(self._parts[each] for each in own_first), ended))
            worker.send(FrameKind.PARTS, number + answer)
