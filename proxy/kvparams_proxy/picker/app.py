"""The picker as an app: the lifespan of the proxy and a gRPC server; over HTTP health, metrics, admin API and page."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Final

from starlette.applications import Starlette

from kvparams.signing.partner_claim import PartnerSigner
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.discovery.kubernetes_api import KubernetesAPI
from kvparams_proxy.discovery.object_watcher import ObjectWatcher
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.fleet.endpoint_names import EndpointNames
from kvparams_proxy.picker.context import PickerContext
from kvparams_proxy.picker.handlers import PickHandler
from kvparams_proxy.picker.metrics import PickerMetrics
from kvparams_proxy.picker.objectives import ObjectiveSource, StaticObjectives, WatchedObjectives
from kvparams_proxy.picker.server import serve_picks
from kvparams_proxy.picker.settings import PickerSettings
from kvparams_proxy.requests.body import BodyBudget
from kvparams_proxy.requests.endpoints import ENDPOINTS
from kvparams_proxy.server.admin_api import admin_routes
from kvparams_proxy.server.app_plugins import AppPlugins, load_app_plugins
from kvparams_proxy.server.direct_path import DIRECT_ENDPOINTS_KEY
from kvparams_proxy.server.lifespan import app_lifespan
from kvparams_proxy.server.lifespan_helpers import role_alone
from kvparams_proxy.server.public_api import EXCEPTION_HANDLERS, public_routes
from kvparams_proxy.ui.ui_routes import ui_routes

__all__ = ["create_picker_app"]

_log: Final = logging.getLogger(__name__)


def create_picker_app(settings: Settings, picker: PickerSettings) -> Starlette:
    """Makes the app of the picker.

    Args:
        settings: as for the proxy.
        picker: what is the picker's own.

    Raises:
        PluginError, ValueError, APIKeysError, SigningKeyringError: see `kvparams_proxy.server.app.create_app`.
    """
    app = Starlette(
        routes=[
            *public_routes(),
            *(admin_routes(settings.admin_token) if settings.admin_token is not None else ()),
            *ui_routes(settings.admin_token, settings.viewer_token),
        ],
        lifespan=partial(_lifespan, settings, picker, load_app_plugins(settings)),
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.router.redirect_slashes = False
    return app


@asynccontextmanager
async def _lifespan(
    settings: Settings, picker: PickerSettings, plugins: AppPlugins, app: Starlette
) -> AsyncGenerator[Mapping[str, Any]]:
    """Is Starlette's `lifespan`, once all arguments but the last are bound."""
    async with AsyncExitStack() as stack:
        state = await stack.enter_async_context(app_lifespan(settings, plugins, None, None, app))
        context = _context(settings, picker, plugins, state, await _objectives(stack, picker))
        state["exposition"].add(context.metrics)
        state["draining"].add(await stack.enter_async_context(serve_picks(context)))
        yield {**{name: value for name, value in state.items() if name != DIRECT_ENDPOINTS_KEY}, "picker": context}


async def _objectives(stack: AsyncExitStack, picker: PickerSettings) -> ObjectiveSource | None:
    """Returns the objectives of flags and of the pool, which are followed until the stack is closed."""
    pool = picker.pool
    if pool is None or pool.pool is None:
        return StaticObjectives(picker.objectives) if picker.objectives else None
    found = WatchedObjectives(pool.pool, picker.objectives)
    name = f"objectives of pool {pool.pool}"
    api = KubernetesAPI("inferenceobjectives", "", pool.namespace)
    watcher = ObjectWatcher(
        name, api, lambda watched: found.replace(watched.objects.values()), partial(_log.warning, "%s: %s", name)
    )
    task = asyncio.create_task(watcher.run(), name=name)
    stack.push_async_callback(asyncio.wait, [task])
    stack.callback(task.cancel)
    return found


def _context(
    settings: Settings,
    picker: PickerSettings,
    plugins: AppPlugins,
    state: Mapping[str, Any],
    objectives: ObjectiveSource | None,
) -> PickerContext:
    """Makes what streams share, of what the lifespan has made."""
    resources: ExecutionResources = state["resources"]
    draining, signing = state["draining"], plugins.signing
    bodies = BodyBudget(settings.body_memory_bytes)
    signer = None
    if signing is not None and settings.signing is not None:
        signer = PartnerSigner(signing.keyring, settings.signing.audience, time.time)
    return PickerContext(
        settings=picker,
        resources=resources,
        modes=plugins.modes,
        handlers={
            each.path: PickHandler(
                resources, plugins.modes, plugins.keys, each, bodies, role_alone(each, settings.local)
            )
            for each in ENDPOINTS
        },
        keys=plugins.keys,
        registry=state["registry"],
        endpoints=EndpointNames(resources.fleet, resources.pools),
        metrics=PickerMetrics(),
        objectives=objectives,
        signer=signer,
        is_draining=lambda: bool(draining.is_draining),
    )
