"""The channel between the supervisor and a worker carries frames on a pair of connected sockets.

The end of the stream means that the other process has exited. A frame has its kind (one byte), the length of its
payload (four bytes, big-endian), and the payload.
"""

import asyncio
import socket
import struct
from enum import IntEnum
from typing import Final, NamedTuple

__all__ = ["Frame", "FrameKind", "encode_frame", "read_frame", "receive_frame"]

_HEAD: Final = struct.Struct("!BI")


class FrameKind(IntEnum):
    """The kinds of frames."""

    # from the supervisor
    START = 1
    """The first frame: a `kvparams_proxy.workers.worker_start.WorkerStart`."""
    DRAIN = 2
    """Shut down as after a first SIGTERM. A repeated frame changes nothing."""
    CUT = 3
    """Shut down as after a second SIGTERM."""
    RETIRE = 4
    """Accept no more connections, which the successor does, and exit when the open ones have closed."""
    COLLECT = 5
    """Send a complete snapshot of the metrics; the payload comes back in `COLLECTED`."""
    EXPOSITION = 6
    """The answer to `SCRAPE`: its number, the content type, a line feed, and the text of the metrics."""
    COLLECT_PART = 7
    """Send this worker's part of a snapshot for the live page; the payload comes back in `PART`."""
    PARTS = 8
    """The answer to `PARTS_WANTED`: its number, and the part of each worker as a line of JSON, its own first."""

    # from a worker
    READY = 20
    """The worker serves requests."""
    FAILED = 21
    """The worker cannot start: a `kvparams_proxy.workers.worker_start.StartFailure`."""
    FAMILY = 22
    """A part of a snapshot: the name of a metric family, a line feed, and the output of `encode_metric`."""
    COLLECTED = 23
    """The snapshot is complete. The payload is that of `COLLECT`, or empty if nobody asked for the snapshot."""
    ENDED = 24
    """The last snapshot is complete: the app of the worker has closed."""
    SCRAPE = 25
    """The worker was asked for the metrics of all workers: a number in eight bytes, and the header `accept`."""
    PARTS_WANTED = 26
    """The worker was asked for a snapshot of all workers: a number in eight bytes."""
    PART = 27
    """The answer to `COLLECT_PART`: its payload, and a JSON object."""


class Frame(NamedTuple):
    """A message."""

    kind: FrameKind
    payload: bytes


def encode_frame(kind: FrameKind, payload: bytes = b"") -> bytes:
    """Returns the bytes of a frame."""
    return _HEAD.pack(kind, len(payload)) + payload


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """Waits for a frame. Returns None at the end of the stream, even in the middle of a frame."""
    try:
        kind, length = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        return Frame(FrameKind(kind), await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive_frame(sock: socket.socket) -> Frame | None:
    """Reads a frame from a blocking socket, and no byte after it. Returns None at the end of the stream."""
    head = _receive(sock, _HEAD.size)
    kind, length = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
    payload = _receive(sock, length)
    return Frame(FrameKind(kind), payload) if kind and len(payload) == length else None


def _receive(sock: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        try:
            part = sock.recv(size - len(found))
        except ConnectionError:
            part = b""
        if not part:
            break
        found += part
    return found
