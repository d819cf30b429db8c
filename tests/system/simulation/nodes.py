"""Simulates decode nodes between the broker and their engines, in place of processes: started, killed, shut down.

All of `kvparams_proxy.queue` runs as it is. A killed node is cut off from the broker and its engine in that moment; its
later steps in its own memory have no effect outside.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from kvparams_proxy.queue.consumer import WorkConsumer
from kvparams_proxy.queue.queue_upstream import QueueUpstream
from kvparams_proxy.secret import Secret
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.types import UpstreamLimits
from tests.system.simulation.broker import Broker
from tests.system.simulation.engines import Engine
from tests.system.simulation.safety import Safety
from tests.system.simulation.scenario import Operation
from tests.system.simulation.wire import Port

if TYPE_CHECKING:
    from tests.system.simulation.world import World

__all__ = ["POOL", "PREFILL", "Node", "Nodes"]

PREFILL = "amqp://prefill"
"""How the proxy calls the broker."""
POOL = "sim"


class Node:
    """One decode node beside one engine, through all its lives."""

    def __init__(self, world: "World", port: Port, engine: Engine) -> None:
        self._world = world
        self._port = port
        self.engine = engine
        self._lives = 0
        self._ending: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        """What became of the work of the lives that are over."""
        self.consumer: WorkConsumer | None = None
        """None while there is none."""
        self.pool: UpstreamConnectionPool
        self.begin()

    @property
    def who(self) -> str:
        """This life of it."""
        return f"{self.engine.name}-{self._lives}"

    def begin(self) -> None:
        """A process is started."""
        world, engine = self._world, self.engine
        scenario, queue = world.scenario, world.scenario.queue
        if self.consumer is not None or world.stopping:
            return
        self._lives += 1
        limits = UpstreamLimits(connections=scenario.connections, connect_s=0.5, idle_s=scenario.idle_s)
        self.pool = UpstreamConnectionPool(f"http://{engine.host}:{engine.port}", limits)
        self.consumer = WorkConsumer(
            Secret(f"amqp://{self.who}"),
            self.pool,
            name=POOL,
            room=queue.room,
            silence_s=queue.silence_s,
            probe_s=scenario.probe_s,
            leave_s=queue.leave_s,
        )

    def kill(self, for_s: float) -> None:
        """At once; another process is started in `for_s` seconds."""
        if self.consumer is not None:
            self._port.end(self.who)
            self.pool.close()
            self._end(self.consumer)
            self._world.loop.call_later(for_s, self.begin)

    def leave(self, for_s: float) -> None:
        """In good order."""
        if self.consumer is not None:
            self._end(self.consumer)
            self._world.loop.call_later(for_s, self.begin)

    def cut(self) -> None:
        """It loses its connection."""
        self._port.cut(self.who)

    def _end(self, consumer: WorkConsumer) -> None:
        self.consumer = None
        task = self._world.loop.create_task(self._ended(consumer, self.pool))
        self._ending.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: "asyncio.Task[None]") -> None:
        self._ending.discard(task)
        if task.cancelled() or task.exception() is not None:
            self._world.wrong(f"a node does not end as it should: {task!r}")

    async def _ended(self, consumer: WorkConsumer, pool: UpstreamConnectionPool) -> None:
        await consumer.__aexit__(None, None, None)
        pool.close()
        self.counts.update(consumer.counts)

    async def close(self) -> None:
        """For good."""
        if self.consumer is not None:
            self._end(self.consumer)
        if self._ending:
            await asyncio.wait(list(self._ending))

    @property
    def ending(self) -> int:
        """Lives that are not over."""
        return len(self._ending)


class Nodes:
    """All decode nodes, and the broker."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.safety = Safety(world)
        self.broker = Broker(world.loop, self.safety)
        self.broker.longest = world.scenario.queue.longest
        self.port = Port(self.broker, self)
        world.loop.broker = self.port
        self.all: list[Node] = []

    def begin(self) -> None:
        """The nodes are started."""
        engines = [engine for engine in self._world.engines if engine is not self._world.local]
        self.all = [Node(self._world, self.port, engine) for engine in engines]

    async def close(self) -> None:
        """All of them leave."""
        for node in self.all:
            await node.close()

    @property
    def counts(self) -> Mapping[str, int]:
        """What became of work and of messages."""
        found = Counter(self.safety.counts)
        for node in self.all:
            found.update({f"work {what}": many for what, many in node.counts.items()})
        return found

    @property
    def upstream(self) -> QueueUpstream:
        """The proxy's way to them."""
        pools = self._world.resources.pools
        return cast("QueueUpstream", pools["queue"])

    def operate(self, operation: Operation) -> None:
        """What an operator or fate does to the node beside an engine, or to the broker."""
        node = next(node for node in self.all if node.engine is self._world.engines[operation.engine])
        what = operation.what
        if what not in ("restart", "freeze", "garbage"):
            self.safety.troubled(operation.for_s)
        if what == "kill":
            node.kill(operation.for_s)
        elif what == "leave":
            node.leave(operation.for_s)
        elif what == "cut":
            node.cut()
        elif what == "sever":
            self.port.cut("prefill")
        elif what == "broker":
            self.port.restart(operation.for_s)
        elif what == "garbage":
            self.broker.put(f"{POOL}.work", b'{"queue":1,"kind":"nothing"}\n')

    # as `wire.Faults`

    def delay(self) -> float:
        """See `Faults.delay`."""
        return self._world.delay()

    def trouble(self, who: str, where: str, kinds: tuple[str, ...]) -> str | None:
        """See `Faults.trouble`."""
        fault = self._world.fault(who, where, kinds, self._world.scenario.queue.rate)
        if fault is not None:
            self.safety.troubled(14.0 if fault == "stall" else 2.0)
        return fault

    def choice(self, among: tuple[float, ...]) -> float:
        """See `Faults.choice`."""
        return self._world.random.choice(among)
