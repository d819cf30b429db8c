"""Defines the laws that hold with a broker, beside `laws.py`: nothing is left in it, and nodes agree with it.

As in `laws.py`, nothing counts as lost before the time that its release may take.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tests.system.simulation.broker import Queue
from tests.system.simulation.nodes import Node, Nodes

if TYPE_CHECKING:
    from tests.system.simulation.world import World

__all__ = ["after_the_end", "at_rest", "between_turns", "unsettled"]


def between_turns(world: "World") -> Iterator[str]:
    """At any moment at which no callback waits to be run."""
    nodes = world.nodes
    if nodes is None:
        return
    for queue in nodes.broker.queues.values():
        for channel in {reader.channel for reader in queue.readers}:
            if sum(reader.channel is channel for reader in queue.readers) > 1:
                yield f"{channel.who} reads {queue.name} twice"
    for node in nodes.all:
        consumer = node.consumer
        if consumer is not None and consumer.running_count > consumer.capacity * _AT_A_TIME:
            yield f"{node.who} runs {consumer.running_count} pieces of work, with room for {consumer.capacity}"


_AT_A_TIME = 2
"""Work that came before a node changed its mind is not counted against what it may have from then on."""


def unsettled(world: "World") -> Iterator[str]:
    """What is still going on between the nodes and the broker."""
    nodes = world.nodes
    if nodes is None:
        return
    if nodes.safety.is_troubled or world.now < world.quiet_at:
        yield "something was wrong between the nodes and the broker"
    for queue in nodes.broker.queues.values():
        if queue.name.endswith(".dead"):
            continue
        if len(queue) or queue.unacked:
            yield f"in {_kind(queue)} {len(queue)} messages wait, and {queue.unacked} are not acknowledged"
    if nodes.upstream.open_connections != 1:
        yield "the proxy has no broker"
    if letters := len(_inside(nodes.upstream, "_outbox")):
        yield f"the proxy keeps {letters} letters"
    for node in nodes.all:
        yield from _busy(node)


def _busy(node: Node) -> Iterator[str]:
    if node.ending:
        yield f"{node.who} ends"
    consumer = node.consumer
    if consumer is None:
        yield f"there is no node beside {node.engine.name}"
        return
    if not consumer.connected:
        yield f"{node.who} has no broker"
    if consumer.running_count:
        yield f"{node.who} runs {consumer.running_count} pieces of work"
    if letters := len(_inside(consumer, "_outbox")):
        yield f"{node.who} keeps {letters} letters"


def at_rest(world: "World") -> Iterator[str]:
    """While all nodes run, with nothing to do."""
    nodes = world.nodes
    if nodes is None:
        return
    yield from _connections(nodes)
    upstream = nodes.upstream
    if (waits := len(_inside(upstream, "_running"))) > 1:  # a probe may be on its way
        yield f"the proxy waits for {waits} answers"
    yield from _outbox("the proxy", _inside(upstream, "_outbox"))
    for node in nodes.all:
        consumer: Any = node.consumer
        if watched := _inside(_inside(consumer, "_watch"), "_deadlines"):
            yield f"{node.who} watches {len(watched)} time-outs"
        yield from _outbox(node.who, _inside(consumer, "_outbox"))
        pool: Any = node.pool
        busy = len(_inside(pool, "_connecting")) + len(set(_inside(pool, "_open")) - set(_inside(pool, "_idle")))
        if busy > 1:  # a probe
            yield f"{node.who} has {busy} busy connections"
        yield from _appetite(nodes, node)


def _connections(nodes: Nodes) -> Iterator[str]:
    there = sorted(wire.who for wire in nodes.port.open)
    if there != sorted(["prefill", *(node.who for node in nodes.all)]):
        yield f"the broker has connections of {there}"


def _outbox(who: str, outbox: Any) -> Iterator[str]:
    for name in ("_letters", "_bytes", "_flying", "_gathered"):
        if left := _inside(outbox, name):
            yield f"the outbox of {who} keeps {name}: {left!r}"


def _appetite(nodes: Nodes, node: Node) -> Iterator[str]:
    """What the broker may send is what the node believes, and what it wants, unless that is on its way."""
    appetite: Any = _inside(node.consumer, "_appetite")
    asked, wanted = _inside(appetite, "_asked"), _inside(appetite, "_wanted")
    work = nodes.broker.queues.get("sim.work")
    readers = [reader for reader in work.readers if reader.channel.who == node.who] if work is not None else []
    sent = [reader.prefetch for reader in readers]
    channel = _inside(appetite, "_channel")
    changes = channel is not None and _inside(channel, "_lock").locked()
    if not changes and asked == wanted and sent != ([asked] if asked else []):
        yield f"{node.who} has asked for {asked}, and the broker sends {sent}"


def after_the_end(world: "World") -> Iterator[str]:
    """After all nodes have stopped."""
    nodes = world.nodes
    if nodes is None:
        return
    for wire in nodes.port.open:
        yield f"the broker keeps a connection of {wire.who}"
    for queue in nodes.broker.queues.values():
        if queue.readers or queue.unacked or queue.owner is not None:
            yield f"the broker keeps {queue.name} for somebody"


def _kind(queue: Queue) -> str:
    return ".".join(queue.name.split(".")[:2])


def _inside(thing: object, name: str) -> Any:
    return getattr(thing, name)
