"""Tests when engines are probed, and that nothing is left of a probe whose engine has gone."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain, pairwise, repeat
from typing import Any

import pytest

from kvparams.instances import Role, RoundRobin
from kvparams_proxy.event_loop.step_runner import StepRunner, StepTask
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.probes import Prober
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.types import ResponseCollector, ResponseHead, UpstreamError, UpstreamLimits
from tests.support.proxy.fixtures import MODELS
from tests.support.virtual_loop import VirtualLoop
from tests.support.waiting import stays_true_for, until
from tests.system.proxy.upstream.test_probes import instance, probed
from tests.system.simulation.network import Network, Socket

LONG_MODELS = MODELS.replace(b'"data"', b'"x":"%b","data"' % (b"x" * 20_000))


BUSY = b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(MODELS), MODELS)
Answer = tuple[float, bytes]
"""How many seconds it comes after its request, and what it is."""


class TimedPool(UpstreamConnectionPool):
    """A pool that notes when it is asked for an exchange, in the loop's time."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked: list[float] = []

    def exchange(self, *given: Any, **more: Any) -> Any:
        self.asked.append(asyncio.get_running_loop().time())
        return super().exchange(*given, **more)


class SimulatedEngine:
    """An engine in a simulated network. Its n-th request gets the n-th of its answers; None is silence."""

    def __init__(self, loop: VirtualLoop, answers: Iterable[Answer | None] | None) -> None:
        """`answers`: None where no such engine is there."""
        self.loop = loop
        self.answers = None if answers is None else iter(answers)

    def connecting(self) -> tuple[float, OSError | None]:
        return 0.0, ConnectionRefusedError() if self.answers is None else None

    def accept(self, socket: Socket) -> "SimulatedConnection":
        return SimulatedConnection(self, socket)


class SimulatedConnection:
    """The engine's end of a connection."""

    def __init__(self, engine: SimulatedEngine, socket: Socket) -> None:
        self._engine = engine
        self._socket = socket

    def received(self, data: bytes) -> None:
        """A request: each arrives in one piece."""
        assert self._engine.answers is not None
        answer = next(self._engine.answers)
        if answer is not None:
            after_s, raw = answer
            self._engine.loop.call_later(after_s, self._socket.arrive, raw)

    def closed(self) -> None:
        """The proxy has closed it."""


class Probed:
    """A fleet of engines in virtual time."""

    def __init__(self, loop: VirtualLoop, count: int, connections: int) -> None:
        self.instances = [instance(f"p{number}", "http://127.0.0.1:1") for number in range(count)]
        self.fleet = Fleet([], {role: RoundRobin() for role in Role}, loop.time, loop.call_later)
        self.pools = UpstreamPools(lambda one: TimedPool(one.url, UpstreamLimits(connections=connections)))
        self.fleet.add_listener(self.pools)

    @property
    def ready(self) -> list[bool]:
        return [member.ready for member in self.fleet.members]

    def asked(self, id: str) -> list[float]:
        pool: Any = self.pools[id]
        return pool.asked


@asynccontextmanager
async def probing(
    answers: Iterable[Answer | None] | None, *, every_s: float, count: int = 1, connections: int = 8, join: bool = False
) -> AsyncGenerator[Probed]:
    """Probes engines with these answers. With `join` they join when the first round is over."""
    loop: Any = asyncio.get_running_loop()
    network = loop.network = Network(loop, lambda: 0.0)
    network.servers[1] = SimulatedEngine(loop, answers)
    found = Probed(loop, count, connections)
    if not join:
        for each in found.instances:
            found.fleet.add(each)
    async with Prober(found.fleet, every_s, found.pools):
        if join:
            for each in found.instances:
                found.fleet.add(each)
        yield found
    found.fleet.close()
    found.pools.close()


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    assert loop.faults == []


@pytest.mark.parametrize("join", [False, True])
def test_many_missing_engines_are_probed_a_few_at_a_time(loop: VirtualLoop, join: bool) -> None:
    """400 of which none is there, at the start or added at once: the next probes are spread over seconds."""

    async def run() -> None:
        async with probing(None, every_s=5.0, count=400, connections=1, join=join) as probed:

            def asked() -> list[float]:
                return [at for one in probed.instances for at in probed.asked(one.id)]

            began = loop.time()
            await until(lambda: len(asked()) >= 600, 20.0, pause_s=0.05)
            assert loop.time() - began > 1.5, "200 in a second, and the first 400 of those that were there"
            slots = Counter(int(at / 0.1) for at in asked() if at > began)
            assert max(slots.values()) < 120, "no burst"

    loop.run(run())


@pytest.mark.parametrize("there", [True, False], ids=["there", "missing"])
def test_probes_are_spread_once_and_then_come_as_often_as_those_of_any_engine(loop: VirtualLoop, there: bool) -> None:
    """The second of two engines: between its first two probes there is more time, and only there."""
    every_s, apart_s = 0.2, 0.3

    async def run() -> list[float]:
        answers = repeat((0.0, ANSWER)) if there else None
        async with probing(answers, every_s=every_s, count=2) as probed:
            await until(lambda: len(probed.asked("p1")) >= 9)
            assert probed.ready == [there] * 2
            return probed.asked("p1")

    first, *later = [after - before for before, after in pairwise(loop.run(run()))]
    assert first > 0.95 * apart_s
    assert max(later) < 0.95 * apart_s


def test_a_probe_has_its_own_time_and_not_the_rest_of_the_last_ones(loop: VirtualLoop) -> None:
    """The second answers late, but in time; by then that of the first is over. A third answer would not come."""

    async def run() -> None:
        async with probing(chain([(0.0, BUSY), (0.5, ANSWER)], repeat(None)), every_s=0.8) as probed:
            assert probed.ready == [False]
            await until(lambda: probed.ready == [True])

    loop.run(run())


def unheard(head: ResponseHead, raw: bytes, error: UpstreamError | None) -> None:
    """Nobody wants to know."""


@pytest.mark.parametrize("connections", [1, 2])
def test_an_engine_that_has_all_its_connections_is_not_missing(loop: VirtualLoop, connections: int) -> None:
    """The control: with a connection left it is found to be silent."""

    async def run() -> None:
        answers = chain([(0.0, ANSWER)], repeat(None))
        async with probing(answers, every_s=0.05, connections=connections) as probed:
            pool = probed.pools["p0"]
            leg = pool.exchange(pool.request(b"/v1/completions", b"", b"{}"), ResponseCollector(1000, unheard))
            if connections == 1:
                await stays_true_for(60.0, lambda: probed.ready == [True])
            else:
                await until(lambda: probed.ready == [False])
            leg.discard()

    loop.run(run())


class Interrupted(StepRunner):
    """Runs work, but calls `interrupt` before its first step."""

    interrupt: Callable[[], object]
    work: StepTask
    was_cancelled = False

    def run(self, *given: Any, **more: Any) -> StepTask:
        asyncio.get_running_loop().call_soon(self._interrupt)
        self.work = super().run(*given, **more)
        return self.work

    def _interrupt(self) -> None:
        assert not self.work.is_finished
        self.interrupt()
        self.was_cancelled = self.work.is_finished


async def test_a_long_answer_of_an_engine_that_has_left_is_not_read(scripted: Any) -> None:
    engine = await scripted(None)
    steps = Interrupted(asyncio.get_running_loop())
    async with probed(engine.url, every_s=0.02, steps=steps) as proxied:
        steps.interrupt = partial(proxied.fleet.remove, "p0")
        engine.models = LONG_MODELS
        await until(lambda: steps.was_cancelled)
