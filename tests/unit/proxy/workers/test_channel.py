"""Tests that frames between the supervisor and a worker arrive whole or not at all."""

import asyncio
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams_proxy.worker_identity import WorkerIdentity
from kvparams_proxy.workers.channel import Frame, FrameKind, encode_frame, read_frame, receive_frame
from kvparams_proxy.workers.worker_start import StartFailure, WorkerStart

frames = st.lists(st.builds(Frame, st.sampled_from(FrameKind), st.binary(max_size=200)), max_size=5)


def read_all(data: bytes) -> list[Frame]:
    async def read() -> list[Frame]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        found: list[Frame] = []
        while (frame := await read_frame(reader)) is not None:
            found.append(frame)
        return found

    return asyncio.run(read())


def receive_all(data: bytes) -> list[Frame]:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(data)
        found: list[Frame] = []
        while (frame := receive_frame(ours)) is not None:
            found.append(frame)
        return found


@given(frames, st.integers(0, 1000))
def test_frames_arrive_whole_or_not_at_all(sent: list[Frame], cut: int) -> None:
    data = b"".join(encode_frame(*frame) for frame in sent)
    assert read_all(data) == receive_all(data) == sent
    found = read_all(data[:cut])
    assert found == receive_all(data[:cut]) == sent[: len(found)]


def test_a_start_is_what_it_was() -> None:
    identity = WorkerIdentity(2, 4, 17, Path("/dev/shm/x"))
    start = WorkerStart(identity, 12, {"port": "0", "prefill": ["http://p:1"], "check": False, "config": None})
    assert WorkerStart.decode(start.encode()) == start
    failure = StartFailure(2, "two\nlines")
    assert StartFailure.decode(failure.encode()) == failure


@pytest.mark.parametrize("size", [0, 3_000_000])
async def test_long_frames_pass(size: int) -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    _, sender = await asyncio.open_unix_connection(sock=theirs)
    sender.write(encode_frame(FrameKind.EXPOSITION, b"x" * size))
    async with asyncio.timeout(5):
        assert await read_frame(reader) == Frame(FrameKind.EXPOSITION, b"x" * size)
    sender.close()
    writer.close()
