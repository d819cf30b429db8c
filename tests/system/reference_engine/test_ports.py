"""Tests ports that servers are told to listen on."""

import os
import random
import socket
import tempfile
import time
from pathlib import Path

import pytest

from demo.processes import free_port

OTHERS = range(20_000, 20_100)


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"kvparams-ports-{os.getuid()}"


class Draws(random.SystemRandom):
    """Draws what it is told to."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self._numbers = iter(numbers)

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        assert stop is not None
        number = next(self._numbers)
        assert start <= number < stop
        assert step == 1
        return number


def test_nobody_is_told_of_a_port_that_another_was_told_of_a_moment_ago(
    marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = free_port()
    monkeypatch.setattr(random, "SystemRandom", lambda: Draws(first, first, *OTHERS))
    assert free_port() != first
    long_ago = time.time() - 61
    os.utime(marks / str(first), (long_ago, long_ago))
    assert free_port() == first, "whoever was told of it has had its time"


def test_a_port_that_somebody_listens_on_is_nobodys(marks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = int(taken.getsockname()[1])
        (marks / str(port)).unlink()
        monkeypatch.setattr(random, "SystemRandom", lambda: Draws(port, *OTHERS))
        assert free_port() != port
