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
from kvparams.dialects.registry import load_tables_and_errors
from kvparams.errors import PluginError
from kvparams.instances import Instance, Role, SchedulingPolicy
from kvparams.routing.handoff_verifier import HandoffVerifier
from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams.routing.retries import RetryBudget
from kvparams_proxy.config.settings import DEFAULT_MODES, Settings, known_dialects
from kvparams_proxy.config.signing import ReloadingSigner
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.event_loop.clock import StallAwareClock
from kvparams_proxy.event_loop.deadlines import Deadlines
from kvparams_proxy.event_loop.step_runner import StepRunner
from kvparams_proxy.event_loop.turn_batcher import TurnBatcher
from kvparams_proxy.execution.active_modes import ActiveModes
from kvparams_proxy.execution.kv_releaser import KVReleaser
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.execution.response_privacy import EngineAddresses
from kvparams_proxy.fleet.bootstrap_servers import BootstrapServers
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.health import HealthStatus, has_usable_pair
from kvparams_proxy.fleet.kv_events.unused_events_logger import UnusedEventsLogger
from kvparams_proxy.fleet.probes import Prober
from kvparams_proxy.fleet.registry.instance_spec import KV_EVENTS_REQUIREMENT
from kvparams_proxy.fleet.registry.providers import run_providers
from kvparams_proxy.fleet.registry.registry import Registry
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.requests.authentication import APIKeyAuthenticator, Unauthorized
from kvparams_proxy.requests.body import BodyBudget
from kvparams_proxy.requests.endpoints import ENDPOINTS, APIEndpoint
from kvparams_proxy.server.admin_api import admin_routes
from kvparams_proxy.server.direct_path import DIRECT_ENDPOINTS_KEY
from kvparams_proxy.server.draining import DrainState
from kvparams_proxy.server.memory_trimmer import MemoryTrimmer
from kvparams_proxy.server.request_handler import ASGIRequestHandler, RequestHandler, require_client
from kvparams_proxy.telemetry.exposition import MetricsExposition
from kvparams_proxy.telemetry.kv_event_gauges import KVEventGauges
from kvparams_proxy.telemetry.loop_lag import LoopLag
from kvparams_proxy.telemetry.metrics import Metrics
from kvparams_proxy.telemetry.prefix_cache_gauges import PrefixCacheGauges
from kvparams_proxy.telemetry.production_stack_gauges import ProductionStackGauges
from kvparams_proxy.telemetry.prompt_gauges import PromptGauges
from kvparams_proxy.telemetry.proxy_gauges import ProxyGauges
from kvparams_proxy.telemetry.record_dispatcher import RecordDispatcher
from kvparams_proxy.telemetry.request_log import RequestLog
from kvparams_proxy.telemetry.tracing import Tracer
from kvparams_proxy.tokenization.engine_tokenizer import EngineTokenizer
from kvparams_proxy.tokenization.service import TokenService
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.interface import Upstream, UpstreamFactory
from kvparams_proxy.upstream.types import UpstreamLimits

if TYPE_CHECKING:
    from kvparams_proxy.fleet.kv_events.consumer import KVEventConsumer
    from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel
    from kvparams_proxy.telemetry.spans import RequestSpanExporter

__all__ = ["create_app"]

_KEYS_S: Final = 1.0
"""How often files of keys are looked at."""
_RELEASE_S: Final = 2.0
"""For engines to hear of KV that nobody will fetch, when the proxy ends."""


def create_app(settings: Settings, reach: UpstreamFactory | None = None) -> Starlette:
    """The proxy.

    Args:
        settings: the operator's.
        reach: asked once for each instance that joins.

    Raises:
        PluginError: a policy, manager or dialect that is named is not registered; traces are wanted and the extra
            `tracing` is not installed.
        ValueError: an option of a mode is wrong, or the modes are not for every request.
        APIKeysError: the file of client keys cannot be used.
        SigningKeyringError: that of signing keys cannot.
    """
    policy = cast("type[SchedulingPolicy]", plugins.load_plugin("policies", settings.policy))
    dialects = known_dialects()
    pins = HandoffVerifier(load_tables_and_errors()[0])
    keys = None if settings.client_keys is None else APIKeyAuthenticator(settings.client_keys)
    signing = None if settings.signing is None else ReloadingSigner(settings.signing)
    signer = None if signing is None else signing.signer
    modes = ActiveModes(settings.modes, signer)
    make_spans = _span_export(settings.trace)
    make_prefixes = _prefixes(policy)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[Mapping[str, Any]]:
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:  # what was opened is closed, in whatever place the start fails
            clock = StallAwareClock(loop)
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
            modes.set_change_listener(fleet.set_needed_roles)
            registry = Registry(fleet, settings.spec_rules, settings.local_id, partial(_switch, settings, modes))
            pools = UpstreamPools(partial(_reached, reach, registry, settings.upstream_limits, clock))
            fleet.add_listener(pools)
            addresses = EngineAddresses()
            fleet.add_listener(addresses)
            watch = Deadlines(loop, clock)
            steps = StepRunner(loop)
            metrics = Metrics()
            releases = KVReleaser(fleet, pools, watch, loop.time, signer)
            spans = make_spans()
            if spans is not None:
                stack.push_async_callback(spans.close)
            journal = None if settings.log_requests == "off" else RequestLog(loop, settings.log_requests)
            if journal is not None:
                stack.callback(journal.close)
            ledger = RecordDispatcher(loop, [reader for reader in (metrics, journal, spans) if reader is not None])
            stack.callback(ledger.close)
            tokens = _tokens(loop, settings, fleet, pools, watch)
            if tokens is not None:
                stack.callback(tokens.close)
            events = _cache_events(loop, prefixes)
            if events is not None:
                stack.callback(events.close)
            fleet.add_listener(
                events
                if events is not None
                else UnusedEventsLogger(loop.call_soon, _unheard(settings.policy, prefixes))
            )
            trimmer = MemoryTrimmer(loop)
            stack.callback(trimmer.close)
            bodies = BodyBudget(settings.body_memory_bytes, trimmer.freed)
            exposition = MetricsExposition(
                metrics,
                ProxyGauges(metrics, fleet, pools, releases, journal, bodies),
                ProductionStackGauges(metrics, fleet, loop.time),
                *(() if prefixes is None else (PrefixCacheGauges(prefixes),)),
                *(() if events is None else (KVEventGauges(events),)),
                *(() if tokens is None else (PromptGauges(tokens),)),
            )
            stack.callback(LoopLag(loop, metrics.loop_lag).close)
            stack.callback(pools.close)
            stack.callback(fleet.close)
            resources = ExecutionResources(
                loop=loop,
                fleet=fleet,
                dialects=dialects,
                pools=pools,
                metrics=metrics,
                record_dispatcher=ledger,
                settings=settings,
                new_id=_identifiers(),
                start_batcher=TurnBatcher(loop),
                response_batchers={role: TurnBatcher(loop) for role in Role},
                running_executions=set(),
                step_runner=steps,
                clock=clock,
                deadlines=watch,
                retry_budget=RetryBudget(),
                kv_releaser=releases,
                engine_addresses=addresses,
                handoff_verifier=pins,
                token_service=tokens,
                tracer=None if settings.trace is None else Tracer(settings.trace, Random()),
                prefix_cache=prefixes,
            )
            generate = {
                each.path: RequestHandler(resources, modes, keys, each, bodies, _alone(each, settings.local))
                for each in ENDPOINTS
            }
            await stack.enter_async_context(run_providers(registry, settings.instances, settings.providers))
            bootstraps = BootstrapServers(dialects, settings.upstream_limits, clock)
            await stack.enter_async_context(Prober(fleet, settings.probe_interval_s, pools, bootstraps, clock, steps))
            await stack.enter_async_context(_following(keys, "client keys"))
            await stack.enter_async_context(_following(signing, "signing keys"))
            stack.push_async_callback(_end_running, resources)
            fleet.startup_complete()
            yield {
                "resources": resources,
                "registry": registry,
                "modes": modes,
                "generate": generate,
                "exposition": exposition,
                "keys": keys,
                "draining": DrainState(),
                DIRECT_ENDPOINTS_KEY: {path.encode(): endpoint for path, endpoint in generate.items()},
            }

    app = Starlette(
        routes=[
            *(Route(each.path, ASGIRequestHandler(each.path), methods=["POST"]) for each in ENDPOINTS),
            Route("/v1/models", _models, methods=["GET"]),
            Route("/health", _health, methods=["GET"]),
            Route("/health/{role}", _health, methods=["GET"]),
            Route("/metrics", _metrics, methods=["GET"]),
            *(admin_routes(settings.admin_token) if settings.admin_token is not None else ()),
        ],
        lifespan=lifespan,
        exception_handlers={404: _not_found, 405: _not_found, 500: _bug},
    )
    app.router.redirect_slashes = False  # `/v1/models/` is another path, and not served
    return app


async def _end_running(resources: ExecutionResources) -> None:
    """Ends the requests that still run, and lets engines hear which KV nobody will fetch."""
    for execution in list(resources.running_executions):
        execution.abort_for_shutdown()
    with suppress(TimeoutError):
        async with asyncio.timeout(_RELEASE_S):
            await resources.kv_releaser.wait_settled()


def _switch(settings: Settings, modes: ActiveModes, source: str, wanted: Sequence[ManagerMode]) -> None:
    """What a source says goes behind what was said at the start with a flag."""
    if not settings.modes_are_fixed:
        modes.replace(wanted or DEFAULT_MODES, source)


def _alone(endpoint: APIEndpoint, local: Instance | None) -> Role | None:
    """Whose engines answer alone. Beside an engine it does what is not decode's, whatever its role."""
    return endpoint.role if local is None or endpoint.role is not Role.PREFILL else local.role


def _tokens(
    loop: asyncio.AbstractEventLoop, settings: Settings, fleet: Fleet, pools: UpstreamPools, watch: Deadlines
) -> TokenService | None:
    if not settings.tokenizers:
        return None
    return TokenService(loop, settings.tokenizers, EngineTokenizer(lambda: fleet.members, pools, watch))


def _reached(
    reach: UpstreamFactory | None,
    registry: Registry,
    limits: UpstreamLimits,
    clock: StallAwareClock,
    instance: Instance,
) -> Upstream:
    if reach is not None and (upstream := reach(instance)) is not None:
        return upstream
    access = registry.credentials_for(instance.id)
    return UpstreamConnectionPool(
        instance.url, limits, access.tls, server_name=access.server_name, key=access.key, clock=clock
    )


@asynccontextmanager
async def _following(keys: APIKeyAuthenticator | ReloadingSigner | None, what: str) -> AsyncGenerator[None]:
    """Keys are read again whenever their file has changed."""
    if keys is None:
        yield
        return
    task = asyncio.create_task(keys.watch_file(_KEYS_S), name=f"follow {what}")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _span_export(ratio: float | None) -> Callable[[], "RequestSpanExporter | None"]:
    """Makes what exports spans. OpenTelemetry is imported only where traces are wanted."""
    if ratio is None:
        return lambda: None
    try:
        from kvparams_proxy.telemetry.spans import RequestSpanExporter
    except ImportError as error:
        message = f"traces need OpenTelemetry ({error}): pip install 'kvparams[tracing]'"
        raise PluginError(message) from error
    return RequestSpanExporter


def _prefixes(policy: type[SchedulingPolicy]) -> "Callable[[Callable[[], float]], PrefixCacheModel | None]":
    """Makes the books of caches. numpy is imported only where the policy looks at them."""
    if not getattr(policy, "uses_prefixes", False):
        return lambda now: None
    try:
        from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel
    except ImportError as error:
        message = f"this policy needs more than is installed ({error}): pip install 'kvparams[proxy,index]'"
        raise PluginError(message) from error
    return lambda now: PrefixCacheModel(now, randbits(64))


def _cache_events(loop: asyncio.AbstractEventLoop, prefixes: "PrefixCacheModel | None") -> "KVEventConsumer | None":
    """Who hears engines' KV events: nobody where the policy does not look at caches, or pyzmq is not installed."""
    if prefixes is None:
        return None
    try:
        from kvparams_proxy.fleet.kv_events.consumer import KVEventConsumer
    except ImportError:
        return None
    return KVEventConsumer(loop, prefixes)


def _unheard(policy: str, prefixes: "PrefixCacheModel | None") -> str:
    """Why that is, and what to do."""
    if prefixes is None:
        return f"since the policy {policy} does not look at what engines have cached; --policy cache_aware does"
    return f"since that {KV_EVENTS_REQUIREMENT}"


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
    if request.state.draining.is_draining:
        return Response(json.dumps({"status": "draining"}), 503, media_type="application/json")
    roles = {role: health for role, health in fleet.health().items() if asked in (None, role)}
    missing = [r for r, health in roles.items() if r in fleet.needed and health.status is HealthStatus.UNAVAILABLE]
    degraded = [r for r, health in roles.items() if r in fleet.needed and health.status is HealthStatus.DEGRADED]
    split = asked is None and fleet.needed >= {Role.PREFILL, Role.DECODE}
    unpaired = split and not missing and not has_usable_pair(fleet.members)
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
    exposition: MetricsExposition = request.state.exposition
    resources: ExecutionResources = request.state.resources
    resources.record_dispatcher.flush()
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
