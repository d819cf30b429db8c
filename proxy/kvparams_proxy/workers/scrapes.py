"""Answers scrapes, which ask one worker for the metrics of all.

Every worker is asked for a complete snapshot, so that all values of one exposition are from the same moment. Scrapes
that arrive meanwhile are answered together afterwards, so there is never more than one collection at a time.
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
"""The last snapshot of a worker that takes longer is used."""


class _Scrape(NamedTuple):
    worker: WorkerProcess
    number: bytes
    accept: str


class ScrapeCoordinator:
    """Collects the metrics of all workers when one of them is scraped."""

    def __init__(self, metrics: MetricsHub) -> None:
        self._metrics = metrics
        self._workers: set[WorkerProcess] = set()
        self._asked: list[_Scrape] = []
        self._task: asyncio.Task[None] | None = None
        self._round = 0
        self._awaited: set[WorkerProcess] = set()
        """Workers whose snapshot of this round is missing."""
        self._all_arrived = asyncio.Event()

    def started(self, worker: WorkerProcess) -> None:
        """Adds a worker."""
        self._workers.add(worker)

    def ended(self, worker: WorkerProcess) -> None:
        """Removes a worker that has exited."""
        self._workers.discard(worker)
        self._metrics.end(worker.identity.serial)
        self._arrived(worker)

    def received(self, worker: WorkerProcess, frame: Frame) -> None:
        """Handles a frame about metrics."""
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
                self._arrived(worker)

    def _round_mark(self) -> bytes:
        return b"%d" % self._round

    def _arrived(self, worker: WorkerProcess) -> None:
        self._awaited.discard(worker)
        if not self._awaited:
            self._all_arrived.set()

    async def _answer(self) -> None:
        """Answers all scrapes, including those that arrive meanwhile."""
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
        """Asks these workers for complete snapshots and waits for them, up to the time limit."""
        self._round += 1
        self._awaited = set(workers)
        self._all_arrived.clear()
        for worker in self._awaited:
            worker.send(FrameKind.COLLECT, self._round_mark())
        try:
            async with asyncio.timeout(_COLLECT_S):
                await self._all_arrived.wait()
        except TimeoutError:
            self._awaited.clear()
