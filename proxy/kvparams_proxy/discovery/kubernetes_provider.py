"""Finds engines in Kubernetes: the pods or endpoint slices that match a selector, as they change.

Whatever fails, the last good set stays in force, and probes decide who is usable.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, NoReturn

from kvparams_proxy.config.discovery_url import KubernetesSource
from kvparams_proxy.config.spec_parsing import parse_specs
from kvparams_proxy.config_errors import ConfigProblems
from kvparams_proxy.discovery.kubernetes_api import KubernetesAPI
from kvparams_proxy.discovery.object_watcher import ObjectWatcher
from kvparams_proxy.discovery.pod_entries import EngineEntry, endpoint_slice_entries, pod_entries
from kvparams_proxy.discovery.watched_objects import WatchedObjects, name_of
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec, SpecRules
from kvparams_proxy.fleet.registry.registry import Registry

__all__ = ["KubernetesProvider"]

_log = logging.getLogger(__name__)


class KubernetesProvider:
    """An `InstanceProvider`."""

    def __init__(self, source: KubernetesSource, api: KubernetesAPI, rules: SpecRules, name: str = "") -> None:
        """Creates a provider.

        Args:
            source: what is looked for.
            api: of its resource.
            rules: how entries are read; they may not name credentials.
            name: the source's, where another one than the selector's is to be replaced.
        """
        self.source: Final = name or f"kubernetes:{api.namespace}/{source.selector}"
        self._settings = source
        self._api = api
        self._rules = replace(rules, may_name_credentials=False)
        self._read: dict[str, _ReadObject] = {}
        """What was made of each object, by key: most have not changed when something is published."""

    def publish_initial(self, registry: Registry) -> None:
        """Publishes nothing: the first list follows at once."""

    async def watch(self, registry: Registry) -> NoReturn:
        """Lists and watches for ever."""
        await ObjectWatcher(
            self.source,
            self._api,
            lambda watched: self._publish(registry, watched),
            lambda why: registry.report_unreachable(self.source, why),
        ).run()

    def _publish(self, registry: Registry, watched: WatchedObjects) -> None:
        """Publishes what is known now. Objects that cannot be used are left out, and said once."""
        read: dict[str, _ReadObject] = {}
        specs: dict[str, InstanceSpec] = {}
        for key, document in watched.objects.items():
            known = self._read.get(key)
            if known is None or known.document is not document:
                known = self._read_object(document, "" if known is None else known.problem)
            read[key] = known
            for spec in known.specs:
                # Of two pods of one name, the one that is not being deleted is the engine.
                if spec.id not in specs or specs[spec.id].drain:
                    specs[spec.id] = spec
        self._read = read
        registry.publish(self.source, tuple(specs.values()))

    def _read_object(self, document: Mapping[str, Any], said: str) -> "_ReadObject":
        """Returns what an object names. `said`: what was said about its last version."""
        try:
            return _ReadObject(document, tuple(spec for each in self._entries(document) for spec in self._specs(each)))
        except ValueError as error:
            problem = str(error)
        if problem != said:
            _log.warning("%s: %s is not used: %s", self.source, name_of(document), problem)
        return _ReadObject(document, (), problem)

    def _entries(self, document: Mapping[str, Any]) -> Sequence[EngineEntry]:
        if self._settings.resource == "endpointslices":
            return tuple(endpoint_slice_entries(document, self._settings.ports[0]))
        return pod_entries(document, self._settings.ports)

    def _specs(self, entry: EngineEntry) -> tuple[InstanceSpec, ...]:
        problems = ConfigProblems()
        specs = parse_specs(entry.document, "", self._rules, problems)
        problems.raise_if_any()
        return tuple(replace(spec, uid=entry.uid) for spec in specs)


class _ReadObject(NamedTuple):
    """A `_ReadObject` is what was made of one version of an object."""

    document: Mapping[str, Any]
    specs: tuple[InstanceSpec, ...]
    problem: str = ""
