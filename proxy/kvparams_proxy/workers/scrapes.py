"""Answers scrapes, which ask one worker for the metrics of all.

Every worker is asked for a complete snapshot, so that all values of one exposition are from the same moment. The last
snapshot of a worker that does not answer in time is used.
"""

from typing import NamedTuple

from kvparams_proxy.telemetry.exposition import metrics_text
from kvparams_proxy.workers.channel import Frame, FrameKind
from kvparams_proxy.workers.metrics_hub import MetricsHub
from kvparams_proxy.workers.worker_link import REQUEST_HEAD
from kvparams_proxy.workers.worker_process import WorkerProcess
from kvparams_proxy.workers.worker_rounds import WorkerRounds

__all__ = ["ScrapeCoordinator"]


class _Scrape(NamedTuple):
    worker: WorkerProcess
    number: bytes
    accept: str


class ScrapeCoordinator:
    """Collects the metrics of all workers when one of them is scraped."""

    def __init__(self, metrics: MetricsHub) -> None:
        self._metrics = metrics
        self._rounds = WorkerRounds[_Scrape](FrameKind.COLLECT, self._answer)

    def started(self, worker: WorkerProcess) -> None:
        """Adds a worker."""
        self._rounds.started(worker)

    def ended(self, worker: WorkerProcess) -> None:
        """Removes a worker that has exited."""
        self._metrics.end(worker.identity.serial)
        self._rounds.ended(worker)

    def received(self, worker: WorkerProcess, frame: Frame) -> None:
        """Handles a frame about metrics."""
        serial = worker.identity.serial
        if frame.kind is FrameKind.FAMILY:
            self._metrics.receive(serial, frame.payload)
        elif frame.kind is FrameKind.SCRAPE:
            number, accept = frame.payload[: REQUEST_HEAD.size], frame.payload[REQUEST_HEAD.size :].decode()
            self._rounds.ask(_Scrape(worker, number, accept))
        else:
            self._metrics.complete(serial, is_last=frame.kind is FrameKind.ENDED)
            self._rounds.arrived(worker, frame.payload)

    async def _answer(self, asked: list[_Scrape]) -> None:
        await self._rounds.collect()
        texts = {
            accept: await metrics_text(self._metrics.merged(), accept) for accept in {each.accept for each in asked}
        }
        for worker, number, accept in asked:
            text, content_type = texts[accept]
            worker.send(FrameKind.EXPOSITION, number + content_type.encode() + b"\n" + text)
