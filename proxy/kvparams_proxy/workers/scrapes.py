"""Answers requests for the metrics of all workers.

All workers are asked for a complete snapshot, so that one exposition is of one time. Requests that come meanwhile are
answered together in the next round: however many come, there is one collection at a time.
"""

import asyncio
from collections.abc import Iterable
from typing import Final, NamedTuple

from kvparams_proxy.telemetry.exposition import metrics_text
from kvparams_proxy.workers.channel import Frame, FrameKind
from kvparams_proxy.workers.metrics_hub import MetricsHub
from kvparams_proxy.workers.worker_link import SCRAPE_HEAD
from kvparams_proxy.workers.worker_process import WorkerProcess

__all__ = ["ScrapeCoordinator"]

_COLLECT_S: Final = 2.0
"""A worker that takes longer is busy or stopped; its last snapshot counts."""


class _Scrape(NamedTuple):
    worker: WorkerProcess
    number: bytes
    accept: str


class ScrapeCoordinator:
    """Collects the metrics of all workers when one of them is asked for them."""

    def __init__(self, metrics: MetricsHub) -> None:
        self._metrics = metrics
        self._workers: set[WorkerProcess] = set()
        self._asked: list[_Scrape] = []
        self._task: asyncio.Task[None] | None = None
        self._round = 0
        self._awaited: set[WorkerProcess] = set()
        """Workers whose snapshot of this round has not come."""
        self._all_came = asyncio.Event()

    def started(self, worker: WorkerProcess) -> None:
        """Hears of a new worker."""
        self._workers.add(worker)

    def ended(self, worker: WorkerProcess) -> None:
        """Hears of the end of a worker."""
        self._workers.discard(worker)
        self._metrics.end(worker.identity.serial)
        self._came(worker)

    def received(self, worker: WorkerProcess, frame: Frame) -> None:
        """Takes a frame about metrics."""
        serial = worker.identity.serial
        if frame.kind is FrameKind.FAMILY:
            self._metrics.receive(serial, frame.payload)
        elif frame.kind is FrameKind.SCRAPE:
            number, accept = frame.payload[: SCRAPE_HEAD.size], frame.payload[SCRAPE_HEAD.size :].decode()
            self._asked.append(_Scrape(worker, number, accept))
            if self._task is None:
                self._task = asyncio.create_task(self._answer())
        else:
            self._metrics.complete(serial, is_last=frame.kind is FrameKind.ENDED)
            if frame.payload == self._round_mark():
                self._came(worker)

    def _round_mark(self) -> bytes:
        return b"%d" % self._round

    def _came(self, worker: WorkerProcess) -> None:
        self._awaited.discard(worker)
        if not self._awaited:
            self._all_came.set()

    async def _answer(self) -> None:
        """Answers until nobody asks."""
        while self._asked:
            asked, self._asked = self._asked, []
            await self._collect(worker for worker in self._workers if worker.is_ready)
            texts = {
                accept: await metrics_text(self._metrics.merged(), accept) for accept in {each.accept for each in asked}
            }
            for worker, number, accept in asked:
                text, content_type = texts[accept]
                worker.send(FrameKind.EXPOSITION, number + content_type.encode() + b"\n" + text)
        self._task = None

    async def _collect(self, workers: Iterable[WorkerProcess]) -> None:
        """Asks workers for complete snapshots and waits for them, within the time there is."""
        self._round += 1
        self._awaited = set(workers)
        self._all_came.clear()
        for worker in self._awaited:
            worker.send(FrameKind.COLLECT, self._round_mark())
        try:
            async with asyncio.timeout(_COLLECT_S):
                await self._all_came.wait()
        except TimeoutError:
            self._awaited.clear()
