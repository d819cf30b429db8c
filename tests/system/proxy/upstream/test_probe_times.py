"""Tests when engines are probed, and that nothing is left of a probe whose engine has gone."""

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import pytest

from kvparams.instances import Role, RoundRobin
from kvparams_proxy.event_loop.step_runner import StepRunner, StepTask
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.probes import Prober
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.types import UpstreamLimits
from tests.support.proxy.fixtures import MODELS
from tests.support.virtual_loop import VirtualLoop
from tests.support.waiting import until
from tests.system.proxy.upstream.test_probes import instance, probed
from tests.system.simulation.network import Network, Socket

MISSING = "http://127.0.0.1:1"
HERE = "http://127.0.0.1:2"
LONG_MODELS = MODELS.replace(b'"data"', b'"x":"%b","data"' % (b"x" * 20_000))


ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(MODELS), MODELS)


class CountingPool(UpstreamConnectionPool):
    """A pool that notes when it is asked for an exchange, in the loop's time."""

    asked: ClassVar[list[float]] = []

    def exchange(self, *arguments: Any, **more: Any) -> Any:
        self.asked.append(asyncio.get_running_loop().time())
        return super().exchange(*arguments, **more)


class Engine:
    """An engine in a simulated network: it answers each probe, or its port is closed."""

    def __init__(self, *, is_there: bool) -> None:
        self.is_there = is_there

    def connecting(self) -> tuple[float, OSError | None]:
        return 0.0, None if self.is_there else ConnectionRefusedError()

    def accept(self, socket: Socket) -> "EngineConnection":
        return EngineConnection(socket)


class EngineConnection:
    """Answers each request that arrives in one piece."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket

    def received(self, data: bytes) -> None:
        assert data.endswith(b"\r\n\r\n")
        self._socket.arrive(ANSWER)

    def closed(self) -> None:
        pass


@pytest.fixture
def loop() -> VirtualLoop:
    """A virtual clock, and a network in which an engine is at port 2 and none at port 1."""
    loop = VirtualLoop()
    loop.network = network = Network(loop, lambda: 0.0)
    network.servers.update({1: Engine(is_there=False), 2: Engine(is_there=True)})
    return loop


@pytest.mark.parametrize("join", [False, True])
def test_many_missing_engines_are_probed_a_few_at_a_time(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch, join: bool
) -> None:
    """400 of which none is there, at the start or added at once: the next probes are spread over seconds."""
    asked: list[float] = []
    monkeypatch.setattr(CountingPool, "asked", asked)
    loop.run(_probe_missing(loop, asked, join=join))
    assert loop.faults == []


async def _probe_missing(loop: VirtualLoop, asked: list[float], *, join: bool) -> None:
    instances = [instance(f"p{number}", MISSING) for number in range(400)]
    fleet = Fleet([] if join else instances, {role: RoundRobin() for role in Role}, loop.time, loop.call_later)
    pools = UpstreamPools(lambda instance: CountingPool(instance.url, UpstreamLimits(connections=1)))
    for member in fleet.members:
        pools.joined(member)
    fleet.add_listener(pools)
    async with Prober(fleet, 5.0, pools):
        if join:
            for each in instances:
                fleet.add(each)
        began = loop.time()
        await until(lambda: len(asked) >= 600, 20.0)
        assert loop.time() - began > 1.5, "200 in a second, and the first 400 of those that were there"
        slots = Counter(int(at / 0.1) for at in asked if at > began)
        assert max(slots.values()) < 120, "no burst"
    fleet.close()
    pools.close()


class TimedPool(UpstreamConnectionPool):
    """A pool that notes when it is asked for an exchange, apart from other pools."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked: list[float] = []

    def exchange(self, *given: Any, **more: Any) -> Any:
        self.asked.append(asyncio.get_running_loop().time())
        return super().exchange(*given, **more)


@pytest.mark.parametrize("there", [True, False], ids=["there", "missing"])
def test_probes_are_spread_once_and_then_come_as_often_as_those_of_any_engine(loop: VirtualLoop, there: bool) -> None:
    """The second of two engines: between its first two probes there is more time, and only there."""
    apart_s = 0.3
    first, *later = loop.run(_times_between_probes(loop, is_there=there))
    assert first > 0.95 * apart_s
    assert max(later) < 0.95 * apart_s
    assert loop.faults == []


async def _times_between_probes(loop: VirtualLoop, *, is_there: bool) -> list[float]:
    url = HERE if is_there else MISSING
    instances = [instance(f"p{number}", url) for number in range(2)]
    fleet = Fleet(instances, {role: RoundRobin() for role in Role}, loop.time, loop.call_later)
    pools = UpstreamPools(lambda instance: TimedPool(instance.url, UpstreamLimits()))
    for member in fleet.members:
        pools.joined(member)
    second: Any = pools["p1"]
    async with Prober(fleet, 0.2, pools):
        await until(lambda: len(second.asked) >= 9)
        assert [member.ready for member in fleet.members] == [is_there] * 2
    fleet.close()
    pools.close()
    return [after - before for before, after in pairwise(second.asked)]


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
