"""Several proxies in front of one fleet, as they are: real fleets, cache models and exchanges over a virtual network.

Requests are dealt to the proxies at random. Each knows its own legs, and those of the others as far as they tell.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Final, Literal

import numpy as np

from benchmarks.replay.model import Leg
from benchmarks.replay.trace import BLOCK
from benchmarks.replay.world import World
from kvparams.instances import Instance, RequestFacts, Role
from kvparams.routing.policies.cache_aware import CacheAware
from kvparams_proxy.config.share_url import ShareURL
from kvparams_proxy.config.sharing import SharingSettings
from kvparams_proxy.coordination.fleet_sync import FleetSync
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel
from tests.support.proxy.memory_network import MemoryNetwork, MemoryTransport
from tests.support.virtual_loop import VirtualLoop

__all__ = ["Replica", "Replicas", "Sharing"]

Sharing = Literal["nothing", "everything"]
_SECRET: Final = b"s" * 32


class _Waiter:
    """A leg never waits here: there are no limits."""

    def __init__(self, facts: RequestFacts) -> None:
        self.facts = facts

    def granted(self, instance: Instance) -> None:
        """Never called."""

    def refused(self, error: ProxyError) -> None:
        """Never called."""


class Replica:
    """One proxy."""

    def __init__(self, network: MemoryNetwork, number: int, workers: int, sharing: Sharing, store: str | None) -> None:
        loop = network.loop
        self.prefixes = PrefixCacheModel(loop.time, seed=1)
        self.fleet = Fleet(
            (),
            {role: CacheAware() for role in Role},
            loop.time,
            loop.call_later,
            slow_start_s=0.0,
            prefixes=self.prefixes,
            needed=(Role.PREFILL,),
        )
        self.transport = MemoryTransport(network, number)
        self.sync: FleetSync | None = None
        if sharing == "everything":
            settings = SharingSettings(ShareURL("valkey://replay", "replay"), lambda: (_SECRET,))
            self.sync = FleetSync(loop, self.fleet, self.prefixes, settings, {"policy": "cache_aware"}, self.transport)
        for index in range(workers):
            instance = Instance(f"prefill-{index}", "1", Role.PREFILL, f"http://replay-{index}", "content", store=store)
            member = self.fleet.add(instance)
            self.fleet.record_probe(member, True, None)
        self.fleet.startup_complete()
        if self.sync is not None:
            self.sync.start()

    def acquire(self, facts: RequestFacts) -> Instance:
        """Takes an instance."""
        chosen = self.fleet.acquire(Role.PREFILL, facts, (), _Waiter(facts))
        assert chosen is not None
        return chosen


class Replicas:
    """A `Router`: some proxies, and requests dealt to them at random."""

    def __init__(
        self,
        world: World,
        count: int,
        sharing: Sharing,
        delay_s: Callable[[Random], float] = lambda die: 0.001 + die.expovariate(1000.0),
        seed: int = 1,
    ) -> None:
        die = Random(seed)
        self._die = die
        self._loop = VirtualLoop()
        self._began = self._loop.time()
        network = MemoryNetwork(self._loop, lambda: delay_s(die))
        store = None if world.store is None else "store"
        self.replicas = [Replica(network, number, world.workers, sharing, store) for number in range(count)]
        self._loop.run_until(self._began + 3.0)
        self._began += 3.0
        self._legs: dict[int, tuple[Replica, Instance, RequestFacts]] = {}

    @property
    def sent_bytes(self) -> int:
        """Bytes that all proxies have sent, heartbeats included; each counts once, however many receive it."""
        return sum(each.sync.exchange.sent_bytes for each in self.replicas if each.sync is not None)

    def place(self, leg: Leg, now: float) -> int:
        """Gives the request to a proxy, which chooses."""
        self._run_until(now)
        replica = self.replicas[self._die.randrange(len(self.replicas))]
        facts = _facts(leg)
        instance = replica.acquire(facts)
        running = replica.prefixes.leg(facts.transfer_id)
        leg.fetch = running is not None and running.decision.expected.fetched_tokens > 0
        self._legs[leg.number] = replica, instance, facts
        return int(instance.id.rpartition("-")[2])

    def done(self, leg: Leg, now: float) -> None:
        """Tells the proxy that gave the leg what its engine reports."""
        self._run_until(now)
        replica, instance, facts = self._legs.pop(leg.number)
        tokens = leg.request.tokens
        replica.prefixes.record_report(facts, tokens, min(leg.held * BLOCK, tokens - 1))
        replica.fleet.release(instance, facts)

    def event(self, worker: int, came: Sequence[int], went: Sequence[int]) -> None:
        """Engines publish no KV events here."""

    def decode(self, leg: Leg, running: Sequence[int]) -> int:
        """The least loaded one: decode is not what is compared."""
        return min(range(len(running)), key=running.__getitem__)

    def _run_until(self, now: float) -> None:
        self._loop.run_until(self._began + now)
        if self._loop.faults:
            raise RuntimeError(self._loop.faults[0])


def _facts(leg: Leg) -> RequestFacts:
    blocks = np.array(leg.request.blocks, np.uint32)
    ids = np.repeat(blocks, BLOCK)[: leg.request.tokens]
    name = str(leg.number)
    # Arrays are what the index reads fastest; lists would only take longer.
    return RequestFacts(name, name, None, 1, 1, ids, None, prompt_tokens=leg.request.tokens)  # pyright: ignore[reportArgumentType]
