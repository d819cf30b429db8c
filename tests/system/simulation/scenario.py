"""Draws the run of one seed: engines, requests, clients, operators, and the rate of faults.

Every draw is made here or from `World.random`, in the order of events, so a seed determines a run.
"""

from collections.abc import Mapping
from random import Random
from typing import Literal, NamedTuple, cast

from kvparams.instances import Role
from kvparams.routing.managers.local_remote import LOCAL_MANAGERS

__all__ = ["MODES", "QUEUED", "SPLIT", "Ask", "Client", "Leave", "Operation", "Queue", "Scenario", "Stop", "draw"]

_KINDS = {
    "calm": 1,
    "clients": 3,
    "full": 2,
    "engines": 4,
    "all": 6,
    "crowd": 2,
    "trials": 2,
    "removal": 1,
    "turned away": 3,
}
"""What goes wrong in a run, and how often: nothing, clients, limits, engines, everything; and four that are rare."""
QUEUED = "queue_mediated"
"""Through a broker."""
SPLIT = {
    "prefill_then_decode": 14,
    "prefill_then_decode,decode_first=true": 2,
    "concurrent_legs": 4,
    "conditional,remote_tokens=0": 1,
}
"""How a proxy before all engines splits requests, and how often."""
MODES = SPLIT | {
    "conditional,remote_tokens=20,fallback=true": 2,
    "aggregated": 2,
    "prefill_local_decode_remote": 2,
    "decode_local_prefill_remote": 2,
    QUEUED: 3,
}
"""All ways to coordinate."""
Point = Literal["received", "computed", "fetched", "answer", "chunk", "end"]


class Ask(NamedTuple):
    """One request."""

    prompt: str
    """Nobody else's, up to its semicolon."""
    chat: bool
    stream: bool
    tokens: int
    usage: bool
    as_ids: bool
    """The prompt comes as token ids."""
    own_id: bool
    """It names itself by X-Request-Id."""
    way: Literal["direct", "asgi", "invalid", "health", "models", "metrics"]
    tenant: str
    priority: int


class Leave(NamedTuple):
    """How a client leaves; of all that is set, what comes first."""

    after_s: float | None = None
    point: tuple[str, Point, int] | None = None
    """At the n-th time that this happens in a leg of the role."""
    when: Literal["before", "after", "soon"] = "before"
    """In the turn in which it happens, before or after; or in the next."""
    anyones: bool = False
    """It need not be a leg of its own request: when others make room, say."""
    reply: int | None = None
    """At its n-th piece of answer."""
    body: float | None = None
    """After this part of its first request."""
    reset: bool = False


class Client(NamedTuple):
    """One connection to the proxy."""

    begins_s: float
    asks: tuple[Ask, ...]
    pipelined: bool
    pieces: int
    """In how many its requests are sent."""
    leave: Leave | None
    slow: tuple[int, float | None] | None
    """After so many pieces of answer it takes nothing for so long, or for ever."""
    high_water: int
    garbage: bool
    """Behind its first request comes what is no HTTP."""
    closes: int | None
    """With this one of its requests it asks for the connection to be closed."""


class Operation(NamedTuple):
    """What an operator or fate does to an engine."""

    at_s: float | None
    """None: when the first client leaves; to the engine to which the last connection was begun."""
    what: Literal[
        "drain", "undrain", "remove", "add", "replace", "swap", "restart", "freeze",
        "kill", "leave", "cut", "sever", "broker", "garbage",
    ]  # fmt: skip
    """The last six: a decode node is killed, shut down, or loses its connection; the proxy loses its own; the broker
    is restarted; somebody puts into the queue what is no work."""
    engine: int
    for_s: float


class Queue(NamedTuple):
    """What is so only with a broker."""

    room: int
    """Of each decode node."""
    rate: float
    """How likely a fault is each time that something is sent to the broker."""
    silence_s: float
    """The longest silence of an engine, for its decode node."""
    leave_s: float
    """For what runs on a node that is shut down."""
    longest: int | None
    """What the broker takes at most."""


class Stop(NamedTuple):
    """The proxy is told to stop while its clients are there."""

    at_s: float
    drain_delay_s: float
    grace_s: float
    again_s: float | None
    """How long after that it is told a second time, which ends what still runs."""


class Scenario(NamedTuple):
    """One run."""

    seed: int
    mode: str
    """How prefill and decode are coordinated."""
    inside: bool
    """Whether the engine that the proxy is beside runs in its process."""
    policy: str
    dialect: str
    prefills: int
    decodes: int
    grouped: bool
    """Whether every second engine is of one group, and the others of another."""
    retries: int
    reserve: int
    """Of the budget of retries."""
    continues: bool
    prefill_timeout_s: float
    decode_timeout_s: float
    client_timeout_s: float
    probe_s: float
    legs: int | None
    """The limit of each instance."""
    leg_tokens: int | None
    """The same in tokens."""
    waiting: int
    per_tenant: int | None
    wait_s: float
    consecutive: int
    slow_start_s: float
    connections: int
    idle_s: float
    engine_idle_s: float
    """After which engines close idle connections."""
    doubts: bool
    """While an engine is on trial it answers no probe, and its leg slowly."""
    turns_away: float
    """How likely a decode engine, though it is there, turns a leg away: before it fetches the KV, or after."""
    rate: float
    """How likely a fault is at each point."""
    reports_cached: bool
    fails_without_kv: bool
    lease_ms: int | None
    queue: Queue
    clients: tuple[Client, ...]
    operations: tuple[Operation, ...]
    stop: Stop | None = None
    """None: the proxy stops when everything is over."""
    clients_at_once: int | None = None
    """How many connections clients may have; None for more than there ever are."""
    one_address: bool = False
    """Whether that is the limit of one address, from which all of them come."""

    @property
    def calm(self) -> bool:
        """Whether every answer must be the whole one."""
        return (
            not self.rate
            and not self.turns_away
            and not self.operations
            and not self.stop
            and not self.clients_at_once
            and self.legs is None
            and self.connections > 8
        )

    @property
    def beside(self) -> Role | None:
        """The role of the one engine that the proxy is beside."""
        if self.queued:
            return Role.PREFILL
        return next((role for role, mode in LOCAL_MANAGERS.items() if mode == self.mode), None)

    @property
    def queued(self) -> bool:
        """Whether there is a broker."""
        return self.mode == QUEUED

    @property
    def alone(self) -> frozenset[Role]:
        """The roles whose engines may answer without another one."""
        name = self.mode.partition(",")[0]
        if self.queued:
            return frozenset((Role.DECODE,))
        if name == "conditional":
            return frozenset((Role.PREFILL, Role.DECODE))
        return frozenset((Role.AGGREGATED,)) if name == "aggregated" else frozenset()


def draw(seed: int, modes: Mapping[str, int] = MODES) -> Scenario:
    """The scenario of a seed, in one of these modes."""
    drawn = _drawn(seed)
    random = Random(f"mode {seed}")
    drawn = drawn._replace(mode=random.choices(tuple(modes), tuple(modes.values()))[0])
    if drawn.mode in SPLIT and min(drawn.prefills, drawn.decodes) > 1:
        drawn = drawn._replace(grouped=Random(f"groups {seed}").random() < 0.6)
    if drawn.mode == "concurrent_legs":
        return drawn._replace(dialect="store-meet")
    if drawn.mode == "aggregated":
        return _aggregated(drawn)
    if drawn.queued:
        return _queued(random, _beside(random, drawn, Role.PREFILL))
    if drawn.beside is None:
        drawn = drawn._replace(stop=_stop(Random(f"stop {seed}")))
        room = Random(f"room {seed}")
        if drawn.stop is None and room.random() < 0.05:
            return drawn._replace(clients_at_once=room.choice((1, 2, 3)), one_address=room.random() < 0.3)
        return drawn
    return _beside(random, drawn, drawn.beside)


def _stop(random: Random) -> Stop | None:
    if random.random() >= 0.1:
        return None
    again_s = random.choice((None, None, random.random() * 0.1))
    return Stop(random.random() * 0.3, random.choice((0.0, 0.1)), random.choice((0.0, 0.05, 1.0, 120.0)), again_s)


def _aggregated(drawn: Scenario) -> Scenario:
    """No engine prefills: who would leave then leaves elsewhere."""
    clients: list[Client] = []
    for client in drawn.clients:
        leave = client.leave
        if leave is not None and leave.point is not None:
            _, point, count = leave.point
            leave = leave._replace(point=("decode", "fetched" if point == "computed" else point, count))
        clients.append(client._replace(leave=leave))
    return drawn._replace(
        clients=tuple(clients), operations=_of_one_role(drawn.operations, drawn.prefills + drawn.decodes)
    )


def _of_one_role(operations: tuple[Operation, ...], engines: int) -> tuple[Operation, ...]:
    """Nobody of another role takes an engine's name."""
    return tuple(
        one._replace(what="replace" if one.what == "swap" else one.what, engine=min(one.engine, engines - 1))
        for one in operations
    )


def _beside(random: Random, drawn: Scenario, role: Role) -> Scenario:
    """There is one engine of that role."""
    prefills = 1 if role is Role.PREFILL else drawn.prefills
    decodes = 1 if role is Role.DECODE else drawn.decodes
    operations = _of_one_role(drawn.operations, prefills + decodes)
    return drawn._replace(prefills=prefills, decodes=decodes, operations=operations, inside=random.random() < 0.5)


def _queued(random: Random, drawn: Scenario) -> Scenario:
    """Decode engines are behind a broker; limits are those of their nodes."""
    troubled = drawn.rate > 0
    operations = tuple(_of_node(random, one) if one.engine else one for one in drawn.operations)
    wait_s = random.choice((0.3, 2.0, 5.0)) if drawn.wait_s < 60.0 or troubled else 60.0
    queue = Queue(
        room=drawn.legs or 16,
        rate=random.choice((0.0, 0.003, 0.01, 0.03)) if troubled else 0.0,
        silence_s=random.choice((drawn.decode_timeout_s, 5.0)),
        leave_s=random.choice((0.05, 1.0)),
        longest=random.choice((400, 700, 1000)) if troubled and random.random() < 0.1 else None,
    )
    drawn = drawn._replace(
        dialect=random.choice(("store", "store-drop")),
        decode_timeout_s=random.choice((drawn.decode_timeout_s, 5.0)),
        consecutive=random.choice((drawn.consecutive, 1)),
        wait_s=wait_s,
        operations=operations,
        queue=queue,
    )
    return _patient(random, drawn) if troubled and random.random() < 0.5 else drawn


def _of_node(random: Random, operation: Operation) -> Operation:
    """Where an operator would change the fleet, something becomes of a decode node or of the broker."""
    if operation.what in ("restart", "freeze"):
        return operation
    what: tuple[Literal["kill", "leave", "cut", "sever", "broker", "garbage"], ...] = (
        "kill",
        "kill",
        "leave",
        "cut",
        "sever",
        "broker",
        "garbage",
    )
    return operation._replace(what=random.choice(what))


def _patient(random: Random, drawn: Scenario) -> Scenario:
    """All engines are well, and no time-out ends what the nodes and the broker must; some clients are slow."""
    clients = tuple(_slow(random, client) if random.random() < 0.3 else client for client in drawn.clients)
    operations = tuple(
        _of_node(random, Operation(random.random() * 0.6, "drain", 1 + random.randrange(drawn.decodes), for_s))
        for for_s in random.sample((0.05, 0.3, 1.5), 2)
    )
    return drawn._replace(
        rate=0.0,
        turns_away=0.0,
        doubts=False,
        lease_ms=None,
        client_timeout_s=2.0,
        prefill_timeout_s=600.0,
        decode_timeout_s=600.0,
        wait_s=60.0,
        retries=3,
        clients=clients,
        operations=operations,
        queue=drawn.queue._replace(silence_s=600.0),
    )


def _slow(random: Random, client: Client) -> Client:
    """It takes nothing for a while, in the middle of a stream."""
    asks = tuple(ask._replace(stream=True, tokens=15, way="direct") for ask in client.asks)
    slow = random.choice((1, 2)), random.choice((0.2, 0.5))
    return client._replace(asks=asks, leave=None, slow=slow, high_water=0, garbage=False, closes=None)


def _drawn(seed: int) -> Scenario:
    random = Random(seed)
    kind = random.choices(tuple(_KINDS), tuple(_KINDS.values()))[0]
    if kind == "crowd":
        return _crowd(random, _draw(random, seed, "full"))
    if kind == "trials":
        return _trials(random, _draw(random, seed, "all"))
    if kind == "removal":
        return _removal(random, _draw(random, seed, "clients"))
    if kind == "turned away":
        return _turned_away(random, _draw(random, seed, "full"))
    return _draw(random, seed, kind)


def _crowd(random: Random, drawn: Scenario) -> Scenario:
    """Many wait, and some leave just when it is their turn."""
    clients: list[Client] = []
    for number in range(6):
        leave: Leave | None = None
        if random.random() < 0.4:
            leave = Leave(after_s=random.random() * 0.05)
        elif random.random() < 0.5:
            point = random.choice(("prefill", "decode")), cast("Point", "answer"), random.choice((1, 2, 3))
            leave = Leave(point=point, when=random.choice(("before", "after")), anyones=True)
        client = _client(random, drawn.seed, number, restless=False)
        clients.append(client._replace(begins_s=random.random() * 0.02, leave=leave))
    waiting, wait_s = random.choice((1, 2, 2, 8)), random.choice((0.05, 0.3))
    return drawn._replace(
        prefills=1, decodes=1, legs=1, leg_tokens=None, waiting=waiting, wait_s=wait_s, clients=tuple(clients)
    )


def _trials(random: Random, drawn: Scenario) -> Scenario:
    """An engine fails and comes back, again and again; some leave while it is on trial, or it is taken away."""
    clients: list[Client] = []
    for number in range(5):
        leave = Leave(point=("decode", "chunk", random.choice((1, 2)))) if random.random() < 0.4 else None
        client = _client(random, drawn.seed, number, restless=False)
        clients.append(client._replace(begins_s=random.random() * 1.5, leave=leave))
    what: tuple[Literal["freeze", "restart", "remove"], ...] = ("freeze", "freeze", "restart", "remove")
    operations = tuple(
        Operation(random.random() * 1.5, random.choice(what), drawn.prefills, random.choice((0.3, 0.6)))
        for _ in range(4)
    )
    return drawn._replace(
        decodes=1,
        consecutive=1,
        decode_timeout_s=1.0,
        probe_s=0.2,
        doubts=random.random() < 0.5,
        rate=random.choice((0.03, 0.1, 0.3)),
        clients=tuple(clients),
        operations=operations,
    )


def _removal(random: Random, drawn: Scenario) -> Scenario:
    """An engine is taken away just when it is to give back KV."""
    clients = tuple(
        _client(random, drawn.seed, number, restless=False)._replace(
            begins_s=0.1 * (1 + number), leave=Leave(point=("prefill", "answer", 1), when="after")
        )
        for number in range(2)
    )
    operation = Operation(None, random.choice(("remove", "replace")), 0, 0.3)
    return drawn._replace(idle_s=0.05, probe_s=30.0, clients=clients, operations=(operation,))


def _turned_away(random: Random, drawn: Scenario) -> Scenario:
    """Decode engines turn legs away, and have little room: who prefills again waits, and may leave meanwhile."""
    clients: list[Client] = []
    for number in range(random.choice((3, 5))):
        leave: Leave | None = None
        client = _client(random, drawn.seed, number, restless=False)
        draw = random.random()
        if draw < 0.5:
            leave = Leave(point=("prefill", "answer", 2), when=random.choice(("after", "after", "soon")))
            client = client._replace(asks=client.asks[:1], pipelined=False, closes=None)
        elif draw < 0.6:
            leave = Leave(after_s=random.random() * 0.5)
        clients.append(client._replace(begins_s=random.random() * 0.1, leave=leave))
    return drawn._replace(
        dialect=random.choice(("nixl", "nixl", "nixl", "store-drop")),
        prefills=random.choice((1, 2)),
        decodes=2,
        retries=random.choice((1, 2, 3)),
        legs=1,
        leg_tokens=None,
        waiting=8,
        per_tenant=None,
        wait_s=random.choice((0.05, 0.3, 2.0, 2.0)),
        consecutive=5,
        lease_ms=random.choice((None, None, None, 50)),
        turns_away=random.choice((0.3, 0.6)),
        rate=random.choice((0.0, 0.0, 0.02)),
        clients=tuple(clients),
    )


def _draw(random: Random, seed: int, kind: str) -> Scenario:
    rnd = random.random
    troubled = kind in ("engines", "all")
    limited = kind == "full" or (kind == "all" and rnd() < 0.5)
    clients = tuple(
        _client(random, seed, number, kind in ("clients", "all") or (kind == "full" and rnd() < 0.5))
        for number in range(random.choice((1, 1, 2, 2, 3, 4)) + (random.choice((0, 2, 4)) if limited else 0))
    )
    prefills, decodes = random.choice((1, 1, 2, 3)), random.choice((1, 1, 2, 3))
    operations: tuple[Operation, ...] = ()
    if kind == "all" and rnd() < 0.6:
        operations = tuple(_operation(random, prefills + decodes) for _ in range(random.choice((1, 2, 4))))
    return Scenario(
        seed=seed,
        mode="prefill_then_decode",
        inside=False,
        policy="round_robin" if seed % 4 else "cache_aware",
        dialect=random.choice(("nixl", "nixl", "nixl", "store", "store-drop")),
        prefills=prefills,
        decodes=decodes,
        grouped=False,
        retries=random.choice((0, 1, 2, 3)),
        reserve=random.choice((200, 200, 200, 1, 2)) if troubled else 200,
        continues=rnd() < 0.5,
        prefill_timeout_s=random.choice((0.4, 1.0)),
        decode_timeout_s=random.choice((0.4, 1.0)),
        client_timeout_s=random.choice((0.3, 1.0)),
        probe_s=random.choice((0.2, 1.0, 30.0)),
        legs=random.choice((1, 1, 2)) if limited else None,
        leg_tokens=random.choice((None, None, 5)) if limited else None,
        waiting=random.choice((0, 1, 2, 8)) if limited else 1024,
        per_tenant=random.choice((None, None, 1)) if limited else None,
        wait_s=random.choice((0.05, 0.3, 2.0)) if limited else 60.0,
        consecutive=random.choice((1, 2, 5)),
        slow_start_s=random.choice((0.0, 0.0, 1.0)),
        connections=random.choice((1, 2, 3)) if kind == "all" and rnd() < 0.2 else 2048,
        idle_s=random.choice((0.05, 30.0, 30.0)),
        engine_idle_s=random.choice((0.01, 0.1, 60.0, 60.0)) if troubled else 60.0,
        doubts=False,
        turns_away=0.0,
        rate=random.choice((0.01, 0.03, 0.03, 0.1)) if troubled else 0.0,
        reports_cached=rnd() < 0.8,
        fails_without_kv=rnd() < 0.5,
        lease_ms=random.choice((1, 20, 200)) if (troubled or limited) and rnd() < 0.3 else None,
        queue=Queue(16, 0.0, 5.0, 1.0, None),
        clients=clients,
        operations=operations,
    )


def _client(random: Random, seed: int, number: int, restless: bool) -> Client:
    rnd = random.random
    asks = tuple(_ask(random, f"s{seed}c{number}r{turn};") for turn in range(random.choice((1, 1, 1, 2, 3))))
    leave = _leave(random) if restless and rnd() < 0.6 else None
    pipelined = len(asks) > 1 and rnd() < 0.3
    slow = None
    if restless and rnd() < 0.2:
        slow = random.randrange(4), random.choice((0.05, 0.2, 0.2, None))
    garbage = restless and not pipelined and slow is None and rnd() < 0.05
    return Client(
        begins_s=random.choice((0.0, 0.0, rnd() * 0.05, rnd() * 0.5)),
        asks=asks,
        pipelined=pipelined,
        pieces=random.choice((1, 1, 1, 2, 4)),
        leave=leave,
        slow=slow,
        high_water=random.choice((0, 100, 65536)) if slow is not None else 65536,
        garbage=garbage,
        closes=random.randrange(len(asks)) if not garbage and rnd() < 0.15 else None,
    )


def _ask(random: Random, name: str) -> Ask:
    rnd = random.random
    chat = rnd() < 0.3
    stream = rnd() < 0.6
    return Ask(
        prompt=name,
        chat=chat,
        stream=stream,
        tokens=random.choice((1, 2, 4, 7, 7, 15)),
        usage=rnd() < 0.5,
        as_ids=not chat and rnd() < 0.2,
        own_id=rnd() < 0.5,
        way=random.choices(("direct", "asgi", "invalid", "health", "models", "metrics"), (76, 16, 2, 1, 1, 1))[0],
        tenant=random.choice("aab"),
        priority=random.choice((0, 0, 0, 1)),
    )


def _leave(random: Random) -> Leave:
    reset = random.random() < 0.5
    kind = random.randrange(8)
    if kind == 0:
        return Leave(after_s=random.random() * 0.15, reset=reset)
    if kind == 1:
        return Leave(reply=random.randrange(1, 5), reset=reset)
    if kind == 2:
        return Leave(body=random.random(), reset=reset)
    if kind == 3:  # KV is held for it, and nobody has come for it yet
        return Leave(point=("prefill", "answer", 1), when="after", reset=reset)
    role = random.choice(("prefill", "decode"))
    if kind == 4:  # somebody has just made room
        return Leave(point=(role, "answer", random.choice((1, 2, 3))), when="after", anyones=True, reset=reset)
    points: tuple[Point, ...] = ("received", "computed", "answer", "end")
    if role == "decode":
        points = ("received", "fetched", "answer", "chunk", "end")
    when: tuple[Literal["before", "after", "soon"], ...] = ("before", "after", "soon")
    return Leave(
        point=(role, random.choice(points), random.choice((1, 1, 1, 2))),
        when=random.choice(when),
        anyones=random.random() < 0.4,
        reset=reset,
    )


def _operation(random: Random, engines: int) -> Operation:
    at_s = random.choice((None, random.random() * 0.1, random.random() * 0.1, random.random() * 0.6))
    if at_s is None:
        what = random.choice(("remove", "replace"))
    else:
        what = random.choice(("drain", "undrain", "remove", "add", "replace", "swap", "restart", "restart", "freeze"))
    return Operation(at_s, what, random.randrange(engines), random.choice((0.05, 0.3, 1.5)))
