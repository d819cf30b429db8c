"""The proxy as a Starlette app. Everything is made in the lifespan (`lifespan.py`); nothing is at module level."""

from functools import partial

from starlette.applications import Starlette
from starlette.routing import Route

from kvparams_proxy.config.settings import Settings
from kvparams_proxy.requests.endpoints import ENDPOINTS
from kvparams_proxy.server.admin_api import admin_routes
from kvparams_proxy.server.app_plugins import load_app_plugins
from kvparams_proxy.server.asgi_request_handler import ASGIRequestHandler
from kvparams_proxy.server.lifespan import app_lifespan
from kvparams_proxy.server.public_api import EXCEPTION_HANDLERS, public_routes
from kvparams_proxy.server.stored_responses import response_routes
from kvparams_proxy.ui.ui_routes import ui_routes
from kvparams_proxy.upstream.interface import UpstreamFactory
from kvparams_proxy.workers.worker_link import WorkerLink

__all__ = ["create_app"]


def create_app(
    settings: Settings, reach: UpstreamFactory | None = None, *, worker: WorkerLink | None = None
) -> Starlette:
    """Makes the app of the proxy.

    Args:
        settings: the operator's.
        reach: asked once for each instance that joins.
        worker: connects this process to its supervisor, where it is one of several workers.

    Raises:
        PluginError: a policy, manager or dialect that is named is not registered; traces are wanted and the extra
            `tracing` is not installed.
        ValueError: an option of a mode is wrong, or the modes are not for every request.
        APIKeysError: the file of client keys cannot be used.
        SigningKeyringError: that of signing keys cannot.
    """
    app = Starlette(
        routes=[
            *(Route(each.path, ASGIRequestHandler(each.path), methods=["POST"]) for each in ENDPOINTS),
            *response_routes(),
            *public_routes(),
            *(admin_routes(settings.admin_token) if settings.admin_token is not None else ()),
            *ui_routes(settings.admin_token, settings.viewer_token),
        ],
        lifespan=partial(app_lifespan, settings, load_app_plugins(settings), reach, worker),
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.router.redirect_slashes = False  # `/v1/models/` is another path, and not served
    return app
