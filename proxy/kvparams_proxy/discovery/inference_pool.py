"""Finds the engines of an InferencePool of the Gateway API: the pods that it selects, behind each of its ports.

Source: gateway-api-inference-extension v1.0.0, `api/v1/inferencepool_types.go`.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, NoReturn, cast

from kvparams_proxy.config.discovery_url import KubernetesSource
from kvparams_proxy.config_errors import ConfigError
from kvparams_proxy.discovery.kubernetes_api import KubernetesAPI
from kvparams_proxy.discovery.kubernetes_provider import KubernetesProvider
from kvparams_proxy.discovery.object_watcher import ObjectWatcher
from kvparams_proxy.discovery.watched_objects import WatchedObjects, name_of
from kvparams_proxy.fleet.registry.registry import Registry

__all__ = ["InferencePoolProvider", "pods_of_pool"]

_log = logging.getLogger(__name__)

_MOST_PORTS: Final = 8
_MAX_PORT: Final = 65535


class InferencePoolProvider:
    """Follows a pool and its pods: an `InstanceProvider`."""

    def __init__(
        self, name: str, api: KubernetesAPI, make_pods: Callable[[KubernetesSource, str], KubernetesProvider]
    ) -> None:
        """Creates a provider.

        Args:
            name: the pool's.
            api: of the pools in its namespace.
            make_pods: returns a provider of these pods, under this name of a source.
        """
        self.source: Final = f"kubernetes:{api.namespace}/pool {name}"
        self._name = name
        self._api = api
        self._make_pods = make_pods
        self._pods: KubernetesSource | None = None
        self._task: asyncio.Task[None] | None = None
        self._problem = ""

    def publish_initial(self, registry: Registry) -> None:
        """Publishes nothing: the pool comes first."""

    async def watch(self, registry: Registry) -> NoReturn:
        """Follows the pool, and the pods that it selects, for ever."""
        watcher = ObjectWatcher(
            self.source,
            self._api,
            lambda watched: self._look(registry, watched),
            lambda why: registry.report_unreachable(self.source, why),
        )
        try:
            await watcher.run()
        finally:
            if self._task is not None:
                self._task.cancel()
                with suppress(asyncio.CancelledError):
                    await self._task

    def _look(self, registry: Registry, watched: WatchedObjects) -> None:
        """Follows other pods if the pool says so. Without a pool that can be used, the last ones are kept."""
        found = next((each for each in watched.objects.values() if name_of(each) == self._name), None)
        try:
            if found is None:
                raise ValueError("there is no InferencePool of this name")
            pods = pods_of_pool(found)
            provider = None if pods == self._pods else self._make_pods(pods, self.source)
        except (ValueError, ConfigError) as error:
            registry.report_unreachable(self.source, str(error))
            if str(error) != self._problem:
                _log.warning("%s: %s", self.source, error)
            self._problem = str(error)
            return
        self._problem = ""
        if provider is not None:
            self._pods = pods
            self._task = asyncio.create_task(self._follow(self._task, provider, registry))

    async def _follow(self, before: asyncio.Task[None] | None, pods: KubernetesProvider, registry: Registry) -> None:
        """Follows pods in place of those before, whose instances stay until the new ones are known."""
        if before is not None:
            before.cancel()
            await asyncio.wait([before])
        await pods.watch(registry)


def pods_of_pool(pool: Mapping[str, Any]) -> KubernetesSource:
    """Returns the pods that a pool selects.

    Raises:
        ValueError: it does not say which, or behind which ports.
    """
    spec = _mapping(pool, "spec")
    labels = _mapping(_mapping(spec, "selector"), "matchLabels")
    if not labels or not all(isinstance(value, str) for value in labels.values()):
        raise ValueError("the InferencePool selects no pods: spec.selector.matchLabels must have labels")
    found = spec.get("targetPorts")
    listed = cast("list[object]", found) if isinstance(found, list) else []
    ports = [cast("dict[str, object]", each).get("number") for each in listed if isinstance(each, dict)]
    are_ports = len(ports) == len(listed) and all(type(port) is int and 0 < port <= _MAX_PORT for port in ports)
    if not are_ports or not 0 < len(ports) <= _MOST_PORTS:
        raise ValueError(f"spec.targetPorts of the InferencePool must have 1 to {_MOST_PORTS} ports")
    selector = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
    return KubernetesSource(selector, ports=tuple(cast("list[int]", ports)))


def _mapping(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}
