"""Serves ASGI apps on a real uvicorn, as an engine or as the engine's server with our middleware in it."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from tests.support.waiting import until

__all__ = ["served"]


@asynccontextmanager
async def served(app: ASGIApp, *, lifespan: bool = True) -> AsyncGenerator[str]:
    """Its URL, as long as the context lasts."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="on" if lifespan else "off",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started or task.done(), 20.0)
        assert not task.done(), "the server has ended"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        async with asyncio.timeout(20):
            await task
