"""One worker process, as the supervisor sees it."""

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
"""Ctrl-C and the end of a terminal reach all its processes. A worker hears of them from the supervisor alone."""


class WorkerListener(Protocol):
    """Hears what happens to a worker."""

    def worker_ready(self, worker: "WorkerProcess") -> None:
        """Hears that the worker serves requests."""
        ...

    def worker_sent(self, worker: "WorkerProcess", frame: Frame) -> None:
        """Hears of a frame about metrics."""
        ...

    def worker_ended(self, worker: "WorkerProcess", end: WorkerEnd) -> None:
        """Hears that the process has ended; nothing comes after that."""
        ...


class WorkerProcess:
    """A worker that was started."""

    def __init__(
        self, identity: WorkerIdentity, process: asyncio.subprocess.Process, writer: asyncio.StreamWriter
    ) -> None:
        self.identity = identity
        self.is_ready = False
        self.settled = asyncio.Event()
        """Set once it is ready or has ended."""
        self.end: WorkerEnd | None = None
        """Its end, once its process has ended."""
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
        heard: WorkerListener,
    ) -> Self:
        """Starts a process.

        Args:
            command: its command line, to which the number of a descriptor is added.
            identity: which worker it becomes.
            listener: the socket that it accepts connections from.
            arguments: see `WorkerStart`.
            heard: hears what happens to it.
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
        worker._attending = asyncio.create_task(worker._attend(reader, heard))
        return worker

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Sends a frame; does nothing once the worker has closed the channel."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(kind, payload))

    def terminate(self) -> None:
        """Ends a worker that may not read frames yet; one that does shuts down."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Ends the process at once."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def _attend(self, reader: asyncio.StreamReader, heard: WorkerListener) -> None:
        while (frame := await read_frame(reader)) is not None:
            if frame.kind is FrameKind.READY:
                self.is_ready = True
                self.settled.set()
                heard.worker_ready(self)
            elif frame.kind is FrameKind.FAILED:
                self._failure = StartFailure.decode(frame.payload)
            else:
                heard.worker_sent(self, frame)
        status = await self._process.wait()
        self._writer.close()
        lived_s = time.monotonic() - self._started_s
        self.end = WorkerEnd(_cause(status), lived_s, self.is_ready, self._failure)
        self.settled.set()
        heard.worker_ended(self, self.end)


def _cause(status: int) -> str:
    """Returns the words for what `asyncio.subprocess.Process.wait` has returned."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
