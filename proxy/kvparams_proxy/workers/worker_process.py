"""A worker process, as the supervisor sees it."""

import asyncio
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol, Self

from kvparams_proxy.worker_identity import WorkerIdentity
from kvparams_proxy.workers.channel import Frame, FrameKind, encode_frame, read_frame
from kvparams_proxy.workers.restart_policy import WorkerEnd
from kvparams_proxy.workers.worker_start import StartFailure, WorkerStart

__all__ = ["WorkerListener", "WorkerProcess"]

_KEPT_FROM_WORKERS = (signal.SIGINT, signal.SIGHUP)
"""The terminal sends these to all processes of the command. Workers leave them to the supervisor."""


class WorkerListener(Protocol):
    """Receives the events of workers."""

    def worker_ready(self, worker: "WorkerProcess") -> None:
        """The worker is ready: it serves requests."""
        ...

    def worker_sent(self, worker: "WorkerProcess", frame: Frame) -> None:
        """The worker has sent a frame about metrics."""
        ...

    def worker_ended(self, worker: "WorkerProcess", end: WorkerEnd) -> None:
        """The process has exited. This is the last event of a worker."""
        ...


class WorkerProcess:
    """A worker process that was started."""

    def __init__(
        self, identity: WorkerIdentity, process: asyncio.subprocess.Process, writer: asyncio.StreamWriter
    ) -> None:
        self.identity = identity
        self.is_ready = False
        self.settled = asyncio.Event()
        """Set once it is ready or has exited."""
        self.end: WorkerEnd | None = None
        """Its exit, once the process has exited."""
        self._process = process
        self._writer = writer
        self._started_s = time.monotonic()
        self._failure: StartFailure | None = None
        self._attending: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        identity: WorkerIdentity,
        listener: socket.socket,
        arguments: Mapping[str, object],
        events: WorkerListener,
    ) -> Self:
        """Starts a process.

        Args:
            command: its command line, to which the number of a descriptor is added.
            identity: which worker it becomes.
            listener: the socket whose connections it accepts.
            arguments: see `WorkerStart`.
            events: receives its events.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT_FROM_WORKERS)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), listener.fileno()),
                )
            except BaseException:
                ours.close()
                raise
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _KEPT_FROM_WORKERS)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        worker = cls(identity, process, writer)
        worker.send(FrameKind.START, WorkerStart(identity, listener.fileno(), arguments).encode())
        worker._attending = asyncio.create_task(worker._attend(reader, events))
        return worker

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Sends a frame; does nothing once the worker has closed the channel."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(kind, payload))

    def terminate(self) -> None:
        """Sends SIGTERM: a worker that is still starting exits, and one that has started shuts down."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Sends SIGKILL."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def _attend(self, reader: asyncio.StreamReader, events: WorkerListener) -> None:
        while (frame := await read_frame(reader)) is not None:
            if frame.kind is FrameKind.READY:
                self.is_ready = True
                self.settled.set()
                events.worker_ready(self)
            elif frame.kind is FrameKind.FAILED:
                self._failure = StartFailure.decode(frame.payload)
            else:
                events.worker_sent(self, frame)
        status = await self._process.wait()
        self._writer.close()
        lived_s = time.monotonic() - self._started_s
        self.end = WorkerEnd(_cause(status), lived_s, self.is_ready, self._failure)
        self.settled.set()
        events.worker_ended(self, self.end)


def _cause(status: int) -> str:
    """Describes an exit status as `asyncio.subprocess.Process.wait` returns it."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
