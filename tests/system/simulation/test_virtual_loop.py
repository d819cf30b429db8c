"""Tests the base of the simulation: a clock that jumps, and connections as strict as uvloop's."""

import asyncio

import pytest

from tests.support.virtual_loop import Stuck, VirtualLoop
from tests.system.simulation.network import Network, Socket


class _Protocol(asyncio.Protocol):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def data_received(self, data: bytes) -> None:
        self.heard.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.heard.append(exc)

    def pause_writing(self) -> None:
        self.heard.append("pause")

    def resume_writing(self) -> None:
        self.heard.append("resume")


class _Peer:
    """The same for the other end."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def received(self, data: bytes) -> None:
        self.heard.append(data)

    def closed(self) -> None:
        self.heard.append("closed")


@pytest.fixture
def loop() -> VirtualLoop:
    return VirtualLoop()


@pytest.fixture
def connection(loop: VirtualLoop) -> tuple[Socket, _Protocol, _Peer]:
    protocol, peer = _Protocol(), _Peer()
    socket = Network(loop, lambda: 0.0).open(protocol)
    socket.peer = peer
    return socket, protocol, peer


def test_the_clock_jumps_and_order_is_kept(loop: VirtualLoop) -> None:
    heard: list[object] = []
    begin = loop.time()
    loop.call_later(3600.0, lambda: heard.append(loop.time() - begin))
    loop.call_later(1.0, heard.append, "timer")
    loop.call_later(0.5, heard.append, "cancelled").cancel()
    loop.call_soon(heard.append, "soon")
    loop.run_until(begin + 2.0)
    assert heard == ["soon", "timer"]
    loop.run_until(begin + 4000.0)
    assert heard == ["soon", "timer", 3600.0]
    assert loop.left() == []


def test_a_coroutine_runs_in_virtual_time_to_its_end_or_its_bound(loop: VirtualLoop) -> None:
    begin = loop.time()

    async def work() -> float:
        await asyncio.sleep(3000.0)
        return asyncio.get_running_loop().time()

    assert loop.run(work()) == begin + 3000.0
    with pytest.raises(TimeoutError):
        loop.run(work(), within_s=2999.0)


def test_timers_are_late_when_the_loop_was_held_up(loop: VirtualLoop) -> None:
    heard: list[float] = []
    begin = loop.time()
    loop.call_later(1.0, lambda: heard.append(loop.time() - begin))
    loop.hold_up(5.0)
    assert heard == []
    loop.run_until(loop.time())
    assert heard == [5.0]


def test_a_moment_without_an_end_is_noticed(loop: VirtualLoop) -> None:
    def again() -> None:
        loop.call_soon(again)

    again()
    with pytest.raises(Stuck):
        loop.run_until(loop.time() + 1.0)


def test_what_raises_is_kept(loop: VirtualLoop) -> None:
    loop.call_soon(lambda: 1 // 0)
    loop.run_until(loop.time())
    assert "ZeroDivisionError" in loop.faults[0]


def test_what_is_written_before_the_end_arrives(loop: VirtualLoop, connection: tuple[Socket, _Protocol, _Peer]) -> None:
    socket, protocol, peer = connection
    socket.write(b"all")
    socket.close()
    loop.run_until(loop.time())
    assert peer.heard == [b"all", "closed"]
    assert protocol.heard == [None]


def test_after_the_end_writing_raises_as_in_uvloop_and_pausing_does_not(
    loop: VirtualLoop, connection: tuple[Socket, _Protocol, _Peer]
) -> None:
    socket, protocol, _ = connection
    socket.reset()
    loop.run_until(loop.time())
    assert isinstance(protocol.heard[0], ConnectionResetError)
    with pytest.raises(RuntimeError):
        socket.write(b"late")
    socket.resume_reading()
    socket.pause_reading()
    socket.pause_reading()


def test_a_slow_peer_pauses_the_writer_and_nothing_is_lost(
    loop: VirtualLoop, connection: tuple[Socket, _Protocol, _Peer]
) -> None:
    socket, protocol, peer = connection
    socket.high_water = 3
    socket.stop_taking()
    socket.write(b"abc")
    assert protocol.heard == []
    socket.write(b"d")
    assert protocol.heard == ["pause"]
    loop.run_until(loop.time() + 1.0)
    assert peer.heard == []
    socket.take()
    loop.run_until(loop.time())
    assert (protocol.heard, b"".join(one for one in peer.heard if isinstance(one, bytes))) == (
        ["pause", "resume"],
        b"abcd",
    )


@pytest.mark.parametrize("how", ["take", "abort", "reset"])
def test_the_end_does_not_overtake_what_waits_to_be_written(
    how: str, loop: VirtualLoop, connection: tuple[Socket, _Protocol, _Peer]
) -> None:
    """Of a connection that breaks the peer hears no more than the end."""
    socket, protocol, peer = connection
    socket.stop_taking()
    socket.write(b"all")
    socket.write_eof()
    loop.run_until(loop.time() + 1.0)
    assert peer.heard == []
    with pytest.raises(RuntimeError):
        socket.write(b"more")
    getattr(socket, how)()
    loop.run_until(loop.time() + 1.0)
    assert peer.heard == ([b"all", "closed"] if how == "take" else ["closed"])
    assert bool(protocol.heard) is (how != "take")


def test_while_nobody_reads_nothing_is_heard(loop: VirtualLoop, connection: tuple[Socket, _Protocol, _Peer]) -> None:
    socket, protocol, _ = connection
    socket.pause_reading()
    socket.arrive(b"data")
    socket.end()
    loop.run_until(loop.time())
    assert protocol.heard == []
    socket.resume_reading()
    loop.run_until(loop.time())
    assert protocol.heard == [b"data", None]
