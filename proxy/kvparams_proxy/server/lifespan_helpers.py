"""Small parts of the app's lifespan that open nothing themselves."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from secrets import token_hex
from typing import TYPE_CHECKING, Final

from kvparams.instances import Instance, Role
from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams.routing.model_settings import ModelSettings, with_policies_of
from kvparams.version import __version__
from kvparams_proxy.checks.startup_check import StartupCheck
from kvparams_proxy.config.model_parsing import mark_of_models
from kvparams_proxy.config.settings import DEFAULT_MODES, Settings
from kvparams_proxy.config.signing import ReloadingSigner
from kvparams_proxy.coordination.fleet_sync import FleetSync
from kvparams_proxy.execution.active_modes import ActiveModes
from kvparams_proxy.execution.decode_picker import DecodePicker, ExternalDecodePicker
from kvparams_proxy.fleet.endpoint_names import EndpointNames
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.kv_events.unused_events_logger import UnusedEventsLogger
from kvparams_proxy.fleet.registry.instance_spec import KV_EVENTS_REQUIREMENT
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.requests.authentication import APIKeyAuthenticator
from kvparams_proxy.requests.endpoints import APIEndpoint
from kvparams_proxy.requests.response_ids import ResponseIds
from kvparams_proxy.server.app_plugins import AppPlugins
from kvparams_proxy.telemetry.exposition import MetricsExposition

if TYPE_CHECKING:
    from kvparams_proxy.fleet.kv_events.consumer import KVEventConsumer
    from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel

__all__ = [
    "describe_proxy",
    "id_maker",
    "open_decode_picker",
    "open_event_consumer",
    "reload_on_change",
    "response_ids",
    "role_alone",
    "run_startup_check",
    "switch_models",
    "switch_modes",
]

_KEYS_S: Final = 1.0
"""How often files of keys are looked at."""


def describe_proxy(settings: Settings) -> dict[str, object]:
    """Returns what this proxy says of itself to the others of its site."""
    mark = mark_of_models(settings.models)
    return {"version": __version__, "policy": settings.policy, **({"models": mark} if mark else {})}


def switch_modes(settings: Settings, modes: ActiveModes, source: str, wanted: Sequence[ManagerMode]) -> None:
    """Replaces the modes by those of a source, unless a flag has fixed them at the start."""
    if not settings.modes_are_fixed:
        modes.replace(wanted or DEFAULT_MODES, source)


def switch_models(
    settings: Settings,
    plugins: AppPlugins,
    fleet: Fleet,
    sync: FleetSync | None,
    source: str,
    wanted: Mapping[str, ModelSettings],
) -> None:
    """Replaces what holds for single models, except for their policies."""
    plugins.modes.replace_models(with_policies_of(wanted, settings.models), source)
    fleet.model_settings_changed()
    if sync is not None:
        sync.describe_models(mark_of_models(plugins.models.entries))


def role_alone(endpoint: APIEndpoint, local: Instance | None) -> Role | None:
    """Returns the role whose engines answer alone.

    The engine beside this proxy does what is not decode's, whatever its role is.
    """
    return endpoint.role if local is None or endpoint.role is not Role.PREFILL else local.role


def open_decode_picker(
    stack: AsyncExitStack, settings: Settings, exposition: MetricsExposition, endpoints: EndpointNames
) -> DecodePicker | None:
    """Opens the connection to an external picker, where there is one. gRPC is imported only then."""
    if settings.decode_picker is None:
        return None
    from kvparams_proxy.ext_proc.client import PickerClient

    client = PickerClient(*settings.decode_picker)
    picker = ExternalDecodePicker(asyncio.get_running_loop(), client, endpoints)
    stack.push_async_callback(picker.close)
    exposition.add(picker)
    return picker


@asynccontextmanager
async def reload_on_change(keys: APIKeyAuthenticator | ReloadingSigner | None, what: str) -> AsyncGenerator[None]:
    """Reads keys again whenever their file has changed."""
    if keys is None:
        yield
        return
    task = asyncio.create_task(keys.watch_file(_KEYS_S), name=f"follow {what}")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def run_startup_check(
    settings: Settings, plugins: AppPlugins, fleet: Fleet, pools: UpstreamPools
) -> AsyncGenerator[None]:
    """Checks engines in the background as they become ready."""
    loop = asyncio.get_running_loop()
    check = StartupCheck(
        fleet, pools, plugins.dialects, plugins.handoff_verifier, plugins.signer, loop.time, settings.local_id
    )
    task = asyncio.create_task(check.run(), name="check engines")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def response_ids(settings: Settings) -> ResponseIds:
    """Returns what makes the ids of stored responses. All proxies that share a fleet find each other's."""
    return ResponseIds(None if settings.sharing is None else settings.sharing.response_secret)


def id_maker() -> Callable[[], str]:
    """Returns a function that makes unique ids, across processes and runs. They are not secret: none costs entropy."""
    run, numbers = token_hex(12), count()
    return lambda: f"{run}-{next(numbers):x}"


def open_event_consumer(
    stack: AsyncExitStack,
    loop: asyncio.AbstractEventLoop,
    settings: Settings,
    fleet: Fleet,
    prefixes: "PrefixCacheModel | None",
    sync: FleetSync | None,
) -> "KVEventConsumer | None":
    """Subscribes to engines' KV events, where the policy looks at caches and pyzmq is installed.

    Otherwise the log says why not, once an engine that publishes events joins.
    """
    if prefixes is None:
        why = f"because the policy {settings.policy} does not use engines' caches; --policy cache_aware does"
        fleet.add_listener(UnusedEventsLogger(loop.call_soon, why))
        return None
    try:
        from kvparams_proxy.fleet.kv_events.consumer import KVEventConsumer
    except ImportError:
        fleet.add_listener(UnusedEventsLogger(loop.call_soon, f"since that {KV_EVENTS_REQUIREMENT}"))
        return None
    events = KVEventConsumer(loop, prefixes)
    if sync is not None:
        events.is_owner = sync.owns
        sync.reassign = events.reassign
    stack.callback(events.close)
    fleet.add_listener(events)
    return events
