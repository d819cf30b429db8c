"""Runs the app on uvloop until it is told to stop, and stops without losing a request.

Shutting down has four steps. A first SIGINT or SIGTERM has `/health` answer 503 while requests are still served, for
`drain_delay_s`; then the listener closes and requests that run go on for `grace_s`; then what still runs is cut, with
an error that says so, a line in the log, and its KV given back. A second signal goes straight to the last step.

A worker that has a successor retires instead. It stops accepting at once, but keeps idle connections open: a client may
be sending a request on one of them. A connection closes with its next answer, or when it has been idle for too long.
"""

import asyncio
import gc
import logging
import signal
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import uvloop
from starlette.applications import Starlette
from starlette.types import ASGIApp

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.event_loop.first_of import first_of
from kvparams_proxy.execution.resources import ExecutionResources
from kvparams_proxy.listening.handover import SocketHandover
from kvparams_proxy.server.connection_gauges import ConnectionGauges
from kvparams_proxy.server.connections import ClientConnections, ConnectionLimits
from kvparams_proxy.server.direct_path import DIRECT_ENDPOINTS_KEY, DirectEndpoint
from kvparams_proxy.server.draining import DrainState
from kvparams_proxy.server.file_descriptors import backlog_for, descriptor_limit
from kvparams_proxy.server.http_protocol import HTTPProtocol, ServerContext
from kvparams_proxy.service_notifier import ServiceNotifier
from kvparams_proxy.telemetry.request_record import RefusedRequest
from kvparams_proxy.ui.snapshot_feed import SnapshotFeed

__all__ = ["ProxyServer", "ServerSettings", "listen", "serve", "tune_garbage_collection"]

_log: Final = logging.getLogger(__name__)
_GC_THRESHOLDS: Final = (20_000, 20, 50)
"""A request leaves no cycles behind; the usual 700 would have requests in flight examined again and again."""
_FLUSH_S: Final = 2.0
"""For what was written last to reach clients."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the HTTP server."""

    connections: ConnectionLimits = field(default_factory=lambda: ConnectionLimits(10_000))
    drain_delay_s: float = 0.0
    """For how long requests are still taken after the first signal, while `/health` asks for none."""
    grace_s: float = 120.0
    """For how long requests may go on after that."""
    tls: ssl.SSLContext | None = None
    """For https; without it clients are spoken to in plain http."""
    direct: bool = True
    """False has every request take the way through ASGI."""


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens there; port 0 is any free one.

    Raises:
        OSError: the port is taken, or the host is not one of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog_for(descriptor_limit()))


def serve(
    app: Starlette, listener: socket.socket, settings: ServerSettings, handover: SocketHandover | None = None
) -> signal.Signals | None:
    """Serves `app` until SIGINT or SIGTERM, or until a successor serves. Returns which signal came first.

    Args:
        app: the proxy.
        listener: see `listen`; closed at the end.
        settings: how clients are served.
        handover: where the listener comes from and goes to.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_until_signal(app, listener, settings, handover or SocketHandover()))


async def _until_signal(
    app: Starlette, listener: socket.socket, settings: ServerSettings, handover: SocketHandover
) -> signal.Signals | None:
    loop = asyncio.get_running_loop()
    server = ProxyServer(app, settings)
    notifier = ServiceNotifier.from_environment()
    told: list[signal.Signals] = []

    def tell(number: signal.Signals) -> None:
        if not told:
            notifier.stopping(settings.drain_delay_s + settings.grace_s)
        told.append(number)
        server.stop()

    for number in _SIGNALS:
        loop.add_signal_handler(number, tell, number)
    ready = _tell_ready(server, notifier, listener, handover)
    tasks = [asyncio.ensure_future(each) for each in (tune_garbage_collection(server), ready)]
    try:
        await server.run(listener)
    finally:
        for task in tasks:
            task.cancel()
        notifier.close()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
    return told[0] if told else None


async def _tell_ready(
    server: "ProxyServer", notifier: ServiceNotifier, listener: socket.socket, handover: SocketHandover
) -> None:
    await server.started.wait()
    if await handover.complete([listener], server.retire):
        notifier.ready("Serving requests", is_successor=handover.has_predecessor)
    else:
        server.retire()


async def tune_garbage_collection(server: "ProxyServer") -> None:
    """Excludes the objects that exist after the start from garbage collection: they stay until the end."""
    await server.started.wait()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


class ProxyServer:
    """Serves one app on one listener."""

    def __init__(self, app: Starlette, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._retiring = asyncio.Event()
        self._stopping = asyncio.Event()
        self._cutting = asyncio.Event()
        self.started = asyncio.Event()
        """Set once requests are served."""

    def stop(self) -> None:
        """Begins to shut down; called again, ends what still runs."""
        if self._stopping.is_set():
            self._cutting.set()
        self._stopping.set()

    def drain(self) -> None:
        """Begins to shut down. A second call changes nothing."""
        self._stopping.set()

    def retire(self) -> None:
        """Stops accepting, and ends the server when all connections have closed: a successor accepts new ones."""
        self._retiring.set()

    def cut(self) -> None:
        """Ends running requests, and the server."""
        self._stopping.set()
        self._cutting.set()

    async def run(self, listener: socket.socket) -> None:
        """Serves until `stop` is called, and shuts down."""
        connections = ClientConnections(asyncio.get_running_loop(), self._settings.connections)
        try:
            async with self._app.router.lifespan_context(self._app) as state:
                await self._serve(listener, connections, state or {})
                connections.fail_incomplete_requests()
            # The end of the lifespan has answered what still ran.
        finally:
            listener.close()
            if connections.tasks:  # they write what the end of the lifespan had to say
                await asyncio.wait(connections.tasks, timeout=_FLUSH_S)
            connections.close()
            await first_of(_FLUSH_S, connections.wait_empty())
            connections.abort()
            await first_of(_FLUSH_S, connections.wait_empty())

    async def _serve(self, listener: socket.socket, connections: ClientConnections, state: Mapping[str, Any]) -> None:
        """Serves until requests have ended, or must."""
        loop = asyncio.get_running_loop()
        if (exposition := state.get("exposition")) is not None:
            exposition.add(ConnectionGauges(connections))
        service = _service(loop, self._app, state, connections, direct=self._settings.direct)
        factory = partial(HTTPProtocol, service)
        tls = self._settings.tls
        backlog = backlog_for(descriptor_limit())
        accepting = await loop.create_server(factory, sock=listener, ssl=tls, backlog=backlog)
        try:
            self.started.set()
            await first_of(None, self._stopping.wait(), self._retiring.wait())
            feed: SnapshotFeed | None = state.get("ui")
            if feed is not None:
                feed.end_viewers()  # their requests would never end
            await self._drain(connections, accepting, state.get("draining"))
        finally:
            accepting.close()

    async def _drain(
        self, connections: ClientConnections, accepting: asyncio.Server, draining: DrainState | None
    ) -> None:
        """Lets requests end, within the time there is."""
        settings = self._settings
        connections.drain()
        if not self._stopping.is_set():
            accepting.close()
            await first_of(settings.grace_s, self._stopping.wait(), connections.wait_empty())
            connections.close_idle()
        if self._stopping.is_set():
            if draining is not None:
                draining.is_draining = True
            _log.info("the proxy is shutting down; a second signal ends running requests")
            await first_of(settings.drain_delay_s, self._cutting.wait())
            accepting.close()
            connections.close_idle()
            await first_of(settings.grace_s, self._cutting.wait(), self._wait_ended(connections, draining))
        if connections:
            _log.warning("the proxy shuts down and closes %d connections", len(connections))

    async def _wait_ended(self, connections: ClientConnections, draining: DrainState | None) -> None:
        """Waits until nothing runs any more, here or in the services that drain beside this server."""
        if draining is not None:
            await draining.drain_services(self._settings.grace_s)
        await connections.wait_empty()


def _service(
    loop: asyncio.AbstractEventLoop,
    app: ASGIApp,
    state: Mapping[str, Any],
    connections: ClientConnections,
    *,
    direct: bool,
) -> ServerContext:
    resources: ExecutionResources | None = state.get("resources")

    def refused(error: ProxyError) -> None:
        if resources is not None:
            resources.metrics.refused(RefusedRequest("", "", error))

    endpoints: Mapping[bytes, DirectEndpoint] = state.get(DIRECT_ENDPOINTS_KEY, {})
    bodies = next((endpoint.bodies for endpoint in endpoints.values()), None)
    return ServerContext(loop, app, state, endpoints if direct else {}, connections, refused, bodies)
