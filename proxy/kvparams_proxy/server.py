"""Runs the app on uvicorn, with the protocol that lets answers go straight to the transport."""

import asyncio
import gc
import socket

import uvicorn
import uvloop
from starlette.applications import Starlette

from kvparams_proxy.downstream import RelayProtocol

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


def serve(app: Starlette, listener: socket.socket, *, direct: bool = True) -> None:
    """Serve `app` until SIGINT or SIGTERM.

    Args:
        app: the proxy.
        listener: see `listen`; closed at the end.
        direct: False leaves uvicorn's own protocol in place: the plain ASGI path.
    """
    config = uvicorn.Config(
        app,
        http=RelayProtocol if direct else "httptools",
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
    server = uvicorn.Server(config)
    config.load()
    gc.collect()
    gc.freeze()  # what was imported stays for good: no collection needs to look at it again
    gc.set_threshold(*_GC_THRESHOLDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve(sockets=[listener]))
