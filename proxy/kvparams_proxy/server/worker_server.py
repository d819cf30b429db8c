"""Runs the app in a worker process: on an inherited socket, under the commands of the supervisor."""

import asyncio
import signal
import socket

import uvloop
from starlette.applications import Starlette

from kvparams_proxy.server.http_server import ProxyServer, ServerSettings, tune_garbage_collection
from kvparams_proxy.workers.channel import FrameKind
from kvparams_proxy.workers.worker_link import WorkerLink

__all__ = ["serve_worker"]


def serve_worker(app: Starlette, listener: socket.socket, settings: ServerSettings, link: WorkerLink) -> None:
    """Serves until the supervisor ends this worker or exits itself, or until SIGTERM, which drains this worker alone.

    Args:
        app: the proxy, made with this `link`.
        listener: the socket of this worker's number. This process's copy is closed at the end.
        settings: how clients are served.
        link: the connection to the supervisor.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(app, listener, settings, link))


async def _serve(app: Starlette, listener: socket.socket, settings: ServerSettings, link: WorkerLink) -> None:
    server = ProxyServer(app, settings)
    commands = {FrameKind.DRAIN: server.drain, FrameKind.RETIRE: server.retire, FrameKind.CUT: server.cut}
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.drain)
    await link.open(lambda kind: commands[kind]())
    tasks = (asyncio.ensure_future(tune_garbage_collection(server)), asyncio.ensure_future(_tell_ready(server, link)))
    try:
        await server.run(listener)
    finally:
        for task in tasks:
            task.cancel()
        await link.close()


async def _tell_ready(server: ProxyServer, link: WorkerLink) -> None:
    await server.started.wait()
    link.ready()
