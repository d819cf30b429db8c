"""The proxy as ASGI middleware around an engine's own app: the engine's server splits the work itself.

    app = DisaggregatedServerMixin(
        engine_app,
        Settings((me, *decode_engines), beside=me.id),  # `me`: Instance("p0", ..., Role.PREFILL, "http://10.0.0.1:8000")
    )

A caller without the engines' key is a client. It may use the proxy's endpoints and read a few that reveal no address;
its KV fields reach no engine. Legs of other proxies carry the key and go to the app unchanged.
"""

import asyncio
from collections.abc import Iterable, MutableMapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Final, cast

from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvparams.instances import Instance
from kvparams.routing.managers.local_remote import LOCAL_MANAGERS
from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams_proxy.config.settings import DEFAULT_MODES, Settings
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.endpoints import ENDPOINTS
from kvparams_proxy.secret import Secret
from kvparams_proxy.server.app import create_app
from kvparams_proxy.sidecar.inprocess import InProcessUpstream
from kvparams_proxy.upstream.interface import Upstream

__all__ = ["DisaggregatedServerMixin"]

_SERVED: Final = frozenset(endpoint.path for endpoint in ENDPOINTS)
_READING: Final = ("GET", "HEAD", "OPTIONS")
_READ: Final = frozenset(("/v1/models", "/health", "/ping", "/version", "/metrics"))
"""What clients may read of the app. Engines tell addresses and settings elsewhere: vLLM 0.32.0 at /server_info and
/kv_event_sources, SGLang 0.5.23 at /server_info."""
_OURS: Final = "/kvparams"
"""Under it stands what else the proxy serves: /kvparams/health, /kvparams/metrics, /kvparams/admin."""
_POLICY_VIOLATION: Final = 1008
"""RFC 6455, section 7.4.1."""
_KEPT: Final = ("app", "state")
"""Of the lifespan's scope, what every request's scope has too."""


class DisaggregatedServerMixin:
    """See the module."""

    def __init__(
        self, app: ASGIApp, settings: Settings, *, key: Secret | None = None, passed: Iterable[str] = ()
    ) -> None:
        """Wraps the engine's app.

        Args:
            app: the engine's.
            settings: the proxy's; `beside` names the instance that `app` is. Its URL is where other engines find it.
                Without modes it is the one for beside an engine of its role.
            key: who shows it, as `Authorization: Bearer`, is another proxy and no client. Without one no other proxy
                can send legs here.
            passed: beginnings of further paths that clients may use, such as `/v1/audio/`, web sockets as well;
                nothing is taken out of what they send there.

        Raises:
            ValueError: the settings name no instance that this is beside, or one that does the work alone.
            PluginError, APIKeysError, SigningKeyringError: see `create_app`.
        """
        if settings.local is None:
            raise ValueError("the settings do not say which instance this app is: Settings(..., beside=ID)")
        if settings.local.role not in LOCAL_MANAGERS:
            raise ValueError(
                f"an engine with the role {settings.local.role} cannot split requests; its role must be prefill "
                "or decode"
            )
        if settings.modes == DEFAULT_MODES:
            settings = replace(
                settings, modes=(ManagerMode(LOCAL_MANAGERS[settings.local.role]),), modes_are_fixed=True
            )
        self._app = app
        self._id = settings.local_id
        self._key = key
        self._passed = tuple(passed)
        self._proxy: Starlette = create_app(settings, self._reach)
        self._state: dict[str, Any] | None = None
        self._base: dict[str, Any] = {}
        self._calls: list[InProcessUpstream] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one scope."""
        if scope["type"] == "lifespan":
            await _CombinedLifespan(self, scope, receive, send).run()
        elif self._is_proxy(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._socket(scope, receive, send)
        else:
            await self._client(scope, receive, send)

    async def enter(self, scope: Scope, stack: AsyncExitStack) -> None:
        """Starts the proxy in the lifespan, after the app has started."""
        self._base = {name: scope[name] for name in _KEPT if name in scope}
        stack.push_async_callback(self._ended)
        state = await stack.enter_async_context(self._proxy.router.lifespan_context(self._proxy))
        self._state = dict(cast("dict[str, Any]", state))

    async def _ended(self) -> None:
        self._state = None
        calls, self._calls = self._calls, []
        await asyncio.gather(*(call.wait_closed() for call in calls))

    def _reach(self, instance: Instance) -> Upstream | None:
        if instance.id != self._id:
            return None
        made = InProcessUpstream(self._app, self._base, key=self._key)
        self._calls.append(made)
        return made

    def _is_proxy(self, scope: Scope) -> bool:
        if self._key is None:
            return False
        for name, value in scope["headers"]:
            if name == b"authorization":
                kind, _, text = value.partition(b" ")
                return kind.lower() == b"bearer" and self._key.matches(text.strip())
        return False

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _path(scope).startswith(self._passed):
            await self._app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": "not for clients here"})

    async def _client(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _path(scope)
        reads = path in _READ and scope["method"] in _READING
        if path in _SERVED:
            await self._serve(scope, receive, send)
        elif path.startswith(f"{_OURS}/"):
            await self._serve({**scope, "root_path": scope.get("root_path", "") + _OURS}, receive, send)
        elif reads or path.startswith(self._passed):
            await self._app(scope, receive, send)
        else:
            message = f"{scope['method']} {path[:200]} is not for clients here"
            await _refuse(ProxyError(404, "not_found_error", message), send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._state is None:
            raise RuntimeError("the server has not started the app's lifespan: DisaggregatedServerMixin needs it")
        await self._proxy({**scope, "state": dict(self._state)}, receive, send)


class _CombinedLifespan:
    """Combines both lifespans: the app's encloses the proxy's, whose probes and last legs need the app."""

    def __init__(self, owner: DisaggregatedServerMixin, scope: Scope, receive: Receive, send: Send) -> None:
        self._owner = owner
        self._scope = scope
        self._receive = receive
        self._send = send
        self._stack = AsyncExitStack()
        self._asked = False
        """Whether the server has asked for the start."""
        self._answered = False

    async def run(self) -> None:
        """Runs until the end of the server."""
        async with self._stack:
            try:
                await self._owner._app(self._scope, self._hear, self._say)  # pyright: ignore[reportPrivateUsage]
            except Exception:
                if self._answered:
                    raise
            if not self._answered:  # the app knows no lifespan, which ASGI allows
                await self._alone()

    async def _hear(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        self._asked = True
        if message["type"] == "lifespan.shutdown":
            await self._stack.aclose()
        return message

    async def _say(self, message: Message) -> None:
        self._answered = True
        if message["type"] == "lifespan.startup.complete":
            await self._owner.enter(self._scope, self._stack)
        await self._send(message)

    async def _alone(self) -> None:
        if not self._asked:
            await self._receive()
        await self._say({"type": "lifespan.startup.complete"})
        await self._hear()
        await self._send({"type": "lifespan.shutdown.complete"})


def _path(scope: Scope) -> str:
    return cast("str", scope["path"]).removeprefix(cast("str", scope.get("root_path", "")))


async def _refuse(error: ProxyError, send: Send) -> None:
    body = error.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
