"""Runs the app on uvicorn, with the protocol that lets answers go straight to the transport."""

import asyncio
import gc
import socket
import ssl

import uvicorn
import uvloop
from starlette.applications import Starlette

from kvparams_proxy.clients.direct import DirectProtocol

__all__ = ["listen", "serve"]

_GC_THRESHOLDS = (20_000, 20, 50)
"""A request leaves no cycles behind; the usual 700 would have requests in flight examined again and again."""
_GRACE_S = 10
"""How long streams may go on after a first Ctrl-C or SIGTERM; a second one ends them at once."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is any free one.

    Raises:
        OSError: the port is taken, or the host is not one of this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)


def serve(app: Starlette, listener: socket.socket, *, tls: ssl.SSLContext | None = None, direct: bool = True) -> None:
    """Serve `app` until SIGINT or SIGTERM.

    Args:
        app: the proxy.
        listener: see `listen`; closed at the end.
        tls: for https; without it clients are spoken to in plain http.
        direct: False leaves uvicorn's own protocol in place: the plain ASGI path.
    """
    config = uvicorn.Config(
        app,
        http=DirectProtocol if direct else "httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_GRACE_S,
    )
    config.load()
    config.ssl = tls
    server = _Server(config)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve(sockets=[listener]))


class _Server(uvicorn.Server):
    """What is there once it has started stays for good: no garbage collection needs to look at it again."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server.startup`."""
        await super().startup(sockets)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_GC_THRESHOLDS)
