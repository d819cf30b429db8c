"""Runs a worker that serves nothing: see `supervised.py`."""

import os
import signal
import socket
import sys
from pathlib import Path

from kvparams_proxy.workers.channel import FrameKind, encode_frame, receive_frame
from kvparams_proxy.workers.parent_death import end_with_parent
from kvparams_proxy.workers.worker_start import StartFailure, WorkerStart

__all__ = ["FAILURE"]

FAILURE = StartFailure(2, "kvparams: there is no such thing")


def main(descriptor: int) -> int:
    """Does as it is told by a file; returns the exit status."""
    channel = socket.socket(fileno=descriptor)
    frame = receive_frame(channel)
    assert frame is not None
    start = WorkerStart.decode(frame.payload)
    folder = Path(str(start.arguments["folder"]))
    behavior = (folder / "behavior").read_text()
    if behavior not in ("leave", "orphan"):
        end_with_parent()

    def saw(what: str) -> None:
        line = f"{start.identity.number} {start.identity.serial} {os.getpid()} {what}\n"
        events = os.open(folder / "events", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(events, line.encode())
        os.close(events)

    saw("START")
    if behavior == "crash":
        return 3
    if behavior == "fail":
        channel.sendall(encode_frame(FrameKind.FAILED, FAILURE.encode()))
        return FAILURE.status
    saw("READY")
    channel.sendall(encode_frame(FrameKind.READY))
    while (frame := receive_frame(channel)) is not None:
        saw(frame.kind.name)
        if behavior in ("serve", "leave"):
            return 0
    saw("LOST")
    while behavior in ("orphan", "bound"):
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
