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

__all__ = ["REQUEST_HEAD", "WorkerLink"]

REQUEST_HEAD: Final = struct.Struct("!Q")
"""The number of a request to the supervisor, at the beginning of its payload and of that of the answer."""
_EVERY_S: Final = 1.0
"""How often counters are sent. A worker that is killed loses what it has counted since."""
_ANSWER_S: Final = 10.0
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
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        """The answers of the supervisor that are awaited, by the numbers of their requests."""
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
        try:
            answer = await self._ask(FrameKind.SCRAPE, accept.encode("utf-8", "replace"))
        except TimeoutError:
            message = "the metrics of the workers could not be collected in time; try again later"
            raise ProxyError(503, "service_unavailable", message, code="metrics_timeout", retry_after_s=5) from None
        content_type, _, text = answer.partition(b"\n")
        return text, content_type.decode()

    async def collect_parts(self) -> list[bytes]:
        """Returns the parts of all workers for a snapshot, that of this worker first, each as JSON.

        Raises:
            ProxyError: 503, because the supervisor does not answer in time.
        """
        try:
            return (await self._ask(FrameKind.PARTS_WANTED)).splitlines()
        except TimeoutError:
            message = "the workers could not be asked in time; try again later"
            raise ProxyError(503, "service_unavailable", message, code="snapshot_timeout", retry_after_s=5) from None

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
            elif frame.kind is FrameKind.COLLECT_PART:
                self._spawn(self._send_part(frame.payload))
            elif frame.kind in (FrameKind.EXPOSITION, FrameKind.PARTS):
                self._answered(frame)
            else:
                on_command(frame.kind)
        on_command(FrameKind.CUT)

    async def _send_part(self, mark: bytes) -> None:
        """Sends this worker's part of a snapshot. A fault in it costs the page, and no command of the supervisor."""
        if self._make_part is not None:
            self._send(FrameKind.PART, mark + self._make_part())

    async def _ask(self, kind: FrameKind, payload: bytes = b"") -> bytes:
        """Asks the supervisor. Returns the payload of its answer, without the number.

        Raises:
            TimeoutError: it does not answer in time.
        """
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._send(kind, REQUEST_HEAD.pack(number) + payload)
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await answer
        finally:
            del self._answers[number]

    def _answered(self, frame: Frame) -> None:
        (number,) = REQUEST_HEAD.unpack_from(frame.payload)
        answer = self._answers.get(number)
        if answer is not None and not answer.done():
            answer.set_result(frame.payload[REQUEST_HEAD.size :])

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
