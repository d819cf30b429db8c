"""A worker's side of the channel to its supervisor."""

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import count
from typing import Any, Final

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.telemetry.exposition import MetricsExposition
from kvparams_proxy.telemetry.metric_snapshots import encode_metric
from kvparams_proxy.worker_identity import WorkerIdentity
from kvparams_proxy.workers.channel import Frame, FrameKind, encode_frame, read_frame

__all__ = ["SCRAPE_HEAD", "WorkerLink"]

SCRAPE_HEAD: Final = struct.Struct("!Q")
"""The number of a scrape, before the payload of `SCRAPE` and `EXPOSITION`."""
_EVERY_S: Final = 1.0
"""How often counters are sent. A worker that is killed loses what it has counted since."""
_SCRAPE_S: Final = 10.0
_CLOSE_S: Final = 2.0
"""The time limit for sending the last snapshot."""


class WorkerLink:
    """Sends the worker's metrics and readiness, and receives the supervisor's commands."""

    def __init__(self, sock: socket.socket, identity: WorkerIdentity) -> None:
        """`sock` is the worker's end of the channel, from which the first frame has been read."""
        self.identity = identity
        self._sock = sock
        self._exposition: MetricsExposition | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._sending = asyncio.Lock()
        self._numbers = count()
        self._scrapes: dict[int, asyncio.Future[tuple[bytes, str]]] = {}
        self._parts: dict[int, asyncio.Future[bytes]] = {}
        self._make_part: Callable[[], bytes] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def attach(self, exposition: MetricsExposition) -> None:
        """Sets the metrics that are sent."""
        self._exposition = exposition

    def attach_part(self, make_part: Callable[[], bytes]) -> None:
        """Sets what makes this worker's part of a snapshot for the live page, as JSON."""
        self._make_part = make_part

    async def open(self, on_command: Callable[[FrameKind], None]) -> None:
        """Starts to receive frames.

        Args:
            on_command: called with `DRAIN`, `RETIRE` or `CUT`; with `CUT` also when the supervisor exits.
        """
        reader, self._writer = await asyncio.open_unix_connection(sock=self._sock)
        self._spawn(self._listen(reader, on_command))

    def ready(self) -> None:
        """Reports that requests are served, and sends counters regularly from now on."""
        self._send(FrameKind.READY)
        self._spawn(self._send_regularly())

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """Returns the text of the metrics of all workers, and its content type.

        Raises:
            ProxyError: 503, because the supervisor does not answer in time.
        """
        number = next(self._numbers)
        answer = self._scrapes[number] = asyncio.get_running_loop().create_future()
        self._send(FrameKind.SCRAPE, SCRAPE_HEAD.pack(number) + accept.encode("utf-8", "replace"))
        try:
            async with asyncio.timeout(_SCRAPE_S):
                return await answer
        except TimeoutError:
            message = "the metrics of the workers could not be collected in time; try again later"
            raise ProxyError(503, "service_unavailable", message, code="metrics_timeout", retry_after_s=5) from None
        finally:
            self._scrapes.pop(number, None)

    async def collect_parts(self) -> bytes:
        """Returns the parts of all workers for a snapshot, as a JSON array.

        Raises:
            ProxyError: 503, because the supervisor does not answer in time.
        """
        number = next(self._numbers)
        answer = self._parts[number] = asyncio.get_running_loop().create_future()
        self._send(FrameKind.PARTS_WANTED, SCRAPE_HEAD.pack(number))
        try:
            async with asyncio.timeout(_SCRAPE_S):
                return await answer
        except TimeoutError:
            message = "the workers could not be asked in time; try again later"
            raise ProxyError(503, "service_unavailable", message, code="snapshot_timeout", retry_after_s=5) from None
        finally:
            self._parts.pop(number, None)

    async def close(self) -> None:
        """Sends the last snapshot and closes the channel."""
        for task in self._tasks:
            task.cancel()
        writer = self._writer
        if writer is None:
            self._sock.close()
            return
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(_CLOSE_S):
                await self._send_metrics(FrameKind.ENDED, complete=False)
                writer.close()
                await writer.wait_closed()

    async def _listen(self, reader: asyncio.StreamReader, on_command: Callable[[FrameKind], None]) -> None:
        while (frame := await read_frame(reader)) is not None:
            if frame.kind is FrameKind.COLLECT:
                self._spawn(self._send_metrics(FrameKind.COLLECTED, frame.payload, complete=True))
            elif frame.kind is FrameKind.EXPOSITION:
                self._answer(frame)
            elif frame.kind is FrameKind.COLLECT_PART:
                self._spawn(self._send_part())
            elif frame.kind is FrameKind.PARTS:
                self._answer_parts(frame)
            else:
                on_command(frame.kind)
        on_command(FrameKind.CUT)

    async def _send_part(self) -> None:
        """Sends this worker's part of a snapshot. A fault in it costs the page, and no command of the supervisor."""
        if self._make_part is not None:
            self._send(FrameKind.PART, self._make_part())

    def _answer(self, frame: Frame) -> None:
        (number,) = SCRAPE_HEAD.unpack_from(frame.payload)
        content_type, _, text = frame.payload[SCRAPE_HEAD.size :].partition(b"\n")
        answer = self._scrapes.get(number)
        if answer is not None and not answer.done():
            answer.set_result((text, content_type.decode()))

    def _answer_parts(self, frame: Frame) -> None:
        (number,) = SCRAPE_HEAD.unpack_from(frame.payload)
        answer = self._parts.get(number)
        if answer is not None and not answer.done():
            answer.set_result(frame.payload[SCRAPE_HEAD.size :])

    async def _send_regularly(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            await self._send_metrics(FrameKind.COLLECTED, complete=False)

    async def _send_metrics(self, end: FrameKind, payload: bytes = b"", *, complete: bool) -> None:
        """Sends one snapshot, with one metric family in each turn of the event loop. Snapshots never interleave."""
        if self._exposition is None or self._writer is None:
            return
        async with self._sending:
            for metric in self._exposition.collect(complete=complete):
                self._send(FrameKind.FAMILY, metric.name.encode() + b"\n" + encode_metric(metric))
                await asyncio.sleep(0)
            self._send(end, payload)
            with suppress(ConnectionError):
                await self._writer.drain()

    def _send(self, kind: FrameKind, payload: bytes = b"") -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode_frame(kind, payload))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
