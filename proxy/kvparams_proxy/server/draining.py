"""Drain state of the proxy: set by the server before it shuts down, read by `/health`."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

__all__ = ["DrainService", "DrainState"]

DrainService = Callable[[float], Awaitable[None]]
"""Takes nothing new from now on, and returns when what runs has ended, or after so many seconds."""


class DrainState:
    """Says whether the proxy drains, and drains what runs beside the HTTP server."""

    __slots__ = ("_services", "is_draining")

    def __init__(self) -> None:
        self.is_draining = False
        """Whether no further requests should be sent to this proxy."""
        self._services: Final[list[DrainService]] = []

    def add(self, service: DrainService) -> None:
        """Adds a service that drains when the HTTP server does."""
        self._services.append(service)

    async def drain_services(self, grace_s: float) -> None:
        """Drains all services, and returns when the last one has ended."""
        await asyncio.gather(*(service(grace_s) for service in self._services))
