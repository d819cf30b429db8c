"""The proxy as a Starlette app: routes, and what lives as long as the app does.

The one rule: everything is made in the lifespan and passed on; there is no app, pool or client at module level.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from itertools import count
from random import Random
from secrets import randbits, token_hex
from typing import TYPE_CHECKING, Any, Final, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvparams import plugins
from kvparams.dialects.registry import each_table
from kvparams.errors import PluginError
from kvparams.managers.choice import Mode
from kvparams.retries import RetryBudget
from kvparams.scheduling import Instance, Role, SchedulingPolicy
from kvparams.trust.pinning import Pins
from kvparams_proxy.cache_events.unheard import Unheard
from kvparams_proxy.clients.auth import KeyRing, Unauthorized
from kvparams_proxy.clients.body import BodyBudget
from kvparams_proxy.clients.direct import DIRECT
from kvparams_proxy.clients.endpoints import ENDPOINTS, Endpoint
from kvparams_proxy.clients.generate import Generate, Generating, require_client
from kvparams_proxy.draining import Draining
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.execution.privacy import Addresses
from kvparams_proxy.execution.releases import Releases
from kvparams_proxy.execution.resources import Resources
from kvparams_proxy.execution.watch import Watch
from kvparams_proxy.fleet.bootstraps import Bootstraps
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.health import HealthStatus, has_pair
from kvparams_proxy.fleet.probes import Prober
from kvparams_proxy.loopclock import LoopClock
from kvparams_proxy.memory import MemoryTrimmer
from kvparams_proxy.modes import Modes
from kvparams_proxy.registry.admin import admin_routes
from kvparams_proxy.registry.entries import EVENTS_NEED
from kvparams_proxy.registry.providers import supplied
from kvparams_proxy.registry.sources import Registry
from kvparams_proxy.settings import DEFAULT_MODES, Settings, known_dialects
from kvparams_proxy.signing import FollowedSigner
from kvparams_proxy.steprunner import StepRunner
from kvparams_proxy.telemetry.event_gauges import EventGauges
from kvparams_proxy.telemetry.exposition import Exposition
from kvparams_proxy.telemetry.gauges import Gauges
from kvparams_proxy.telemetry.journal import Journal
from kvparams_proxy.telemetry.lag import LoopLag
from kvparams_proxy.telemetry.ledger import Ledger
from kvparams_proxy.telemetry.metrics import Metrics
from kvparams_proxy.telemetry.prefix_gauges import PrefixGauges
from kvparams_proxy.telemetry.production_stack import ProductionStackGauges
from kvparams_proxy.telemetry.prompt_gauges import PromptGauges
from kvparams_proxy.telemetry.tracing import Tracer
from kvparams_proxy.together import Together
from kvparams_proxy.tokens.asked import AskedEngines
from kvparams_proxy.tokens.service import TokenService
from kvparams_proxy.upstream.interface import Upstream
from kvparams_proxy.upstream.pool import Pool
from kvparams_proxy.upstream.pools import Pools
from kvparams_proxy.upstream.terms import UpstreamLimits

if TYPE_CHECKING:
    from kvparams_proxy.cache_events.books import CacheEvents
    from kvparams_proxy.fleet.prefixes import Prefixes
    from kvparams_proxy.telemetry.spans import SpanExport

__all__ = ["Reach", "create_app"]

_KEYS_S: Final = 1.0
"""How often files of keys are looked at."""
_RELEASE_S: Final = 2.0
"""For engines to hear of KV that nobody will fetch, when the proxy ends."""


Reach = Callable[[Instance], Upstream | None]
"""The way to an instance that is not reached over HTTP; None for all others."""


def create_app(settings: Settings, reach: Reach | None = None) -> Starlette:
    """The proxy.

    Args:
        settings: the operator's.
        reach: asked once for each instance that joins.

    Raises:
        PluginError: a policy, manager or dialect that is named is not registered; traces are wanted and the extra
            `tracing` is not installed.
        ValueError: an option of a mode is wrong, or the modes are not for every request.
        KeysError: the file of client keys cannot be used.
        KeyringError: that of signing keys cannot.
    """
    policy = cast("type[SchedulingPolicy]", plugins.load("policies", settings.policy))
    dialects = known_dialects()
    pins = Pins(each_table()[0])
    keys = None if settings.client_keys is None else KeyRing(settings.client_keys)
    signing = None if settings.signing is None else FollowedSigner(settings.signing)
    signer = None if signing is None else signing.signer
    modes = Modes(settings.modes, signer)
    make_spans = _span_export(settings.trace)
    make_prefixes = _prefixes(policy)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[Mapping[str, Any]]:
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:  # what was opened is closed, in whatever place the start fails
            clock = LoopClock(loop)
            stack.callback(clock.close)
            prefixes = make_prefixes(loop.time)
            fleet = Fleet(
                (),
                {role: policy() for role in Role},
                loop.time,
                loop.call_later,
                limits=settings.limits,
                queue=settings.queue,
                breaker=settings.breaker,
                slow_start_s=settings.slow_start_s,
                prefixes=prefixes,
            )
            modes.on_change(fleet.need)
            registry = Registry(fleet, settings.rules, settings.beside, partial(_switch, settings, modes))
            pools = Pools(partial(_reached, reach, registry, settings.upstream, clock))
            fleet.listen(pools)
            addresses = Addresses()
            fleet.listen(addresses)
            watch = Watch(loop, clock)
            steps = StepRunner(loop)
            metrics = Metrics()
            releases = Releases(fleet, pools, watch, loop.time, signer)
            spans = make_spans()
            if spans is not None:
                stack.push_async_callback(spans.close)
            journal = None if settings.log_requests == "off" else Journal(loop, settings.log_requests)
            if journal is not None:
                stack.callback(journal.close)
            ledger = Ledger(loop, [reader for reader in (metrics, journal, spans) if reader is not None])
            stack.callback(ledger.close)
            tokens = _tokens(loop, settings, fleet, pools, watch)
            if tokens is not None:
                stack.callback(tokens.close)
            events = _cache_events(loop, prefixes)
            if events is not None:
                stack.callback(events.close)
            fleet.listen(events if events is not None else Unheard(loop.call_soon, _unheard(settings.policy, prefixes)))
            trimmer = MemoryTrimmer(loop)
            stack.callback(trimmer.close)
            bodies = BodyBudget(settings.body_memory_bytes, trimmer.freed)
            exposition = Exposition(
                metrics,
                Gauges(metrics, fleet, pools, releases, journal, bodies),
                ProductionStackGauges(metrics, fleet, loop.time),
                *(() if prefixes is None else (PrefixGauges(prefixes),)),
                *(() if events is None else (EventGauges(events),)),
                *(() if tokens is None else (PromptGauges(tokens),)),
            )
            stack.callback(LoopLag(loop, metrics.turn_lag).close)
            stack.callback(pools.close)
            stack.callback(fleet.close)
            resources = Resources(
                loop=loop,
                fleet=fleet,
                dialects=dialects,
                pools=pools,
                metrics=metrics,
                ledger=ledger,
                settings=settings,
                new_id=_identifiers(),
                asked=Together(loop),
                answered={role: Together(loop) for role in Role},
                running=set(),
                steps=steps,
                clock=clock,
                watch=watch,
                retries=RetryBudget(),
                releases=releases,
                addresses=addresses,
                pins=pins,
                tokens=tokens,
                tracer=None if settings.trace is None else Tracer(settings.trace, Random()),
                prefixes=prefixes,
            )
            generate = {
                each.path: Generate(resources, modes, keys, each, bodies, _alone(each, settings.local))
                for each in ENDPOINTS
            }
            await stack.enter_async_context(supplied(registry, settings.instances, settings.providers))
            bootstraps = Bootstraps(dialects, settings.upstream, clock)
            await stack.enter_async_context(Prober(fleet, settings.probe_s, pools, bootstraps, clock, steps))
            await stack.enter_async_context(_following(keys, "client keys"))
            await stack.enter_async_context(_following(signing, "signing keys"))
            stack.push_async_callback(_end_running, resources)
            fleet.settled()
            yield {
                "resources": resources,
                "registry": registry,
                "modes": modes,
                "generate": generate,
                "exposition": exposition,
                "keys": keys,
                "draining": Draining(),
                DIRECT: {path.encode(): endpoint for path, endpoint in generate.items()},
            }

    app = Starlette(
        routes=[
            *(Route(each.path, Generating(each.path), methods=["POST"]) for each in ENDPOINTS),
            Route("/v1/models", _models, methods=["GET"]),
            Route("/health", _health, methods=["GET"]),
            Route("/health/{role}", _health, methods=["GET"]),
            Route("/metrics", _metrics, methods=["GET"]),
            *(admin_routes(settings.admin) if settings.admin is not None else ()),
        ],
        lifespan=lifespan,
        exception_handlers={404: _not_found, 405: _not_found, 500: _bug},
    )
    app.router.redirect_slashes = False  # `/v1/models/` is another path, and not served
    return app


async def _end_running(resources: Resources) -> None:
    """Ends the requests that still run, and lets engines hear which KV nobody will fetch."""
    for execution in list(resources.running):
        execution.cut()
    with suppress(TimeoutError):
        async with asyncio.timeout(_RELEASE_S):
            await resources.releases.settled()


def _switch(settings: Settings, modes: Modes, source: str, wanted: Sequence[Mode]) -> None:
    """What a source says goes behind what was said at the start with a flag."""
    if not settings.keep_modes:
        modes.replace(wanted or DEFAULT_MODES, source)


def _alone(endpoint: Endpoint, local: Instance | None) -> Role | None:
    """Whose engines answer alone. Beside an engine it does what is not decode's, whatever its role."""
    return endpoint.role if local is None or endpoint.role is not Role.PREFILL else local.role


def _tokens(
    loop: asyncio.AbstractEventLoop, settings: Settings, fleet: Fleet, pools: Pools, watch: Watch
) -> TokenService | None:
    if not settings.tokenizers:
        return None
    return TokenService(loop, settings.tokenizers, AskedEngines(lambda: fleet.members, pools, watch))


def _reached(
    reach: Reach | None, registry: Registry, limits: UpstreamLimits, clock: LoopClock, instance: Instance
) -> Upstream:
    if reach is not None and (upstream := reach(instance)) is not None:
        return upstream
    access = registry.access(instance.id)
    return Pool(instance.url, limits, access.tls, server_name=access.server_name, key=access.key, clock=clock)


@asynccontextmanager
async def _following(keys: KeyRing | FollowedSigner | None, what: str) -> AsyncGenerator[None]:
    """Keys are read again whenever their file has changed."""
    if keys is None:
        yield
        return
    task = asyncio.create_task(keys.follow(_KEYS_S), name=f"follow {what}")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _span_export(ratio: float | None) -> Callable[[], "SpanExport | None"]:
    """Makes what exports spans. OpenTelemetry is imported only where traces are wanted."""
    if ratio is None:
        return lambda: None
    try:
        from kvparams_proxy.telemetry.spans import SpanExport
    except ImportError as error:
        message = f"traces need OpenTelemetry ({error}): pip install 'kvparams[tracing]'"
        raise PluginError(message) from error
    return SpanExport


def _prefixes(policy: type[SchedulingPolicy]) -> "Callable[[Callable[[], float]], Prefixes | None]":
    """Makes the books of caches. numpy is imported only where the policy looks at them."""
    if not getattr(policy, "uses_prefixes", False):
        return lambda now: None
    try:
        from kvparams_proxy.fleet.prefixes import Prefixes
    except ImportError as error:
        message = f"this policy needs more than is installed ({error}): pip install 'kvparams[proxy,index]'"
        raise PluginError(message) from error
    return lambda now: Prefixes(now, randbits(64))


def _cache_events(loop: asyncio.AbstractEventLoop, prefixes: "Prefixes | None") -> "CacheEvents | None":
    """Who hears engines' KV events: nobody where the policy does not look at caches, or pyzmq is not installed."""
    if prefixes is None:
        return None
    try:
        from kvparams_proxy.cache_events.books import CacheEvents
    except ImportError:
        return None
    return CacheEvents(loop, prefixes)


def _unheard(policy: str, prefixes: "Prefixes | None") -> str:
    """Why that is, and what to do."""
    if prefixes is None:
        return f"since the policy {policy} does not look at what engines have cached; --policy cache_aware does"
    return f"since that {EVENTS_NEED}"


def _identifiers() -> Callable[[], str]:
    """Makes ids that no other process and no later run makes. Unique, not secret: none costs fresh entropy."""
    run, numbers = token_hex(12), count()
    return lambda: f"{run}-{next(numbers):x}"


def _error(error: ProxyError, request: str | None = None) -> Response:
    headers = {} if request is None else {"x-request-id": request}
    return Response(error.body(), error.status, headers, "application/json")


def _headers(error: ProxyError) -> dict[str, str]:
    return dict(line.decode().split(": ", 1) for line in error.headers().split(b"\r\n") if line)


async def _models(request: Request) -> Response:
    if (keys := request.state.keys) is not None:
        try:
            require_client(keys, next((v for n, v in request.headers.raw if n == b"authorization"), None))
        except Unauthorized as error:
            return Response(error.body(), 401, _headers(error), "application/json")
    models = request.state.resources.fleet.models()
    data = [{"id": model, "object": "model", "created": 0, "owned_by": "kvparams"} for model in models]
    return JSONResponse({"object": "list", "data": data})


async def _health(request: Request) -> Response:
    """Whether requests can be served; of one role, whether its legs can.

    200 "ok": of every needed role at least one engine does what it should.
    200 "degraded": of the roles in `degraded_roles` every engine that answers probes has failed legs lately. Requests
    are still given to these engines, so this proxy should still get requests: other proxies know no better.
    503 "draining": the proxy is about to stop.
    503 "unavailable": no engine of the roles in `missing_roles` can be given work, or (`unpaired`) none of the prefill
    and decode engines that can be given work may be paired.
    """
    fleet: Fleet = request.state.resources.fleet
    asked = request.path_params.get("role")
    if asked is not None and asked not in tuple(Role):
        return _error(ProxyError(404, "not_found_error", f"there is no such role; there are {', '.join(Role)}"))
    if request.state.draining.on:
        return Response(json.dumps({"status": "draining"}), 503, media_type="application/json")
    roles = {role: health for role, health in fleet.health().items() if asked in (None, role)}
    missing = [r for r, health in roles.items() if r in fleet.needed and health.status is HealthStatus.UNAVAILABLE]
    degraded = [r for r, health in roles.items() if r in fleet.needed and health.status is HealthStatus.DEGRADED]
    split = asked is None and fleet.needed >= {Role.PREFILL, Role.DECODE}
    unpaired = split and not missing and not has_pair(fleet.members)
    unavailable = bool(missing or unpaired)
    status = HealthStatus.DEGRADED if degraded else HealthStatus.OK
    body: dict[str, object] = {"status": HealthStatus.UNAVAILABLE if unavailable else status}
    if missing:
        body["missing_roles"] = missing
    if degraded:
        body["degraded_roles"] = degraded
    if unpaired:
        body["unpaired"] = True
    body["roles"] = {role: health._asdict() for role, health in roles.items()}
    return Response(json.dumps(body), 503 if unavailable else 200, media_type="application/json")


async def _metrics(request: Request) -> Response:
    exposition: Exposition = request.state.exposition
    resources: Resources = request.state.resources
    resources.ledger.settle()
    text, content_type = await exposition.text(request.headers.get("accept", ""))
    return Response(text, headers={"content-type": content_type})


async def _not_found(request: Request, exc: Exception) -> Response:
    error = cast("HTTPException", exc)
    message = f"{request.method} {request.url.path[:200]} is not served here"
    if error.status_code == 405:
        message += f"; use {', '.join((error.headers or {}).get('Allow', 'another method').split(', '))}"
    response = _error(ProxyError(error.status_code, "not_found_error", message), request.state.resources.new_id())
    response.headers.update(error.headers or {})
    return response


async def _bug(request: Request, exc: Exception) -> Response:
    return _error(ProxyError(500, "internal_error", "the proxy failed; its log says why"))
