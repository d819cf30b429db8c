"""Runs random proxies that share a fleet, over a network that loses, delays and separates, and checks what must hold.

    python -m tests.system.proxy.coordination.random_site FIRST COUNT      many seeds; one line of JSON

Everything follows from the seed. Some proxies speak a later version (entries that others do not know), clocks are wrong
by up to 20 seconds, proxies are killed and started, engines restart.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random
from typing import Any, cast

from kvparams.instances import Instance, RequestFacts, Role
from kvparams.replication.messages import MessageKind
from kvparams.routing.admission import QueueLimits, RoleLimits
from kvparams.routing.policies.cache_aware import CacheAware
from kvparams.routing.policies.least_load import LeastLoad
from kvparams_proxy.errors import ProxyError
from tests.support.proxy.memory_network import MemoryNetwork
from tests.support.proxy.shared_site import SharedProxy, facts
from tests.support.virtual_loop import VirtualLoop

__all__ = ["RandomSite", "run"]

_RUN_S = 8.0
_SETTLE_S = 8.0
_LATER_ENTRY = bytes([99, 3, 0]) + b"new"


class _Leg:
    """A leg at one proxy, from its wait to its end."""

    def __init__(self, site: "RandomSite", proxy: SharedProxy, role: Role, facts: RequestFacts) -> None:
        self.site = site
        self.proxy = proxy
        self.role = role
        self.facts = facts
        self.results = 0

    def begin(self) -> None:
        """Asks for an engine."""
        try:
            instance = self.proxy.fleet.acquire(self.role, self.facts, (), self)
        except ProxyError:
            self.results += 1
            return
        if instance is not None:
            self.granted(instance)

    def granted(self, instance: Instance) -> None:
        """Runs for a while."""
        self.results += 1
        self.site.running.append((self, instance))
        self.site.loop.call_later(self.site.die.expovariate(4.0), self._end, instance)

    def refused(self, error: ProxyError) -> None:
        """Is over."""
        self.results += 1

    def _end(self, instance: Instance) -> None:
        if (self, instance) not in self.site.running:  # its proxy was killed
            return
        self.site.running.remove((self, instance))
        fleet, die = self.proxy.fleet, self.site.die
        ends_well = die.random() < 0.9
        if ends_well and self.role is Role.PREFILL and self.site.knows_caches:
            reported = die.choice([None, 0, self.facts.prompt_tokens // 2])
            self.proxy.prefixes.record_report(self.facts, self.facts.prompt_tokens, reported)
        if ends_well:
            fleet.record_success(instance)
        else:
            fleet.record_failure(instance, connected=die.random() < 0.8, why="chance")
            for member in fleet.members:  # a probe finds it well
                if not member.ready:
                    fleet.record_probe(member, True, None)
        fleet.release(instance, self.facts)


class RandomSite:
    """One run."""

    def __init__(self, seed: int) -> None:
        self.die = die = Random(seed)
        self.loop = VirtualLoop()
        self.counts = Counter[str]()
        self.wrong: list[str] = []
        self.running: list[tuple[_Leg, Instance]] = []
        self.knows_caches = die.random() < 0.7
        self._losses = 0.0
        self.network = MemoryNetwork(
            self.loop, lambda: 0.0002 + die.expovariate(500.0), lambda: die.random() < self._losses
        )
        self._limits = RoleLimits(requests=die.randrange(1, 5)) if die.random() < 0.5 else None
        engines = die.randrange(1, 4)
        self._engines = [
            Instance(f"{role}-{number}", "1", role, f"http://{role}-{number}", "nixl", store="s" if number else None)
            for role in (Role.PREFILL, Role.DECODE)
            for number in range(engines)
        ]
        self._numbers = count()
        self._names = count()
        self._legs: list[_Leg] = []
        self.proxies: list[SharedProxy] = []
        for _ in range(die.randrange(2, 6)):
            self._start()

    def run(self) -> None:
        """Lets chance act, and then everything end."""
        die, loop = self.die, self.loop
        loop.run_until(loop.time() + die.choice([0.0, 1.5, 3.0]))
        end = loop.time() + _RUN_S
        acts: tuple[tuple[Callable[[], None], int], ...] = (
            (self._ask, 60),
            (self._separate, 2),
            (self._heal, 3),
            (self._lose, 2),
            (self._kill, 1),
            (self._start, 1),
            (self._disconnect, 1),
            (self._restart, 1),
            (self._set, 2),
            (self._speak_later_version, 2),
        )
        choices = [act for act, weight in acts for _ in range(weight)]
        while loop.time() < end:
            die.choice(choices)()
            loop.run_until(loop.time() + die.expovariate(20.0))
            self._check_always()
        self._heal()
        loop.run_until(loop.time() + 3.0)
        self._check_connected()
        loop.run_until(loop.time() + _SETTLE_S)
        self._check_end()
        self.wrong += loop.faults

    # what happens

    def _start(self) -> None:
        if len(self.proxies) >= 6:
            return
        self.counts["starts"] += 1
        policy = CacheAware if self.knows_caches else LeastLoad
        queue = QueueLimits(waiting=self.die.choice([2, 50]), wait_s=2.0)
        self.proxies.append(
            SharedProxy(
                self.network,
                next(self._numbers),
                self._engines,
                policy=policy,
                limits=self._limits,
                queue=queue,
                clock_offset_s=self.die.uniform(-20.0, 20.0),
            )
        )

    def _kill(self) -> None:
        if len(self.proxies) < 2:
            return
        self.counts["kills"] += 1
        proxy = self.proxies.pop(self.die.randrange(len(self.proxies)))
        proxy.transport.vanish()
        self.running = [each for each in self.running if each[0].proxy is not proxy]
        self._legs = [leg for leg in self._legs if leg.proxy is not proxy]

    def _ask(self) -> None:
        die = self.die
        proxy = die.choice(self.proxies)
        name = str(next(self._names))
        family, own = die.randrange(3), die.randrange(1, 500)
        ids = [family * 1000 + token for token in range(die.choice([0, 300, 600]))] + [10_000 + own] * die.randrange(
            400
        )
        role = die.choice([Role.PREFILL, Role.DECODE])
        leg = _Leg(self, proxy, role, facts(name, ids or [1], tenant=die.choice(["a", "b"])))
        self._legs.append(leg)
        self.counts["legs"] += 1
        leg.begin()

    def _separate(self) -> None:
        self.counts["partitions"] += 1
        numbers = [each.transport.number for each in self.proxies]
        side = {number for number in numbers if self.die.random() < 0.5}
        self.network.separated |= {frozenset((a, b)) for a in side for b in numbers if b not in side}

    def _heal(self) -> None:
        self.network.separated.clear()
        self._losses = 0.0
        for proxy in self.proxies:
            if not proxy.transport.is_connected:
                proxy.transport.reconnect()

    def _lose(self) -> None:
        self._losses = self.die.choice([0.05, 0.5])

    def _disconnect(self) -> None:
        self.counts["disconnections"] += 1
        self.die.choice(self.proxies).transport.is_connected = False

    def _restart(self) -> None:
        self.counts["restarts"] += 1
        proxy = self.die.choice(self.proxies)
        member = self.die.choice(list(proxy.fleet.members))
        proxy.fleet.record_probe(member, False, None)
        self.loop.call_later(self.die.uniform(0.0, 0.5), partial(proxy.fleet.record_probe, member, True, None))

    def _set(self) -> None:
        name = f"drain/{self.die.choice('abc')}"
        self.die.choice(self.proxies).shared.settings.write(name, self.die.random() < 0.5)

    def _speak_later_version(self) -> None:
        exchange = cast("Any", self.die.choice(self.proxies).shared.exchange)
        exchange._send_in_order(MessageKind.ENTRIES, _LATER_ENTRY)

    # what must hold

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(f"{self.loop.time() - 1000:.3f} s: {what}")

    def _own(self, proxy: SharedProxy, id: str) -> int:
        """Returns the legs that really run at a proxy's engine, and the room that it holds for others."""
        offers = cast("Any", proxy.shared)._queues._offers.values()
        held = sum(offer.instance.id == id for offer in offers)
        return held + sum(leg.proxy is proxy and instance.id == id for leg, instance in self.running)

    def _check_always(self) -> None:
        for proxy in self.proxies:
            for member in proxy.fleet.members:
                own = self._own(proxy, member.instance.id)
                self._check(member.own_in_flight == own, f"{member.instance.id} has {member.own_in_flight}, not {own}")
                self._check(member.elsewhere >= 0 and member.elsewhere_tokens >= 0, "less than nothing runs elsewhere")
        for leg in self._legs:
            self._check(leg.results <= 1, f"leg {leg.facts.request_id} was answered {leg.results} times")

    def _check_connected(self) -> None:
        """Everybody hears everybody for longer than a lease: all know the same."""
        for proxy in self.proxies:
            others = len(self.proxies) - 1
            self._check(len(proxy.shared.exchange.siblings) == others, "not all siblings are known")
            for member in proxy.fleet.members:
                id = member.instance.id
                told = sum(self._own(other, id) for other in self.proxies)
                # What has begun or ended within the delay of the network may still be under way.
                self._check(abs(member.in_flight - told) <= 2, f"{id}: {member.in_flight} in flight, really {told}")

    def _check_end(self) -> None:
        self._check(not self.running, "legs run for ever")
        for leg in self._legs:
            self._check(leg.results == 1, f"leg {leg.facts.request_id} was answered {leg.results} times")
        digests = {proxy.shared.settings.digest for proxy in self.proxies}
        self._check(len(digests) == 1, "settings differ")
        for proxy in self.proxies:
            for member in proxy.fleet.members:
                load = (member.in_flight, member.tokens, member.elsewhere, member.elsewhere_tokens)
                self._check(load == (0, 0, 0, 0), f"{member.instance.id} has a load of {load}")
                self._check(member.backlog.wait_s == 0.0, f"work waits at {member.instance.id}")
            if self.knows_caches:
                self._check(not len(proxy.prefixes), "legs are left in the cache model")
            for role, dispatcher in cast("Any", proxy.fleet)._roles.items():
                left = len(dispatcher._room)
                self._check(not left, f"{left} {role} legs are left in the queue")
            refused = dict(proxy.shared.exchange.refused)
            self._check(not refused, f"messages were refused: {refused}")


def run(seed: int) -> RandomSite:
    """Runs one seed."""
    site = RandomSite(seed)
    site.run()
    return site


def _main(first: int, number: int) -> int:
    counts = Counter[str]()
    bad: dict[int, list[str]] = {}
    for seed in range(first, first + number):
        site = run(seed)
        counts.update(site.counts)
        if site.wrong:
            bad[seed] = site.wrong[:3]
    sys.stdout.write(
        json.dumps({"seeds": number, "bad": len(bad), "first": dict(list(bad.items())[:5]), "counts": counts}) + "\n"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    import logging

    logging.disable(logging.CRITICAL)
    sys.exit(_main(int(sys.argv[1]), int(sys.argv[2])))
