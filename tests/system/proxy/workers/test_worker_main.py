"""Tests that a worker process reports why it cannot start."""

import argparse
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvparams_proxy.cli.proxy_command import COMMAND
from kvparams_proxy.config.sharing import write_exchange_key
from kvparams_proxy.worker_identity import WorkerIdentity
from kvparams_proxy.workers.channel import FrameKind, encode_frame, receive_frame
from kvparams_proxy.workers.worker_start import StartFailure, WorkerStart

ENGINES = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1")


@pytest.fixture
def channel() -> Iterator[tuple[socket.socket, "subprocess.Popen[bytes]"]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    with ours, theirs:
        command = (sys.executable, "-m", "kvparams_proxy.cli.worker_main", str(theirs.fileno()))
        worker = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE)
        theirs.close()
        with worker:
            yield ours, worker
            worker.kill()


def start(folder: Path, *argv: str) -> bytes:
    """Returns the first frame, with a descriptor that is none."""
    parser = argparse.ArgumentParser()
    COMMAND.add_arguments(parser)
    identity = WorkerIdentity(1, 2, 1, folder)
    return encode_frame(FrameKind.START, WorkerStart(identity, 999, vars(parser.parse_args(argv))).encode())


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        ((*ENGINES, "--port", "x"), 2, "kvparams proxy: --port: must be a port from 0 to 65535"),
        (ENGINES, 1, "Bad file descriptor"),
    ],
)
def test_a_worker_says_why_it_cannot_start(
    channel: tuple[socket.socket, "subprocess.Popen[bytes]"],
    tmp_path: Path,
    argv: tuple[str, ...],
    status: int,
    said: str,
) -> None:
    sock, worker = channel
    write_exchange_key(tmp_path)
    sock.sendall(start(tmp_path, *argv))
    frame = receive_frame(sock)
    assert frame is not None
    assert frame.kind is FrameKind.FAILED
    failure = StartFailure.decode(frame.payload)
    assert failure.status == status
    assert said in failure.message
    _, printed = worker.communicate(timeout=20)
    assert (worker.returncode, printed) == (status, b""), "the supervisor says it, once for all"


def test_a_worker_whose_supervisor_has_ended_does_not_start(
    channel: tuple[socket.socket, "subprocess.Popen[bytes]"],
) -> None:
    sock, worker = channel
    sock.close()
    _, printed = worker.communicate(timeout=20)
    assert (worker.returncode, printed) == (1, b"")
