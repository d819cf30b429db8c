"""Several proxies in front of one fleet, as they are: real fleets, cache models and exchanges over a virtual network.

Requests are dealt to the proxies at random. Each knows its own legs, those of the others as far as they tell, and what
engines report.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Literal

import numpy as np

from benchmarks.replay.engine_reports import EngineReports
from benchmarks.replay.model import Leg
from benchmarks.replay.trace import BLOCK
from benchmarks.replay.world import World
from kvparams.instances import Instance, RequestFacts, Role
from kvparams.routing.adapter_metrics import AdapterMetrics
from kvparams_proxy.fleet.adapter_loads import correct_slots
from tests.support.proxy.memory_network import MemoryNetwork
from tests.support.proxy.shared_site import SharedProxy
from tests.support.virtual_loop import VirtualLoop

__all__ = ["Replicas", "Sharing"]

Sharing = Literal["nothing", "queue depths", "queue depths and KV events", "everything"]
"""What proxies know beside their own legs: nothing, what engines report, or all that they tell each other."""


class Replicas:
    """A `Router`: some proxies, and requests dealt to them at random."""

    def __init__(
        self,
        world: World,
        count: int,
        sharing: Sharing,
        delay_s: Callable[[Random], float] = lambda die: 0.001 + die.expovariate(1000.0),
        seed: int = 1,
        adapters: int = 0,
    ) -> None:
        """Starts the proxies.

        Args:
            world: the fleet.
            count: how many proxies.
            sharing: what they know of each other.
            delay_s: of a message.
            seed: of delays, and of the proxy that a request is dealt to.
            adapters: how many LoRA adapters all engines serve.
        """
        die = Random(seed)
        self._die = die
        self._loop = VirtualLoop()
        self._began = self._loop.time()
        network = MemoryNetwork(self._loop, lambda: delay_s(die))
        store = None if world.store is None else "store"
        engines = [
            Instance(f"prefill-{index}", "1", Role.PREFILL, f"http://replay-{index}", "content", store=store)
            for index in range(world.workers)
        ]
        self.replicas = [
            SharedProxy(network, number, engines, is_alone=sharing != "everything") for number in range(count)
        ]
        self._reports = EngineReports(self._loop, world.workers, lambda: delay_s(die))
        self._has_events = sharing == "queue depths and KV events"
        for replica in self.replicas:
            if sharing.startswith("queue depths"):
                self._reports.read_depths(replica)
            if self._has_events:
                self._reports.send_events(replica)
        self._loop.run_until(self._began + 3.0)
        self._began += 3.0
        for replica in self.replicas:
            _serve_adapters(replica, [_adapter(number + 1) for number in range(adapters)], world.adapter_slots)
        self._legs: dict[int, tuple[SharedProxy, Instance, RequestFacts]] = {}

    @property
    def sent_bytes(self) -> int:
        """Bytes that all proxies have sent, heartbeats included; each counts once, however many receive it."""
        return sum(each.sync.exchange.sent_bytes for each in self.replicas if each.sync is not None)

    def place(self, leg: Leg, now: float) -> int:
        """Gives the request to a proxy, which chooses."""
        self._run_until(now)
        replica = self.replicas[self._die.randrange(len(self.replicas))]
        facts = _facts(leg)
        instance = replica.acquire(Role.PREFILL, facts)
        running = replica.prefixes.leg(facts.transfer_id)
        leg.fetch = running is not None and running.decision.expected.fetched_tokens > 0
        self._legs[leg.number] = replica, instance, facts
        worker = int(instance.id.rpartition("-")[2])
        self._reports.depths[worker] += 1
        self._reports.record_prompt(leg.request.blocks)
        return worker

    def done(self, leg: Leg, now: float) -> None:
        """Tells the proxy that gave the leg what its engine reports."""
        self._run_until(now)
        replica, instance, facts = self._legs.pop(leg.number)
        self._reports.depths[leg.worker] -= 1
        tokens = leg.request.tokens
        replica.prefixes.record_report(facts, tokens, min(leg.held * BLOCK, tokens - 1))
        replica.fleet.release(instance, facts)

    def event(self, worker: int, came: Sequence[int], went: Sequence[int]) -> None:
        """Tells all proxies, where engines publish KV events."""
        if self._has_events:
            self._reports.publish(self.replicas, worker, came, went)

    def decode(self, leg: Leg, running: Sequence[int]) -> int:
        """The least loaded one: decode is not what is compared."""
        return min(range(len(running)), key=running.__getitem__)

    def _run_until(self, now: float) -> None:
        self._loop.run_until(self._began + now)
        if self._loop.faults:
            raise RuntimeError(self._loop.faults[0])


def _serve_adapters(replica: SharedProxy, adapters: Sequence[str], slots: int) -> None:
    """Tells a proxy that all engines serve these adapters, and have none of them loaded."""
    for member in replica.fleet.members:
        replica.fleet.record_probe(member, True, frozenset(adapters) or None, None, None, None, adapters)
        if member.adapter_slots is not None:
            member.adapter_slots.forget(member.adapter_slots.loaded)
            correct_slots(member, AdapterMetrics(slots, frozenset()))


def _adapter(number: int) -> str:
    return f"adapter-{number}"


def _facts(leg: Leg) -> RequestFacts:
    blocks = np.array(leg.request.blocks, np.uint32)
    ids = np.repeat(blocks, BLOCK)[: leg.request.tokens]
    name = str(leg.number)
    # Arrays are what the index reads fastest; lists would only take longer.
    model = _adapter(leg.request.adapter) if leg.request.adapter else None
    return RequestFacts(name, name, model, 1, 1, ids, None, prompt_tokens=leg.request.tokens)  # pyright: ignore[reportArgumentType]
