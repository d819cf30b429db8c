"""Runs the proxy between simulated clients and engines on a virtual clock, and checks the laws at the end.

All of the proxy's own code runs; only sockets, the clock and the randomness of ids are replaced.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, TypeVar, cast

from kvparams.instances import Instance, Role
from kvparams.routing.admission import QueueLimits, RoleLimits
from kvparams.routing.breaker import BreakerLimits
from kvparams_proxy.cli.queue_sidecar import queue_instance, queue_upstream_factory
from kvparams_proxy.config.mode_parsing import parse_mode_flag
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.requests.authentication import AuthenticatedClient as KnownClient
from kvparams_proxy.requests.authentication import tenant_cache_salt
from kvparams_proxy.requests.body import BodyBudget
from kvparams_proxy.secret import Secret
from kvparams_proxy.server import app as proxy_app
from kvparams_proxy.server.admission import Admission
from kvparams_proxy.server.connections import ClientConnections, ConnectionLimits
from kvparams_proxy.server.direct_path import DIRECT_ENDPOINTS_KEY
from kvparams_proxy.server.http_protocol import HTTPProtocol
from kvparams_proxy.server.http_server import ProxyServer, ServerSettings
from kvparams_proxy.sidecar.inprocess import InProcessUpstream
from kvparams_proxy.upstream.interface import Upstream
from kvparams_proxy.upstream.types import UpstreamLimits
from tests.support.virtual_loop import Listener, Stuck, VirtualLoop
from tests.system.simulation import laws
from tests.system.simulation.answers import LOCAL
from tests.system.simulation.clients import Client
from tests.system.simulation.engines import Engine
from tests.system.simulation.inside import App
from tests.system.simulation.language import tokenize
from tests.system.simulation.legs import Held, Leg
from tests.system.simulation.network import Network, Socket
from tests.system.simulation.nodes import POOL, PREFILL, Nodes
from tests.system.simulation.replaced import Budget, Numbers
from tests.system.simulation.scenario import MODES, Operation, Scenario, Stop, draw

__all__ = ["Run", "World", "run"]

T = TypeVar("T")
_DELAYS = (0.0, 0.0, 0.0003, 0.002)
_PAUSES = (0.0, 0.0, 0.001, 0.001, 0.005, 0.02)
_LEAVING_S = 0.05
"""In that time an engine must have heard that a client has left."""
_LONGEST_S = 90.0
"""No run takes longer."""


class Run:
    """What became of one seed."""

    def __init__(
        self, scenario: Scenario, wrong: list[str], trace: list[tuple[float, str, str]], counts: dict[str, int]
    ):
        self.scenario = scenario
        self.wrong = wrong
        """What must not be, in words; empty if all is well."""
        self.trace = trace
        self.counts = counts

    def report(self) -> str:
        """To be read."""
        lines = [f"seed {self.scenario.seed}", *(f"WRONG: {one}" for one in self.wrong), repr(self.scenario), ""]
        lines += [f"{at:10.6f}  {who:12}  {what}" for at, who, what in self.trace]
        return "\n".join(lines)


class World:
    """One run."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.random = Random(scenario.seed ^ 0x5EED)
        self.loop = VirtualLoop()
        self.network = self.loop.network = Network(self.loop, self.delay)
        self.trace: list[tuple[float, str, str]] = []
        self.problems: list[str] = []
        self.troubles = 0
        """Faults so far."""
        self.held: list[Held] = []
        """All KV that was ever held."""
        self.after: list[Callable[[], None]] = []
        self.link_numbers = itertools.count(1)
        self.engines = [
            Engine(self, f"{role}-{number}", role, 1 + number + 100 * (role is Role.DECODE))
            for role, many in _fleet(scenario)
            for number in range(many)
        ]
        for engine in self.engines:
            self.network.servers[engine.port] = engine
        if scenario.queued:
            for engine in self.engines:
                engine.host = LOCAL if engine.role is Role.DECODE else engine.host
        self.local = next((engine for engine in self.engines if engine.role is scenario.beside), None)
        """The one that the proxy is beside."""
        self.nodes = Nodes(self) if scenario.queued else None
        """Those behind a broker, if there is one."""
        self.stopping = False
        self.quiet_at = 0.0
        """The last operation that has its time is over then."""
        self.clients = [Client(self, number, script) for number, script in enumerate(scenario.clients)]
        self.asks = {ask.prompt: ask for client in self.clients for ask in client.script.asks}
        self._by_prompt = {ask.prompt: client for client in self.clients for ask in client.script.asks}
        self._transfers: dict[str, set[str]] = defaultdict(set)
        self._attempts: dict[str, int] = {}
        self._groups: dict[str, str | None] = {}
        """Whose each transfer is."""
        self._sent_again: dict[str, int] = defaultdict(int)
        self._staying = len(self.clients)
        self._at_leave = [operation for operation in scenario.operations if operation.at_s is None]
        self._started = False
        self._server: ProxyServer
        self._listener = Listener()
        self._deaf_at = float("inf")
        """When the proxy has ceased to accept connections."""
        self.resources: ExecutionResources
        self.running: dict[int, float] = {}
        """Since when each request runs."""
        self.begun = 0
        self.ended = 0
        self.refused = 0
        """Of requests that have not come to their end: they are answered and recorded, and never begin."""
        self.ended_at = self.loop.time()
        """The last one."""
        self.connections: ClientConnections
        self.bodies: BodyBudget

    # what engines and clients use

    @property
    def now(self) -> float:
        """Seconds."""
        return self.loop.time()

    def delay(self) -> float:
        """How long something is on its way."""
        return self.random.choice(_DELAYS)

    def pause(self) -> float:
        """How long an engine takes for one thing."""
        return self.random.choice(_PAUSES)

    def note(self, who: str, what: str) -> None:
        """For the trace."""
        self.trace.append((self.now - 1000.0, who, what))

    def wrong(self, what: str) -> None:
        """This must not be."""
        self.note("WRONG", what)
        self.problems.append(what)

    def fault(self, who: str, where: str, kinds: Sequence[T], rate: float | None = None) -> T | None:
        """Whether something goes wrong now. `rate`: how likely, where the scenario has another one for that."""
        if rate is None:
            rate = self.scenario.rate * (3 if where.endswith((" release", " drop")) else 1)
        if not rate or not self._started or self.random.random() >= rate:
            return None
        kind = self.random.choice(kinds)
        if kind is not None:
            self.troubles += 1
            self.note(who, f"fault, {where}: {kind}")
        return kind

    def turned_away(self, who: str, kinds: Sequence[T]) -> T | None:
        """Whether an engine has no mind to run a leg."""
        if self.random.random() >= self.scenario.turns_away:
            return None
        kind = self.random.choice(kinds)
        if kind is not None:
            self.troubles += 1
            self.note(who, f"turns it away: {kind}")
        return kind

    def touch(self, leg: Leg, point: str) -> None:
        """Where a leg is: a client may leave just now."""
        owner = self._by_prompt.get(leg.prompt)
        for client in self.clients:
            if leg.kind != "release":
                client.touched(leg.kind, point, own=client is owner)

    def find(self, key: object) -> Held | None:
        """KV by its name."""
        return next((held for held in self.held if held.key == key), None)

    def continued(self, ask: Any) -> bool:
        """Whether more than one decode leg may have answered it: then cached tokens are those of the last prefill."""
        return self.scenario.continues and len(self._transfers.get(ask.prompt, ())) > 1

    def on_trial(self, engine: Engine) -> bool:
        """Whether the proxy tries if it works again."""
        members = self.resources.fleet.members
        return any(member.trial is not None and member.instance.id == engine.name for member in members)

    def lost(self, data: bytes) -> None:
        """It was sent to an engine that had closed the connection meanwhile."""
        for held in self.held:
            if f'"{held.key}"'.encode() in data:
                held.claims += 1

    def leg_cut(self, leg: Leg) -> None:
        """An engine has cut one off on a connection that had been kept: it may be sent again, and that is no further
        attempt. Where there is a transfer, its id tells so itself."""
        if self.nodes is not None:
            self.nodes.safety.cut(leg)
        if leg.link.served > 1 and not leg.body.get("kv_transfer_params"):
            self._sent_again[leg.prompt] += 1

    def leg_begun(self, leg: Leg, transfer: Mapping[str, Any] | None) -> None:
        """An engine has a leg; without a transfer it does all the work."""
        client = self._by_prompt.get(leg.prompt)
        if client is None:
            self.wrong(f"a leg for {leg.prompt!r}, which nobody has asked")
            return
        group = self._group(leg.link.engine)
        if transfer is not None and self._groups.setdefault(transfer["id"], group) != group:
            self.wrong(f"transfer {transfer['id']} begins in one group and goes on in another")
        if leg.kind == "release":
            return
        self._hold(laws.while_running)
        left = client.left_at
        gone = left is not None and self.now > left + _LEAVING_S
        if self.nodes is not None and leg.kind == "decode":
            if self.nodes.safety.begun(leg) and transfer is None:  # the broker has given the same work twice
                self._sent_again[leg.prompt] += 1
            if gone:  # what waits for a node is not taken back; the node is told when it has taken it
                self.loop.call_later(_LEAVING_S, self.nodes.safety.abandoned, leg)
        elif gone:
            self.wrong(f"a {leg.kind} leg of {leg.prompt} begins although its client has left")
        ids = self._transfers[leg.prompt]
        name, attempt = (
            (f"{leg.prompt} alone, {len(ids)}", 1) if transfer is None else (transfer["id"], transfer["attempt"])
        )
        if self._attempts.setdefault(name, attempt) != attempt:
            self.wrong(f"transfer {name} is used for several attempts")
        ids.add(name)
        if len(ids) > 1 + self.scenario.retries + self._sent_again[leg.prompt]:
            self.wrong(f"{leg.prompt} is tried {len(ids)} times")

    def client_left(self, client: Client) -> None:
        """It has gone, perhaps with legs running."""
        waiting, self._at_leave = self._at_leave, []
        for operation in waiting:
            self.loop.call_later(0.0001, self._operate, operation)

        def check() -> None:
            for engine in self.engines:
                for leg in engine.legs:
                    if leg.kind not in ("prefill", "decode") or self._by_prompt.get(leg.prompt) is not client:
                        continue
                    if self.nodes is not None and leg.kind == "decode":
                        self.nodes.safety.abandoned(leg)
                    else:
                        self.wrong(f"{engine.name} still works for {leg.prompt}, whose client has left")

        self.loop.call_later(_LEAVING_S, check)

    def client_done(self) -> None:
        """One of them has what it wanted, or does not want it."""
        self._staying -= 1

    def open(self, client: Client) -> Socket | None:
        """A connection to the proxy; None where it accepts none any more."""
        factory = self._listener.factory
        if factory is None:
            return None
        if self.now > self._deaf_at:
            self.wrong("connections are accepted although the proxy stops")
        return self.network.open(factory(), client)

    # the run

    def run(self) -> Run:
        """Everything, from the proxy's start to its end."""
        asyncio._set_running_loop(self.loop)
        try:
            self._run()
        except Stuck as error:
            self.wrong(f"it goes round in circles: {error}")
        finally:
            asyncio._set_running_loop(None)
        for fault in self.loop.faults:
            self.wrong(fault)
        self._sweep()
        counts = {"clients": len(self.clients), "faults": self.troubles}
        if self.nodes is not None:
            counts |= {"queued": 1, **self.nodes.counts}
        for client in self.clients:
            for verdict in client.verdicts:
                counts[verdict] = counts.get(verdict, 0) + 1
        return Run(self.scenario, self.problems, self.trace, counts)

    def _hold(self, law: Callable[["World"], Iterable[str]]) -> None:
        for wrong in law(self):
            self.wrong(wrong)

    def _sweep(self) -> None:
        """What a bad run has left must not be heard of in the next one."""
        left = [task for task in asyncio.all_tasks(self.loop) if not task.done()]
        if left:
            asyncio._set_running_loop(self.loop)
            for task in left:
                task.cancel()
            with suppress(Stuck):
                self.loop.run_until(self.now + 1.0)
            asyncio._set_running_loop(None)

    def _run(self) -> None:
        loop = self.loop
        main = loop.create_task(self._serve())
        loop.run_until(self.now + 1.0)
        if not self._started:
            self.wrong("the proxy does not start")
            return
        self.connections = cast("partial[HTTPProtocol]", self._listener.factory).args[0].connections
        for client in self.clients:
            loop.call_later(client.script.begins_s, client.begin)
        for operation in self.scenario.operations:
            if operation.at_s is not None:
                self.quiet_at = max(self.quiet_at, self.now + operation.at_s)
                loop.call_later(operation.at_s, self._operate, operation)
        end = self.now + _LONGEST_S
        stop = self.scenario.stop
        if stop is not None:
            loop.call_later(stop.at_s, self._tell)
            if stop.again_s is not None:
                loop.call_later(stop.at_s + stop.again_s, self._server.stop)
        while (self._staying or (stop is not None and not main.done())) and self.now < end:
            loop.run_until(self.now + 0.1)
            if not self.stopping:
                self._hold(laws.between_turns)
        for client in self.clients:
            if not client.done:
                self.wrong(f"{client.name} waits for an answer for ever")
        if stop is not None:
            loop.run_until(self.now + 1.0)  # the last sweep of what has a time-out
            self._stopped(main)
            self._hold(laws.unsettled)
            self._hold(laws.after_being_cut)
            return
        while laws.unsettled(self) and self.now < end:
            loop.run_until(self.now + 0.1)
            self._hold(laws.between_turns)
        loop.run_until(self.now + 0.01)  # what is on its way arrives
        self._hold(laws.unsettled)
        self._hold(laws.at_rest)
        self._tell()
        # nodes, and an app that does nothing, are waited for
        loop.run_until(self.now + (20.0 if self.nodes is not None else 3.0 if self.scenario.inside else 0.06))
        self._stopped(main)

    def _tell(self) -> None:
        """The proxy is told to stop."""
        self.note("proxy", "stops")
        self.stopping = True
        if self.scenario.stop is not None:
            self._deaf_at = self.now + self.scenario.stop.drain_delay_s + 0.01
        self._server.stop()

    def _stopped(self, main: asyncio.Task[None]) -> None:
        if not main.done():
            self.wrong("the proxy does not stop")
        elif main.exception() is not None:
            self.wrong(f"the proxy stops with {main.exception()!r}")
        self._hold(laws.after_the_end)

    async def _serve(self) -> None:
        scenario = self.scenario
        local, nodes = self.local, self.nodes
        instances = tuple(self._instance(engine) for engine in self.engines if nodes is None or engine is local)
        limits = {role: RoleLimits(scenario.legs, scenario.leg_tokens) for role in Role}
        if nodes is not None:  # as `kvparams sidecar --broker` has it
            instances = (*instances, queue_instance(scenario.dialect))
            del limits[Role.DECODE]
        settings = Settings(
            instances,
            local_id=None if local is None else local.name,
            retries=scenario.retries,
            prefill_timeout_s=scenario.prefill_timeout_s,
            decode_timeout_s=scenario.decode_timeout_s,
            client_timeout_s=scenario.client_timeout_s,
            probe_interval_s=scenario.probe_s,
            limits=limits,
            queue=QueueLimits(scenario.waiting, scenario.per_tenant, scenario.wait_s),
            breaker=BreakerLimits(consecutive=scenario.consecutive, open_s=0.2, longest_s=1.0),
            slow_start_s=scenario.slow_start_s,
            continuation=scenario.continues,
            log_requests="-",
            policy=scenario.policy,
            modes=(parse_mode_flag(scenario.mode),),
            upstream_limits=UpstreamLimits(connections=scenario.connections, connect_s=0.5, idle_s=scenario.idle_s),
        )
        Budget.reserve = float(scenario.reserve)
        reached: list[InProcessUpstream] = []
        queued = None if nodes is None else queue_upstream_factory(Secret(PREFILL), POOL, settings)

        def reach(instance: Instance) -> Upstream | None:
            if queued is not None and (way := queued(instance)) is not None:
                return way
            if not scenario.inside or local is None or instance.id != local.name:
                return None
            reached.append(InProcessUpstream(App(local), {}))
            return reached[-1]

        app = proxy_app.create_app(settings, reach)
        lifespan = app.router.lifespan_context

        @asynccontextmanager
        async def counted(of: Any) -> AsyncGenerator[Mapping[str, Any]]:
            async with lifespan(of) as found:
                state = cast("dict[str, Any]", found)
                self.resources = state["resources"]
                self.bodies = next(iter(state["generate"].values())).bodies
                for way in (DIRECT_ENDPOINTS_KEY, "generate"):
                    state[way] = {path: _Counted(self, endpoint) for path, endpoint in state[way].items()}
                if nodes is not None:
                    nodes.begin()
                self._started = True
                yield state

        app.router.lifespan_context = counted
        stop = scenario.stop or Stop(0.0, 0.0, 120.0, None)
        most = scenario.clients_at_once
        room = ConnectionLimits(1000, most) if scenario.one_address else ConnectionLimits(most or 1000)
        self._server = ProxyServer(app, ServerSettings(room, stop.drain_delay_s, stop.grace_s))
        await self._server.run(cast("Any", self._listener))
        for each in reached:
            await each.wait_closed()
        if nodes is not None:
            await nodes.close()

    def _instance(self, engine: Engine, role: Role | None = None) -> Instance:
        url = f"http://{engine.host}:{engine.port}"
        return Instance(engine.name, "boot", role or engine.role, url, self.scenario.dialect, group=self._group(engine))

    def _group(self, engine: Engine) -> str | None:
        return ("left", "right")[engine.port % 2] if self.scenario.grouped else None

    def _operate(self, operation: Operation) -> None:
        engine = self.engines[operation.engine]
        if operation.at_s is None:
            engine = next(one for one in self.engines if one.port == self.network.dialled)
            operation = operation._replace(at_s=self.now, engine=self.engines.index(engine))
        fleet = self.resources.fleet
        there = engine.name in {member.instance.id for member in fleet.members}
        what = operation.what
        if engine is self.local and what != "freeze":  # nobody takes it away from beside the proxy
            what = "restart"
        self.note("operator", f"{what} {engine.name}")
        if self.nodes is not None and engine is not self.local:
            self.nodes.operate(operation)
        if what == "restart":
            engine.crash(operation.for_s)
        elif what == "freeze":
            engine.freeze(operation.for_s)
        elif what == "add" and not there:
            fleet.add(self._instance(engine))
        elif there and what == "remove":
            fleet.remove(engine.name)
            self.loop.call_later(operation.for_s, self._operate, operation._replace(what="add"))
        elif there and what == "replace":
            fleet.replace(self._instance(engine))
        elif there and what == "swap":  # what has that name is now somebody else, of the other role
            other = self.random.choice([one for one in self.engines if one.role is not engine.role])
            fleet.replace(_named(self._instance(other), engine.name))
            self.loop.call_later(operation.for_s, self._operate, operation._replace(what="replace"))
        elif there and what in ("drain", "undrain"):
            fleet.drain(engine.name, what == "drain")
            if what == "drain":
                self.loop.call_later(operation.for_s, self._operate, operation._replace(what="undrain"))


class _Counted:
    """A `DirectEndpoint` that sees each request begin and end."""

    def __init__(self, world: World, endpoint: Any) -> None:
        self._world = world
        self._endpoint = endpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)

    def handle(
        self, admission: Admission, body: bytes, downstream: Any, also: Callable[[], object] = lambda: None
    ) -> None:
        """See `DirectEndpoint`."""
        world = self._world
        world.begun += 1
        number = world.begun
        world.running[number] = world.now
        ends = 0

        def done() -> None:
            nonlocal ends
            ends += 1
            world.ended += 1
            world.running.pop(number, None)
            world.ended_at = world.now
            also()
            if ends > 1:
                world.wrong("a request ends twice")

        for prompt, ask in world.asks.items():
            if prompt.encode() in body or str(tokenize(prompt)).encode() in body:
                known = KnownClient("key", ask.tenant, ask.priority, tenant_cache_salt(ask.tenant, None))
                admission = replace(admission, client=known)
        self._endpoint.handle(admission, body, downstream, done)

    def refuse(self, admission: Admission, error: ProxyError, downstream: Any) -> None:
        """See `DirectEndpoint`."""
        self._world.refused += 1
        self._endpoint.refuse(admission, error, downstream)


def _fleet(scenario: Scenario) -> tuple[tuple[Role, int], ...]:
    """How many engines of which role."""
    if Role.AGGREGATED in scenario.alone:
        return ((Role.AGGREGATED, scenario.prefills + scenario.decodes),)
    return (Role.PREFILL, scenario.prefills), (Role.DECODE, scenario.decodes)


def _named(instance: Instance, name: str) -> Instance:
    return replace(instance, id=name)


def run(seed: int, modes: Mapping[str, int] = MODES) -> Run:
    """One seed, in one of these modes."""
    Numbers.restart()
    return World(draw(seed, modes)).run()
