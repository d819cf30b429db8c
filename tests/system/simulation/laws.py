"""Defines the laws that hold under all faults: while requests run, when they are over, and after the proxy's stop.

A law counts something as lost only after the time that its release may take.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvparams.instances import Role
from kvparams.routing.pairing import PairKey, pair_key
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.probes import Prober
from kvparams_proxy.fleet.queue_depth_reader import QueueDepthReader
from kvparams_proxy.queue.pending_reply import PendingReply
from kvparams_proxy.queue.queue_upstream import QueueUpstream
from kvparams_proxy.sidecar.inprocess import InProcessExchange, InProcessUpstream
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from tests.system.simulation import queue_laws
from tests.system.simulation.replaced import Lines
from tests.system.simulation.scenario import Client

if TYPE_CHECKING:
    from tests.system.simulation.world import World

__all__ = ["after_being_cut", "after_the_end", "at_rest", "between_turns", "unsettled", "while_running"]

_LONGEST_S = 30.0
"""More than all time-outs of a request together, but for a wait for a decode node behind a broker."""
_READING_S = 1.5
"""A little more than reading an engine's metrics may take."""
_SIDE_BY_SIDE = {
    "concurrent_legs": 2,
    "prefill_then_decode,decode_first=true": 2,
    "decode_local_prefill_remote": 2,
}
"""Engines on which one request counts at a time, where there may be several."""
_OURS = re.compile(r"\b(?:(?:Engine|Link|Leg|Client|Socket|World)\b|(?:Broker|Wire|_Pipe|Node)\.)")
"""What the simulated world still has to do: its engines, clients and broker."""
_TAKEN_S = 65.0
"""A little more than a client has to take the whole of its answer after its end."""


def while_running(world: "World") -> Iterator[str]:
    """At any moment."""
    scenario, members = world.scenario, list(world.resources.fleet.members)
    running = sum(one.in_flight for one in members)
    if running > (world.begun - world.ended) * _SIDE_BY_SIDE.get(scenario.mode, 1):
        yield f"{running} legs run for {world.begun - world.ended} requests"
    for member in members:
        if member.trial is not None and not member.breaker.trial:
            yield f"{member.instance.id} keeps the trial {member.trial}, which is over"
        if scenario.legs is not None and member.in_flight > scenario.legs and not _is_queue(member):
            yield f"{member.instance.id} has {member.in_flight} legs; it may have {scenario.legs}"
    for role, dispatcher in _inside(world.resources.fleet, "_roles").items():
        if not dispatcher.waiting_legs or _inside(dispatcher, "_slow").active or scenario.leg_tokens is not None:
            continue
        waiting = [ticket.item.paired_with for ticket in _inside(_inside(dispatcher, "_room"), "_queue").list_waiting()]
        able = [_able(members, role, beside) for beside in waiting]
        idle = sum(bool(them) and all(one.in_flight < (scenario.legs or 1) for one in them) for them in able)
        if idle:
            yield f"{idle} wait for {role}, where everybody has room"


def _able(members: list[Member], role: Role, beside: PairKey | Role | None) -> list[Member]:
    """The members that a leg may be given to: those that are least suspected, of those with a partner no more so."""
    for suspicion in range(3):
        usable = [one for one in members if one.is_usable(suspicion)]
        found = [one for one in usable if one.instance.role is role]
        keys = {each: {pair_key(one.instance) for one in usable if one.instance.role is each} for each in Role}
        if beside is not None:
            wanted = {beside} if isinstance(beside, PairKey) else keys[beside]
            found = [one for one in found if pair_key(one.instance) in wanted]
        if found or (not suspicion and isinstance(beside, PairKey) and keys[Role.PREFILL] & keys[Role.DECODE]):
            return found  # a request leaves for a pair that is well rather than use a suspect
    return []


def between_turns(world: "World") -> Iterator[str]:
    """At any moment at which no callback waits to be run."""
    yield from while_running(world)
    yield from queue_laws.between_turns(world)
    fleet, now = world.resources.fleet, world.now
    busy = _busy(world)
    running = sum(one.in_flight for one in fleet.members) + len(world.resources.kv_releaser)
    if running > busy and world.scenario.mode not in _SIDE_BY_SIDE:
        yield f"{running} exchanges are said to run, on {busy} connections"
    for role, dispatcher in _inside(fleet, "_roles").items():
        queue = _inside(_inside(dispatcher, "_room"), "_queue")
        for level in _inside(queue, "_levels").values():
            for length, flows in level.by_waiting.items():
                if any(flow.waiting != length for flow in flows.values()):
                    yield f"the lines for {role} are not as long as they are said to be"
        for ticket in queue.list_waiting():
            if not any(entry[3] is ticket.flow for entry in _inside(queue, "_lanes").get(ticket.lane, ())):
                yield f"somebody who waits for {role} stands in no line"
        deadline = queue.next_deadline()
        if deadline is not None and deadline < now:
            yield f"somebody waits for {role}, {now - deadline:.3f} s longer than allowed"
    for member, timer in _inside(_inside(fleet, "_breakers"), "_timers").items():
        if timer.cancelled() or timer.when() < now or member.has_left:
            yield f"the breaker of {member.instance.id} has a timer that is over"
    yield from _failing_pairs(fleet)
    limits = world.connections.limits
    if (open_ := len(_inside(world.connections, "_open"))) > min(limits.total, limits.per_address or limits.total):
        yield f"clients have {open_} connections, of {limits}"
    found_at, longest_s = 0.0, _LONGEST_S
    if world.nodes is not None:  # without a broker no answer ends; nobody knows of one that was lost with its queue
        found_at, longest_s = world.nodes.safety.well_at, _LONGEST_S + world.scenario.wait_s
    for since in world.running.values():
        if now - max(since, found_at) > longest_s:
            yield f"a request runs for {now - since:.0f} s"
    if not world.running and world.connections.tasks and now - world.ended_at > _TAKEN_S:
        yield f"{len(world.connections.tasks)} ASGI tasks run for no request"
    for engine in world.engines:
        behind = world.nodes is not None and engine is not world.local
        probe_s = 5.5 if behind else min(world.scenario.probe_s, 5.0) + 0.5
        for leg in engine.legs:
            if leg.kind == "probe" and now - leg.begun > probe_s:
                yield f"{engine.name} is probed for {now - leg.begun:.1f} s"
            if leg.kind == "reading" and now - leg.begun > _READING_S:
                yield f"{engine.name} is read for {now - leg.begun:.1f} s"
    for role, dispatcher in _inside(fleet, "_roles").items():
        for since in _inside(_inside(dispatcher, "_slow"), "_since").values():
            if now - since > 1.5 * world.scenario.slow_start_s:
                yield f"a {role} instance is said to start, for {now - since:.1f} s"


def _failing_pairs(fleet: Any) -> Iterator[str]:
    """Of pairs that fail only those are known whose instances are there."""
    blame, there = _inside(fleet, "_blame"), {member.instance for member in fleet.members}
    records = _inside(_inside(blame, "_pairs"), "_records")
    for decode, prefills in records.items():
        if not prefills or not there >= {decode, *prefills}:
            yield f"{decode.id} is said to fail with {[prefill.id for prefill in prefills]}, who are not all there"
    if blame.has_failures is not bool(records):
        yield f"{len(records)} decode instances fail, and that is not known"


def _is_queue(member: Any) -> bool:
    return member.instance.id == "queue"


def _busy(world: "World") -> int:
    """Connections that are being made or used; of what goes through a broker, what waits for an answer."""
    pools = _pools(world)
    ways = _inside(world.resources.pools, "_all").values()
    busy = sum(_waits(call) for app in ways if isinstance(app, InProcessUpstream) for call in _inside(app, "_calls"))
    busy += sum(len(_inside(way, "_running")) for way in ways if isinstance(way, QueueUpstream))
    busy += sum(len(_inside(pool, "_connecting")) for pool in pools)
    return busy + sum(one not in _inside(pool, "_idle") for pool in pools for one in _inside(pool, "_open"))


def _waits(exchange: Any) -> bool:
    """Whether somebody waits for its answer."""
    return (
        _inside(exchange, "_sink") is not None
        if isinstance(exchange, InProcessExchange | PendingReply)
        else exchange.is_wanted
    )


def _pools(world: "World") -> list[UpstreamConnectionPool]:
    return [
        pool for pool in _inside(world.resources.pools, "_all").values() if isinstance(pool, UpstreamConnectionPool)
    ]


def unsettled(world: "World") -> list[str]:
    """What is still going on, apart from probes."""
    resources = world.resources
    found = [
        f"{member.instance.id} has {member.in_flight} legs and {member.tokens} tokens"
        for member in resources.fleet.members
        if member.in_flight or member.tokens
    ]
    found += [
        f"{engine.name} runs a {leg.kind} leg of {leg.prompt}"
        for engine in world.engines
        for leg in engine.legs
        if leg.kind not in ("probe", "reading")
    ]
    if len(resources.kv_releaser):
        found.append(f"{len(resources.kv_releaser)} releases run")
    if world.begun != world.ended:
        found.append(f"{world.begun} requests have begun, {world.ended} have ended")
    return [*found, *queue_laws.unsettled(world)]


def at_rest(world: "World") -> Iterator[str]:
    """While the proxy runs, with nothing to do."""
    resources = world.resources
    fleet = resources.fleet
    for role, dispatcher in _inside(fleet, "_roles").items():
        queue = _inside(_inside(dispatcher, "_room"), "_queue")
        for name in ("_levels", "_priorities", "_tenants", "_live"):
            if left := _inside(queue, name):
                yield f"nobody waits for {role}, and the queue keeps {name}: {left!r}"
        if dispatcher.waiting_legs:
            yield f"{dispatcher.waiting_legs} wait for {role}"
    for name in ("_earlier", "_leaving"):
        if left := _inside(fleet, name):
            yield f"the fleet keeps {name}: {left!r}"
    for member in fleet.members:
        if member.trial is not None or member.breaker.trial:
            yield f"a trial leg of {member.instance.id} runs for ever"
    if resources.prefix_cache is not None:
        for name in ("_legs", "_coming"):
            if left := _inside(resources.prefix_cache, name):
                yield f"of prefill legs that are over {name} is kept: {left!r}"
        for member in fleet.members:
            if left := _inside(member.backlog, "_given"):
                yield f"{member.instance.id} is said to have work: {left!r}"
    if watched := _inside(resources.deadlines, "_deadlines"):
        yield f"{len(watched)} time-outs are watched"
    busy = _busy(world)
    probers = [listener for listener in _inside(fleet, "_listeners") if isinstance(listener, Prober)]
    probes = {member: probe for prober in probers for member, probe in _inside(prober, "_probes").items()}
    probing = sum(_inside(probe, "_exchange") is not None for probe in probes.values())
    readers = [listener for listener in _inside(fleet, "_listeners") if isinstance(listener, QueueDepthReader)]
    readings = [each for reader in readers for each in _inside(reader, "_readers").values()]
    probing += sum(_inside(each, "_exchange") is not None for each in readings)
    if busy > probing:
        yield f"{busy} connections are busy, {probing} for probes"
    for pool in _pools(world):
        if kept := set(_inside(pool, "_idle")) - set(_inside(pool, "_open")):
            yield f"{len(kept)} connections are kept that are closed"
    members = set(fleet.members)
    if probes.keys() != members or _inside(resources.pools, "_all").keys() != members:
        yield "those who are probed, those who have pools and those who are there are not the same"
    if gone := set(_inside(resources.pools, "_now")) - {member.instance.id for member in members}:
        yield f"there are pools for {gone}, who have left"
    for probe in probes.values():
        if (exchange := _inside(probe, "_exchange")) is not None and not _waits(exchange):
            yield "a probe keeps an exchange that is over"
    addresses = resources.engine_addresses
    if sorted(_inside(addresses, "_urls")) != sorted(member.instance.url for member in fleet.members):
        yield "the addresses that are hidden are not those of the engines"
    fresh = EngineAddresses([*_inside(addresses, "_urls"), *_inside(addresses, "_gone")])
    addresses.occur_in("")
    fresh.occur_in("")
    if _inside(addresses, "_pattern") != _inside(fresh, "_pattern"):
        yield "what is hidden is not what is known of the engines"
    resources.record_dispatcher.flush()
    if left := _inside(resources.metrics, "_live"):
        yield f"{len(left)} requests are still counted, in {Counter(life.state for life in left)}"
    allowed = world.scenario.reserve + 0.2 * world.begun
    if resources.metrics.retries > allowed:
        yield f"{resources.metrics.retries} further attempts, of {allowed:g}"
    yield from _kv(world)
    yield from _nothing_held(world)
    yield from queue_laws.at_rest(world)


def _nothing_held(world: "World") -> Iterator[str]:
    """Of requests that are over the proxy holds nothing; an ASGI task may wait for its client to take the answer."""
    if running := world.resources.running_executions:
        yield f"{len(running)} executions are said to run"
    if (held := world.bodies.held_bytes) and not world.connections.tasks:
        yield f"{held} bytes of bodies are held for nobody"


def after_being_cut(world: "World") -> Iterator[str]:
    """After the proxy has stopped while requests ran."""
    yield from _kv(world)
    if watched := _inside(world.resources.deadlines, "_deadlines"):
        yield f"{len(watched)} time-outs are watched"


def _kv(world: "World") -> Iterator[str]:
    """KV that the proxy was told of is fetched, given back, or known to be orphaned; stored pages also where prefill
    broke off before it had told: those of one transfer are the same ones, however often they are stored."""
    scenario = world.scenario
    if scenario.dialect in ("store", "store-meet"):  # its pages stay for others
        return
    told = scenario.dialect == "nixl"
    used = set[str]() if told else {held.transfer for held in world.held if held.claims}
    stranded = [
        held
        for held in world.held
        if (held.answered or not told) and held.state == "held" and not held.claims and held.transfer not in used
    ]
    orphaned = world.resources.kv_releaser.orphaned
    if len({held.transfer for held in stranded}) > orphaned:
        names = ", ".join(f"{held.key} of {held.prompt}" for held in stranded)
        yield f"KV is held for nobody: {names}; the proxy knows of {orphaned}"
    well = not world.troubles and not scenario.operations and scenario.connections > 8 and scenario.engine_idle_s > 1
    if orphaned and well and scenario.stop is None and scenario.lease_ms is None:
        yield f"{orphaned} transfers are orphaned although every engine is well"


def after_the_end(world: "World") -> Iterator[str]:
    """After the proxy has stopped."""
    yield from queue_laws.after_the_end(world)
    for task in asyncio.all_tasks(world.loop):
        yield f"a task is left: {task!r}"
    for socket in world.network.sockets:
        if not socket.gone:
            yield f"a connection is left open: {socket.protocol!r}"
    for left in world.loop.left():
        if not _OURS.search(left):
            yield f"a callback is left: {left}"
    yield from _nothing_held(world)
    if len(world.connections) or world.connections.tasks:
        yield "the server still counts connections or tasks"
    outcomes = sum(world.resources.metrics.outcomes.values())
    lines: Lines = _inside(_inside(world.resources.record_dispatcher, "_readers")[1], "_writer")
    logged = lines.text.count("\n")
    garbage = sum(client.script.garbage for client in world.clients)  # it is counted, but nothing is known to be logged
    garbage += sum(world.connections.refused_counts.values())
    if world.scenario.stop is not None:  # a head of which only a part had come is refused likewise
        garbage += sum(_is_sent_in_pieces(client.script) for client in world.clients)
    if counted := _inside(world.connections, "_by_address"):
        yield f"connections are counted by address: {counted}"
    requests = world.begun + world.refused
    if not requests == logged <= outcomes <= logged + garbage or not lines.closed:
        begun = f"{world.begun} requests have begun, {world.refused} are refused before"
        yield f"{begun}, {outcomes} outcomes are counted, {logged} logged, {lines.closed}"


def _is_sent_in_pieces(script: Client) -> bool:
    return script.pieces > 1 or (script.leave is not None and script.leave.body is not None)


def _inside(thing: object, name: str) -> Any:
    return getattr(thing, name)
