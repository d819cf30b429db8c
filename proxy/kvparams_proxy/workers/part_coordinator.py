"""Collects what all workers contribute to a snapshot of the live page, when one of them is asked for it.

The supervisor does not read the parts. Requests within a second are answered with the same parts, however many workers
have viewers.
"""

import asyncio
import json
from typing import Final

from kvparams_proxy.workers.channel import Frame, FrameKind
from kvparams_proxy.workers.metrics_hub import MetricsHub
from kvparams_proxy.workers.worker_link import SCRAPE_HEAD
from kvparams_proxy.workers.worker_process import WorkerProcess

__all__ = ["PartCoordinator"]

_COLLECT_S: Final = 2.0
"""The part of a worker that takes longer is left out."""
_FRESH_S: Final = 0.7


class PartCoordinator:
    """Asks workers for their parts. `KINDS` are the frames that it handles."""

    KINDS: Final = (FrameKind.PARTS_WANTED, FrameKind.PART)

    def __init__(self, metrics: MetricsHub) -> None:
        """`metrics` has the counts of workers that have exited."""
        self._metrics = metrics
        self._workers: set[WorkerProcess] = set()
        self._asked: list[tuple[WorkerProcess, bytes]] = []
        self._task: asyncio.Task[None] | None = None
        self._parts: dict[WorkerProcess, bytes] = {}
        self._awaited: set[WorkerProcess] = set()
        self._all_arrived = asyncio.Event()
        self._collected_s = float("-inf")

    def started(self, worker: WorkerProcess) -> None:
        """Adds a worker."""
        self._workers.add(worker)

    def ended(self, worker: WorkerProcess) -> None:
        """Removes a worker that has exited."""
        self._workers.discard(worker)
        self._parts.pop(worker, None)
        self._arrived(worker)

    def received(self, worker: WorkerProcess, frame: Frame) -> None:
        """Handles a frame of one of `KINDS`."""
        if frame.kind is FrameKind.PART:
            self._parts[worker] = frame.payload
            self._arrived(worker)
            return
        self._asked.append((worker, frame.payload))
        if self._task is None:
            self._task = asyncio.create_task(self._answer())

    def _arrived(self, worker: WorkerProcess) -> None:
        self._awaited.discard(worker)
        if not self._awaited:
            self._all_arrived.set()

    async def _answer(self) -> None:
        """Answers all requests, including those that arrive meanwhile."""
        loop = asyncio.get_running_loop()
        while self._asked:
            asked, self._asked = self._asked, []
            if loop.time() - self._collected_s >= _FRESH_S:
                await self._collect()
                self._collected_s = loop.time()
            ended = json.dumps({"ended": self._metrics.ended_counts()}).encode()
            answer = b"[" + b",".join((*self._parts.values(), ended)) + b"]"
            for worker, number in asked:
                worker.send(FrameKind.PARTS, number[: SCRAPE_HEAD.size] + answer)
        self._task = None

    async def _collect(self) -> None:
        self._parts.clear()
        self._awaited = {worker for worker in self._workers if worker.is_ready}
        self._all_arrived.clear()
        for worker in self._awaited:
            worker.send(FrameKind.COLLECT_PART)
        try:
            async with asyncio.timeout(_COLLECT_S):
                await self._all_arrived.wait()
        except TimeoutError:
            self._awaited.clear()
