"""Small parts of the app's lifespan that open nothing themselves."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from secrets import token_hex
from typing import Final

from kvparams.instances import Instance, Role
from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams_proxy.config.settings import DEFAULT_MODES, Settings
from kvparams_proxy.config.signing import ReloadingSigner
from kvparams_proxy.execution.active_modes import ActiveModes
from kvparams_proxy.requests.authentication import APIKeyAuthenticator
from kvparams_proxy.requests.endpoints import APIEndpoint

__all__ = ["id_maker", "reload_on_change", "role_alone", "switch_modes"]

_KEYS_S: Final = 1.0
"""How often files of keys are looked at."""


def switch_modes(settings: Settings, modes: ActiveModes, source: str, wanted: Sequence[ManagerMode]) -> None:
    """Replaces the modes by those of a source, unless a flag has fixed them at the start."""
    if not settings.modes_are_fixed:
        modes.replace(wanted or DEFAULT_MODES, source)


def role_alone(endpoint: APIEndpoint, local: Instance | None) -> Role | None:
    """Returns the role whose engines answer alone.

    The engine beside this proxy does what is not decode's, whatever its role is.
    """
    return endpoint.role if local is None or endpoint.role is not Role.PREFILL else local.role


@asynccontextmanager
async def reload_on_change(keys: APIKeyAuthenticator | ReloadingSigner | None, what: str) -> AsyncGenerator[None]:
    """Reads keys again whenever their file has changed."""
    if keys is None:
        yield
        return
    task = asyncio.create_task(keys.watch_file(_KEYS_S), name=f"follow {what}")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def id_maker() -> Callable[[], str]:
    """Returns a function that makes unique ids, across processes and runs. They are not secret: none costs entropy."""
    run, numbers = token_hex(12), count()
    return lambda: f"{run}-{next(numbers):x}"
