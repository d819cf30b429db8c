"""Tests that probes, legs and connections do not time out because the proxy itself was busy."""

import asyncio
import socket
import socketserver
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from kvparams.instances import Instance, Role, RoundRobin
from kvparams_proxy.event_loop.clock import ClockTimer, StallAwareClock
from kvparams_proxy.event_loop.deadlines import Deadlines
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.probes import Prober
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.interface import ExchangeHandle
from kvparams_proxy.upstream.types import (
    ResponseCollector,
    ResponseHead,
    UpstreamError,
    UpstreamLimits,
    UpstreamTimeout,
)
from tests.support.virtual_loop import VirtualLoop
from tests.support.waiting import until

LIMIT_S = 0.3
HELD_S = 0.8
ANSWER = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 11\r\n\r\n{"data":[]}'


class Engine(socketserver.ThreadingTCPServer):
    """An engine with a thread of its own: it answers while the proxy's loop is held up."""

    allow_reuse_address = True
    daemon_threads = True
    asked: Callable[[], None] | None = None
    """Called in its thread when a request is here."""
    silent = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.over = threading.Event()
        self.connections: list[socket.socket] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Connection(socketserver.StreamRequestHandler):
    server: Engine  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle(self) -> None:
        self.server.connections.append(self.connection)
        while line := self.rfile.readline():
            if line != b"\r\n":
                continue
            if self.server.asked is not None:
                self.server.asked()
            if self.server.silent:
                self.server.over.wait()
                return
            time.sleep(0.05)  # its work: the answer comes after the loop is held up
            self.wfile.write(ANSWER)
            self.wfile.flush()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


@pytest.fixture
async def clock() -> AsyncIterator[StallAwareClock]:
    clock = StallAwareClock(asyncio.get_running_loop())
    yield clock
    clock.close()


class Holding(asyncio.Protocol):
    """Holds the loop up while it reads, as taking a request apart once did."""

    def data_received(self, data: bytes) -> None:
        time.sleep(HELD_S)


@pytest.fixture
async def hold() -> AsyncIterator[Callable[[], None]]:
    """Holds the loop up from now on; for any thread."""
    ours, theirs = socket.socketpair()
    transport, _ = await asyncio.get_running_loop().create_unix_connection(Holding, sock=theirs)
    yield lambda: ours.sendall(b"x")
    transport.close()
    ours.close()


async def test_an_engine_stays_ready_whose_answer_lies_unread_while_the_loop_is_held_up(
    engine: Engine, hold: Callable[[], None]
) -> None:
    loop = asyncio.get_running_loop()
    clock = StallAwareClock(loop)
    fleet = Fleet(
        [Instance("p", "b", Role.PREFILL, engine.url, "nixl")],
        {role: RoundRobin() for role in Role},
        loop.time,
        loop.call_later,
    )
    pools = UpstreamPools(
        lambda instance: UpstreamConnectionPool(instance.url, UpstreamLimits(connections=4), clock=clock)
    )
    (member,) = fleet.members
    pools.joined(member)
    async with asyncio.timeout(20):
        async with Prober(fleet, LIMIT_S, pools, clock=clock):
            assert member.ready
            asked = 0

            def ask() -> None:
                nonlocal asked
                asked += 1
                hold()

            engine.asked = ask

            def is_asked_often() -> bool:
                assert member.ready
                return asked >= 4

            await until(is_asked_often, pause_s=0.001)
            engine.asked = None
            engine.silent = True  # the control: one that does not answer is found out in its time
            assert await until(lambda: not member.ready, pause_s=0.001) < HELD_S + 5 * LIMIT_S
    fleet.close()
    pools.close()
    clock.close()


class Leg:
    """An exchange with a time-out."""

    def __init__(self, watch: Deadlines, pool: UpstreamConnectionPool) -> None:
        self.error: asyncio.Future[UpstreamError | None] = asyncio.get_running_loop().create_future()
        self.handle: ExchangeHandle = pool.exchange(pool.get(b"/"), ResponseCollector(1000, self.ended))
        self.watch = watch
        watch.start(self, LIMIT_S)

    def ended(self, _head: ResponseHead, _raw: bytes, error: UpstreamError | None) -> None:
        self.watch.stop(self)
        self.error.set_result(error)

    def expire(self) -> None:
        self.handle.abort(UpstreamTimeout("too late"))


@pytest.mark.parametrize("silent", [False, True])
async def test_a_leg_whose_answer_lies_unread_does_not_time_out(
    engine: Engine, clock: StallAwareClock, hold: Callable[[], None], silent: bool
) -> None:
    loop = asyncio.get_running_loop()
    watch = Deadlines(loop, clock)
    pool = UpstreamConnectionPool(engine.url, UpstreamLimits(connections=4), clock=clock)
    engine.asked = hold
    engine.silent = silent
    async with asyncio.timeout(10):
        error = await Leg(watch, pool).error
    assert (error is None) is not silent
    pool.close()


async def test_a_connection_that_is_made_while_the_loop_is_held_up_is_made_in_time(
    engine: Engine, clock: StallAwareClock
) -> None:
    loop = asyncio.get_running_loop()
    pool = UpstreamConnectionPool(engine.url, UpstreamLimits(connections=4, connect_s=LIMIT_S), clock=clock)
    leg = Leg(Deadlines(loop, clock), pool)
    loop.call_soon(time.sleep, HELD_S)  # right behind the first step of connecting
    async with asyncio.timeout(10):
        assert await leg.error is None
    pool.close()


async def test_a_connection_that_the_engine_has_closed_is_replaced_however_late_that_is_seen(
    engine: Engine, clock: StallAwareClock
) -> None:
    pool = UpstreamConnectionPool(engine.url, UpstreamLimits(connections=4), clock=clock)
    watch = Deadlines(asyncio.get_running_loop(), clock)
    async with asyncio.timeout(10):
        assert await Leg(watch, pool).error is None
        (kept,) = engine.connections
        kept.shutdown(socket.SHUT_RDWR)
        leg = Leg(watch, pool)
        time.sleep(1.5)  # noqa: ASYNC251  longer than an engine takes that has begun to answer
        assert await leg.error is None
    assert len(engine.connections) == 2
    pool.close()


def test_the_clock_stands_still_only_while_the_loop_is_held_up() -> None:
    loop = VirtualLoop()
    clock = StallAwareClock(loop)
    begun, begun_by_loop = clock.time(), loop.time()
    called: list[float] = []
    ClockTimer(loop, clock, LIMIT_S, lambda: called.append(loop.time()))
    loop.run_until(loop.time() + 0.05)
    loop.hold_up(HELD_S)
    assert clock.time() - begun < 0.05 + LIMIT_S
    loop.run_until(loop.time() + 5.0)
    (at,) = called
    assert HELD_S + LIMIT_S / 3 < at - begun_by_loop < HELD_S + 2 * LIMIT_S
    assert clock.time() - begun == pytest.approx(loop.time() - begun_by_loop - HELD_S, abs=0.1)
