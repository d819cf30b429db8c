"""Runs the app on uvicorn, with the protocol that lets answers go straight to the transport."""

import asyncio
import gc
import socket
import ssl

import uvicorn
import uvloop

from kvparams_proxy.app import create_app
from kvparams_proxy.downstream import RelayProtocol
from kvparams_proxy.settings import Settings

__all__ = ["serve"]

_GRACE_S = 10
"""How long streams may go on after a first Ctrl-C or SIGTERM; a second one ends them at once."""


def serve(settings: Settings, host: str, port: int, *, direct: bool = True, tls: ssl.SSLContext | None = None) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        settings: of the proxy.
        host, port: where to listen.
        direct: False leaves uvicorn's own protocol in place: the plain ASGI path.
        tls: how to trust engines behind https.
    """
    config = uvicorn.Config(
        create_app(settings, tls),
        host=host,
        port=port,
        http=RelayProtocol if direct else "httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=socket.SOMAXCONN,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_GRACE_S,
    )
    server = uvicorn.Server(config)
    config.load()
    gc.collect()
    gc.freeze()  # what was imported stays for good: no collection needs to look at it again
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve())
