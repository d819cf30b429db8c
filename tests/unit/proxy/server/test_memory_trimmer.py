"""Tests when freed memory is given back to the system: again some time after a large body, not only once."""

from collections.abc import Callable
from typing import Any

import pytest

from kvparams_proxy.server import memory_trimmer
from kvparams_proxy.server.memory_trimmer import MemoryTrimmer
from tests.support.virtual_loop import VirtualLoop

MEBIBYTE = 1 << 20


class TrimLoop(VirtualLoop):
    """A loop that does at once what it is to do in a thread, and remembers when."""

    def __init__(self) -> None:
        super().__init__()
        self.trimmed: list[float] = []

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> Any:
        self.trimmed.append(round(self.time(), 3))
        return func(*args)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> TrimLoop:
    def trim(_: int) -> int:
        return 1

    monkeypatch.setattr(memory_trimmer, "_malloc_trim", lambda: trim)
    return TrimLoop()


def test_what_a_socket_held_longer_is_given_back_as_well(loop: TrimLoop) -> None:
    trimmer = MemoryTrimmer(loop)
    began = loop.time()
    trimmer.freed(15 * MEBIBYTE)
    loop.run_until(began + 120)
    assert [at - began for at in loop.trimmed] == [1, 6, 36]


def test_it_trims_at_most_once_a_second(loop: TrimLoop) -> None:
    trimmer = MemoryTrimmer(loop)
    began = loop.time()
    for tenth in range(100):
        loop.run_until(began + tenth / 10)
        trimmer.freed(MEBIBYTE)
    loop.run_until(began + 10)
    assert 9 <= len(loop.trimmed) <= 10


def test_small_bodies_and_a_closed_trimmer_cause_no_trim(loop: TrimLoop) -> None:
    trimmer = MemoryTrimmer(loop)
    trimmer.freed(MEBIBYTE - 1)
    loop.run_until(loop.time() + 60)
    assert loop.trimmed == []
    trimmer.freed(1)
    assert len(loop.left()) == 1
    trimmer.close()
    assert loop.left() == [], "no timer is left"
    trimmer.freed(MEBIBYTE)
    loop.run_until(loop.time() + 60)
    assert loop.trimmed == []
