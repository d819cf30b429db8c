"""The interface of sources of instances: the fleet file now, DNS and Kubernetes next.

A provider knows the complete set of instances of its own source and says it anew whenever it changes. A provider never
touches the fleet. If it fails, its last set stays in force.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from kvparams.instances import Instance
from kvparams_proxy.fleet.registry.instance_spec import spec_of
from kvparams_proxy.fleet.registry.registry import Registry

__all__ = ["InstanceProvider", "run_provider", "run_providers"]

_log = logging.getLogger(__name__)


class InstanceProvider(Protocol):
    """A source of instances."""

    @property
    def source(self) -> str:
        """The source's name, unique in the proxy: `file`, `dns:engines.example`, ..."""
        ...

    def publish_initial(self, registry: Registry) -> None:
        """Publishes the instances that are known already, if any. Does not wait."""
        ...

    async def watch(self, registry: Registry) -> None:
        """Publishes the complete set with `registry.publish` whenever it changes, and reports invalid ones, forever."""
        ...


@asynccontextmanager
async def run_providers(
    registry: Registry, instances: Sequence[Instance], providers: Iterable[InstanceProvider]
) -> AsyncGenerator[None]:
    """Fills the fleet, and follows the providers as long as the context lasts.

    It begins with `instances`, whose source is `flags`. Everything known from the start is in the fleet on entry.
    """
    if instances:
        registry.publish("flags", [spec_of(instance, registry.spec_rules) for instance in instances])
    async with AsyncExitStack() as stack:
        for provider in providers:
            await stack.enter_async_context(run_provider(provider, registry))
        yield


@asynccontextmanager
async def run_provider(provider: InstanceProvider, registry: Registry) -> AsyncGenerator[None]:
    """Runs `provider` for as long as the context lasts."""
    provider.publish_initial(registry)
    task = asyncio.create_task(provider.watch(registry), name=f"follow {provider.source}")
    task.add_done_callback(lambda done: _report(provider.source, done))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def _report(source: str, task: asyncio.Task[None]) -> None:
    """Logs that a provider has ended, which it never should. Its last set stays in force."""
    if not task.cancelled():
        _log.error("changes of %s are no longer followed; restart the proxy", source, exc_info=task.exception())
