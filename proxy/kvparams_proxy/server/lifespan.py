"""Starts what lives as long as the app does, and closes it again in the reverse order.

Invariant: every object that is opened is registered in the exit stack in the next statement, so a start that fails in
any step leaves nothing open. Fleet and pools come last, since closing them ends legs, which are recorded and traced;
both hold nothing before the first instance joins.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from starlette.applications import Starlette

from kvparams.instances import Instance, Role
from kvparams.routing.policies.media_affinity import MediaAffinity
from kvparams.routing.retries import RetryBudget
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.coordination.exchange_gauges import ExchangeGauges
from kvparams_proxy.coordination.fleet_sync import FleetSync
from kvparams_proxy.event_loop.clock import StallAwareClock
from kvparams_proxy.event_loop.deadlines import Deadlines
from kvparams_proxy.event_loop.step_runner import StepRunner
from kvparams_proxy.event_loop.turn_batcher import TurnBatcher
from kvparams_proxy.execution.decode_picker import DecodePicker
from kvparams_proxy.execution.encoding_log import EncodingLog
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.kv_releaser import KVReleaser
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.fleet.bootstrap_servers import BootstrapServers
from kvparams_proxy.fleet.endpoint_names import EndpointNames
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.probes import Prober
from kvparams_proxy.fleet.queue_depth_reader import QueueDepthGauges, QueueDepthReader
from kvparams_proxy.fleet.registry.providers import run_providers
from kvparams_proxy.fleet.registry.registry import Registry
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.requests.body import BodyBudget
from kvparams_proxy.requests.endpoints import ENDPOINTS
from kvparams_proxy.server.app_plugins import AppPlugins
from kvparams_proxy.server.direct_path import DIRECT_ENDPOINTS_KEY
from kvparams_proxy.server.draining import DrainState
from kvparams_proxy.server.lifespan_helpers import (
    describe_proxy,
    id_maker,
    open_decode_picker,
    open_event_consumer,
    reload_on_change,
    response_ids,
    role_alone,
    run_startup_check,
    switch_models,
    switch_modes,
)
from kvparams_proxy.server.memory_trimmer import MemoryTrimmer
from kvparams_proxy.server.prefill_partners import make_prefill_partners
from kvparams_proxy.server.request_handler import RequestHandler
from kvparams_proxy.server.shared_admin import SharedAdmin
from kvparams_proxy.telemetry.exposition import MetricsExposition
from kvparams_proxy.telemetry.kv_event_gauges import KVEventGauges
from kvparams_proxy.telemetry.loop_lag import LoopLag
from kvparams_proxy.telemetry.metrics import Metrics
from kvparams_proxy.telemetry.prefix_cache_gauges import PrefixCacheGauges
from kvparams_proxy.telemetry.production_stack_gauges import ProductionStackGauges
from kvparams_proxy.telemetry.prompt_gauges import PromptGauges
from kvparams_proxy.telemetry.proxy_gauges import InstanceGauges, ProxyGauges
from kvparams_proxy.telemetry.recent_requests import RecentRequests
from kvparams_proxy.telemetry.record_dispatcher import RecordDispatcher
from kvparams_proxy.telemetry.request_log import RequestLog
from kvparams_proxy.telemetry.tracing import Tracer
from kvparams_proxy.tokenization.engine_tokenizer import EngineTokenizer
from kvparams_proxy.tokenization.service import TokenService
from kvparams_proxy.ui.live_page import open_live_page
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.interface import Upstream, UpstreamFactory
from kvparams_proxy.upstream.types import UpstreamLimits
from kvparams_proxy.worker_identity import WorkerIdentity
from kvparams_proxy.workers.worker_link import WorkerLink

if TYPE_CHECKING:
    from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel

__all__ = ["app_lifespan"]

_RELEASE_S: Final = 2.0
"""For engines to hear of KV that nobody will fetch, when the proxy ends."""


class _Telemetry(NamedTuple):
    """The consumers of request records."""

    metrics: Metrics
    request_log: RequestLog | None
    recent_requests: RecentRequests | None
    """None where nobody has a token to look at them."""
    record_dispatcher: RecordDispatcher


class _AppParts(NamedTuple):
    """The parts that live from the start to the end of the app."""

    loop: asyncio.AbstractEventLoop
    clock: StallAwareClock
    deadlines: Deadlines
    step_runner: StepRunner
    fleet: Fleet
    registry: Registry
    pools: UpstreamPools
    engine_addresses: EngineAddresses
    prefix_cache: "PrefixCacheModel | None"
    telemetry: _Telemetry
    token_service: TokenService | None
    kv_releaser: KVReleaser
    bodies: BodyBudget
    queue_depths: QueueDepthReader
    exposition: MetricsExposition
    sync: FleetSync | None


@asynccontextmanager
async def app_lifespan(
    settings: Settings,
    plugins: AppPlugins,
    reach: UpstreamFactory | None,
    worker: WorkerLink | None,
    app: Starlette,
) -> AsyncGenerator[Mapping[str, Any]]:
    """Is Starlette's `lifespan`, once all arguments but the last are bound. Yields the state of requests."""
    async with AsyncExitStack() as stack:
        parts = _open_parts(stack, settings, plugins, reach, None if worker is None else worker.identity)
        if worker is not None:
            worker.attach(parts.exposition)
        endpoints = EndpointNames(parts.fleet, parts.pools)
        resources = _execution_resources(
            settings, plugins, parts, open_decode_picker(stack, settings, parts.exposition, endpoints)
        )
        partners = make_prefill_partners(settings, plugins.signing, endpoints)
        if partners is not None:
            parts.exposition.add(partners)
        generate = {
            each.path: RequestHandler(
                resources, plugins.modes, plugins.keys, each, parts.bodies, role_alone(each, settings.local), partners
            )
            for each in ENDPOINTS
        }
        shared_admin = SharedAdmin(parts.registry, plugins.modes, None if parts.sync is None else parts.sync.settings)
        stack.push_async_callback(shared_admin.close)
        await _start_tasks(stack, settings, plugins, parts)
        if settings.startup_check and (worker is None or worker.identity.number == 1):
            await stack.enter_async_context(run_startup_check(settings, plugins, parts.fleet, parts.pools))
        stack.push_async_callback(_end_running, resources)
        parts.fleet.startup_complete()
        yield {
            "resources": resources,
            "registry": parts.registry,
            "modes": plugins.modes,
            "generate": generate,
            "exposition": parts.exposition,
            "scrape": parts.exposition.text if worker is None else worker.scrape,
            "worker": worker,
            "keys": plugins.keys,
            "draining": DrainState(),
            "recent_requests": parts.telemetry.recent_requests,
            "sync": parts.sync,
            "shared_admin": shared_admin,
            "ui": open_live_page(
                stack,
                resources,
                plugins.modes,
                parts.telemetry.recent_requests,
                parts.sync,
                worker,
            ),
            DIRECT_ENDPOINTS_KEY: {path.encode(): endpoint for path, endpoint in generate.items()},
        }


def _open_parts(
    stack: AsyncExitStack,
    settings: Settings,
    plugins: AppPlugins,
    reach: UpstreamFactory | None,
    worker: WorkerIdentity | None,
) -> _AppParts:
    """Makes everything that needs no task of its own."""
    loop = asyncio.get_running_loop()
    clock = StallAwareClock(loop)
    stack.callback(clock.close)
    prefixes = plugins.make_prefix_cache(loop.time)
    fleet = _make_fleet(loop, settings, plugins, prefixes)
    sync = _open_sync(stack, loop, settings, fleet, prefixes)
    registry = Registry(
        fleet,
        settings.spec_rules,
        settings.local_id,
        partial(switch_modes, settings, plugins.modes),
        partial(switch_models, settings, plugins, fleet, sync),
    )
    pools = UpstreamPools(partial(_make_upstream, reach, registry, settings.upstream_limits, clock))
    fleet.add_listener(pools)
    addresses = EngineAddresses()
    fleet.add_listener(addresses)
    deadlines = Deadlines(loop, clock)
    telemetry = _open_telemetry(stack, loop, settings, plugins, worker)
    tokens = _open_token_service(stack, loop, settings, fleet, pools, deadlines)
    events = open_event_consumer(stack, loop, settings, fleet, prefixes, sync)
    trimmer = MemoryTrimmer(loop)
    stack.callback(trimmer.close)
    bodies = BodyBudget(settings.body_memory_bytes, trimmer.freed)
    releaser = KVReleaser(fleet, pools, deadlines, loop.time, plugins.signer)
    queue_depths = QueueDepthReader(loop, clock, fleet, pools)
    metrics = telemetry.metrics
    exposition = MetricsExposition(
        metrics,
        ProxyGauges(metrics, fleet, releaser, telemetry.request_log, bodies),
        QueueDepthGauges(queue_depths),
        *(() if prefixes is None else (PrefixCacheGauges(prefixes),)),
        *(() if events is None else (KVEventGauges(events),)),
        *(() if tokens is None else (PromptGauges(tokens),)),
        *(() if sync is None else (ExchangeGauges(sync.exchange, fleet),)),
        gauges=(InstanceGauges(metrics, fleet, pools, releaser), ProductionStackGauges(metrics, fleet, loop.time)),
        flush=telemetry.record_dispatcher.flush,
    )
    stack.callback(LoopLag(loop, metrics.loop_lag).close)
    stack.callback(pools.close)
    stack.callback(fleet.close)
    return _AppParts(
        loop=loop,
        clock=clock,
        deadlines=deadlines,
        step_runner=StepRunner(loop),
        fleet=fleet,
        registry=registry,
        pools=pools,
        engine_addresses=addresses,
        prefix_cache=prefixes,
        telemetry=telemetry,
        token_service=tokens,
        kv_releaser=releaser,
        bodies=bodies,
        queue_depths=queue_depths,
        exposition=exposition,
        sync=sync,
    )


def _make_fleet(
    loop: asyncio.AbstractEventLoop, settings: Settings, plugins: AppPlugins, prefixes: "PrefixCacheModel | None"
) -> Fleet:
    """Makes the fleet, without instances: the registry adds them."""
    roles = [role for role in Role if role is not Role.ENCODE]
    fleet = Fleet(
        (),
        {**{role: plugins.policy() for role in roles}, Role.ENCODE: MediaAffinity()},
        loop.time,
        loop.call_later,
        limits=settings.limits,
        queue=settings.queue,
        breaker=settings.breaker,
        slow_start_s=settings.slow_start_s,
        prefixes=prefixes,
        models=plugins.models,
        model_policies={role: {name: make() for name, make in plugins.model_policies.items()} for role in roles},
    )
    plugins.modes.set_change_listener(fleet.set_role_groups)
    return fleet


def _open_sync(
    stack: AsyncExitStack,
    loop: asyncio.AbstractEventLoop,
    settings: Settings,
    fleet: Fleet,
    prefixes: "PrefixCacheModel | None",
) -> FleetSync | None:
    """Makes what shares the fleet with other proxies, where there are any."""
    if settings.sharing is None:
        return None
    sync = FleetSync(loop, fleet, prefixes, settings.sharing, describe_proxy(settings))
    stack.push_async_callback(sync.close)
    return sync


def _open_telemetry(
    stack: AsyncExitStack,
    loop: asyncio.AbstractEventLoop,
    settings: Settings,
    plugins: AppPlugins,
    worker: WorkerIdentity | None,
) -> _Telemetry:
    """Opens what reads the records of requests, and the dispatcher that brings them there."""
    metrics = Metrics()
    recent = None if settings.admin_token is None and settings.viewer_token is None else RecentRequests()
    spans = plugins.make_span_exporter()
    if spans is not None:
        stack.push_async_callback(spans.close)
    lock = None if worker is None else worker.directory / "request-log.lock"
    journal = None if settings.log_requests == "off" else RequestLog(loop, settings.log_requests, lock)
    if journal is not None:
        stack.callback(journal.close)
    readers = [reader for reader in (metrics, journal, spans, recent) if reader is not None]
    dispatcher = RecordDispatcher(loop, readers)
    stack.callback(dispatcher.close)
    return _Telemetry(metrics, journal, recent, dispatcher)


def _execution_resources(
    settings: Settings, plugins: AppPlugins, parts: _AppParts, decode_picker: DecodePicker | None
) -> ExecutionResources:
    return ExecutionResources(
        loop=parts.loop,
        fleet=parts.fleet,
        dialects=plugins.dialects,
        pools=parts.pools,
        metrics=parts.telemetry.metrics,
        record_dispatcher=parts.telemetry.record_dispatcher,
        settings=settings,
        new_id=id_maker(),
        start_batcher=TurnBatcher(parts.loop),
        response_batchers={role: TurnBatcher(parts.loop) for role in Role},
        running_executions=set(),
        step_runner=parts.step_runner,
        clock=parts.clock,
        deadlines=parts.deadlines,
        retry_budget=RetryBudget(),
        kv_releaser=parts.kv_releaser,
        engine_addresses=parts.engine_addresses,
        handoff_verifier=plugins.handoff_verifier,
        response_ids=response_ids(settings),
        encoding_log=EncodingLog(parts.loop.time),
        decode_picker=decode_picker,
        token_service=parts.token_service,
        tracer=None if settings.trace is None else Tracer(settings.trace, Random()),
        prefix_cache=parts.prefix_cache,
    )


async def _start_tasks(stack: AsyncExitStack, settings: Settings, plugins: AppPlugins, parts: _AppParts) -> None:
    """Starts what follows sources of instances, engines and files of keys."""
    await stack.enter_async_context(run_providers(parts.registry, settings.instances, settings.providers))
    bootstraps = BootstrapServers(plugins.dialects, settings.upstream_limits, parts.clock)
    prober = Prober(parts.fleet, settings.probe_interval_s, parts.pools, bootstraps, parts.clock, parts.step_runner)
    await stack.enter_async_context(prober)
    parts.fleet.probe = prober.probe_now
    parts.queue_depths.start()
    stack.callback(parts.queue_depths.close)
    if parts.sync is not None:
        parts.sync.start()
    await stack.enter_async_context(reload_on_change(plugins.keys, "client keys"))
    await stack.enter_async_context(reload_on_change(plugins.signing, "signing keys"))
    if parts.sync is not None:
        await parts.sync.wait_until_told()


async def _end_running(resources: ExecutionResources) -> None:
    """Ends the requests that still run, and lets engines hear which KV nobody will fetch."""
    for execution in list(resources.running_executions):
        execution.abort_for_shutdown()
    with suppress(TimeoutError):
        async with asyncio.timeout(_RELEASE_S):
            await resources.kv_releaser.wait_settled()


def _open_token_service(
    stack: AsyncExitStack,
    loop: asyncio.AbstractEventLoop,
    settings: Settings,
    fleet: Fleet,
    pools: UpstreamPools,
    deadlines: Deadlines,
) -> TokenService | None:
    if not settings.tokenizers:
        return None
    tokens = TokenService(loop, settings.tokenizers, EngineTokenizer(lambda: fleet.members, pools, deadlines))
    stack.callback(tokens.close)
    return tokens


def _make_upstream(
    reach: UpstreamFactory | None,
    registry: Registry,
    limits: UpstreamLimits,
    clock: StallAwareClock,
    instance: Instance,
) -> Upstream:
    """Makes the way to an instance that has joined."""
    if reach is not None and (upstream := reach(instance)) is not None:
        return upstream
    access = registry.credentials_for(instance.id)
    return UpstreamConnectionPool(
        instance.url,
        limits,
        access.tls,
        server_name=access.server_name,
        key=access.key,
        rank=None if instance.rank is None else instance.rank.index,
        clock=clock,
    )
