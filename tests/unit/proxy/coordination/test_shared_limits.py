"""Tests limits and tenants' shares that hold over a site, however clients are dealt to its proxies."""

from collections import Counter
from random import Random

import pytest

from kvparams.instances import Instance, RequestFacts, Role
from kvparams.routing.admission import QueueLimits, RoleLimits
from kvparams.routing.policies.least_load import LeastLoad
from kvparams_proxy.errors import ProxyError
from tests.support.proxy.memory_network import MemoryNetwork
from tests.support.proxy.shared_site import SharedProxy, facts
from tests.support.virtual_loop import VirtualLoop

_ENGINES = 4
_LIMIT = 16


class Client:
    """A tenant that keeps so many requests waiting at one proxy."""

    def __init__(self, crowd: "Crowd", proxy: SharedProxy, tenant: str, number: int) -> None:
        self.crowd = crowd
        self.proxy = proxy
        self.facts = facts(f"{tenant}-{number}", tokens=100, tenant=tenant)

    def ask(self) -> None:
        """Asks for an engine."""
        try:
            instance = self.proxy.fleet.acquire(Role.DECODE, self.facts, (), self)
        except ProxyError as error:
            self.refused(error)
            return
        if instance is not None:
            self.granted(instance)

    def granted(self, instance: Instance) -> None:
        """Runs for a while, and asks again."""
        self.crowd.begin(instance)
        seconds = self.crowd.die.uniform(0.2, 0.6)
        self.crowd.loop.call_later(seconds, self._end, instance)

    def refused(self, error: ProxyError) -> None:
        """Asks again later."""
        self.crowd.refused[self.facts.tenant] += 1
        self.crowd.loop.call_later(1.0, self.ask)

    def _end(self, instance: Instance) -> None:
        self.crowd.end(instance, self.facts)
        self.proxy.fleet.release(instance, self.facts)
        self.crowd.loop.call_soon(self.ask)


class Crowd:
    """All clients of a site, and what really runs on its engines."""

    def __init__(self, proxies: int, *, is_alone: bool = False, queue: QueueLimits | None = None) -> None:
        self.die = Random(1)
        self.loop = VirtualLoop()
        network = MemoryNetwork(self.loop, lambda: 0.0005 + self.die.expovariate(1000.0))
        engines = [Instance(f"decode-{n}", "1", Role.DECODE, f"http://decode-{n}", "nixl") for n in range(_ENGINES)]
        self.proxies = [
            SharedProxy(
                network,
                number,
                engines,
                is_alone=is_alone,
                policy=LeastLoad,
                limits=RoleLimits(requests=_LIMIT),
                queue=queue or QueueLimits(waiting=100_000, wait_s=600.0),
            )
            for number in range(proxies)
        ]
        self.running = Counter[str]()
        self.most = 0
        """Legs on all engines at a time."""
        self.over_s = 0.0
        """Seconds that engines had more than the limit."""
        self.served = Counter[str]()
        self.busy_s = 0.0
        self.refused = Counter[str]()
        self._since = self.loop.time()
        self.loop.run_until(self.loop.time() + 3.0)

    def add(self, proxy: int, tenant: str, count: int) -> None:
        """Adds clients that all ask at once."""
        for number in range(count):
            Client(self, self.proxies[proxy], tenant, number).ask()

    def begin(self, instance: Instance) -> None:
        """Counts a leg that begins."""
        self._advance()
        self.running[instance.id] += 1
        self.most = max(self.most, self.running.total())

    def end(self, instance: Instance, facts: RequestFacts) -> None:
        """Counts a leg that ends."""
        self._advance()
        self.running[instance.id] -= 1
        self.served[facts.tenant] += 1

    def run(self, seconds: float) -> None:
        """Lets time pass, and counts from zero."""
        self._advance()
        self.served.clear()
        self.busy_s = self.over_s = 0.0
        self.most = 0
        self.loop.run_until(self.loop.time() + seconds)
        self._advance()
        assert not self.loop.faults

    def _advance(self) -> None:
        now = self.loop.time()
        self.busy_s += self.running.total() * (now - self._since)
        self.over_s += sum(legs > _LIMIT for legs in self.running.values()) * (now - self._since)
        self._since = now


def _uneven(crowd: Crowd) -> None:
    crowd.add(0, "x", 300)
    crowd.add(1, "x", 60)
    crowd.add(2, "y", 80)
    crowd.add(3, "y", 20)


def test_limits_hold_over_the_site_and_are_used() -> None:
    crowd = Crowd(4)
    _uneven(crowd)
    crowd.run(5.0)
    crowd.run(60.0)
    assert crowd.most <= 1.05 * _ENGINES * _LIMIT
    assert crowd.over_s / 60.0 < 0.05 * _ENGINES
    assert crowd.busy_s / 60.0 == pytest.approx(_ENGINES * _LIMIT, rel=0.05)


def test_tenants_have_equal_shares_over_the_site() -> None:
    crowd = Crowd(4)
    _uneven(crowd)
    crowd.run(5.0)
    crowd.run(60.0)
    share = crowd.served["x"] / crowd.served.total()
    assert share == pytest.approx(0.5, abs=0.025)


def test_without_sharing_neither_holds() -> None:
    crowd = Crowd(4, is_alone=True)
    _uneven(crowd)
    crowd.run(20.0)
    assert crowd.most > 2 * _ENGINES * _LIMIT


def test_a_proxy_that_is_killed_while_its_legs_wait_blocks_nobody() -> None:
    crowd = Crowd(2)
    crowd.add(0, "x", 40)
    crowd.add(1, "y", 200)
    crowd.run(2.0)
    crowd.proxies[1].transport.vanish()
    crowd.add(0, "x", 100)
    crowd.run(20.0)
    assert crowd.served["x"] / 20.0 > 0.75 * _ENGINES * _LIMIT / 0.4


def test_a_proxy_that_takes_nothing_of_what_it_is_left_blocks_nobody() -> None:
    crowd = Crowd(2)
    crowd.add(0, "x", 80)
    crowd.run(1.0)
    stuck = crowd.proxies[1].fleet
    crowd.add(1, "y", 40)
    crowd.run(0.2)
    for role in Role:  # it is granted nothing from now on
        stuck._roles[role]._serving = True  # pyright: ignore[reportPrivateUsage]
        stuck._roles[role].accept_offer = lambda waiter, member: None  # pyright: ignore[reportPrivateUsage]
    crowd.run(3.0)
    crowd.run(20.0)
    assert crowd.served["x"] / 20.0 > 0.8 * _ENGINES * _LIMIT / 0.4


def test_the_queue_is_bounded_over_the_site() -> None:
    crowd = Crowd(2, queue=QueueLimits(waiting=50, wait_s=600.0))
    crowd.add(0, "x", _ENGINES * _LIMIT + 50)
    crowd.run(0.1)
    assert not crowd.refused
    crowd.add(1, "y", 10)
    crowd.run(0.1)
    assert crowd.refused["x"] >= 9  # a flood fills only what others leave, at whatever proxy
    assert not crowd.refused["y"]
