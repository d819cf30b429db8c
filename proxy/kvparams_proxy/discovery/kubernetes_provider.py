"""Finds engines in Kubernetes: lists the pods or endpoint slices that match a selector, and follows their changes.

Whatever fails, the last good set stays in force, and probes decide who is usable. A list that is suddenly empty is
believed when a second one, a moment later, is empty as well.
"""

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final, NamedTuple, NoReturn

from kvparams_proxy.config.discovery_url import KubernetesSource
from kvparams_proxy.config.spec_parsing import parse_spec
from kvparams_proxy.config_errors import ConfigProblems
from kvparams_proxy.discovery.kubernetes_api import ExpiredVersion, KubernetesAPI, KubernetesError
from kvparams_proxy.discovery.pod_entries import EngineEntry, endpoint_slice_entries, pod_entry
from kvparams_proxy.discovery.watched_objects import WatchedObjects, name_of
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec, SpecRules
from kvparams_proxy.fleet.registry.registry import Registry

__all__ = ["KubernetesProvider"]

_log = logging.getLogger(__name__)

_RELIST_S: Final = 300
"""A watch ends after so long, and everything is listed anew."""
_RELIST_EMPTY_S: Final = 10
"""The same where there is no engine at all: an API that was wrong about that is found out soon."""
_SILENCE_S: Final = 90.0
"""The server sends a bookmark every minute; a connection that says nothing for longer is lost."""
_BATCH_S: Final = 0.5
"""Changes within so long are published together."""
_CONFIRM_S: Final = 1.0
"""Between two lists of which the second has to confirm that the first was rightly empty."""
_FIRST_BACKOFF_S: Final = 0.2
_LONGEST_BACKOFF_S: Final = 10.0


class KubernetesProvider:
    """An `InstanceProvider`."""

    def __init__(self, source: KubernetesSource, api: KubernetesAPI, rules: SpecRules) -> None:
        """`rules`: how entries are read; they may not name credentials."""
        self.source: Final = f"kubernetes:{api.namespace}/{source.selector}"
        self._settings = source
        self._api = api
        self._rules = replace(rules, may_name_credentials=False)
        self._watched = WatchedObjects()
        self._read: dict[str, _ReadObject] = {}
        """What was made of each object, by key: most have not changed when something is published."""
        self._random = random.Random()

    def publish_initial(self, registry: Registry) -> None:
        """Publishes nothing: the first list follows at once."""

    async def watch(self, registry: Registry) -> NoReturn:
        """Lists and watches for ever."""
        backoff_s = 0.0
        try:
            while True:
                try:
                    await self._list(registry)
                    backoff_s = 0.0
                    await self._follow(registry)
                except ExpiredVersion:
                    continue
                except KubernetesError as error:
                    registry.report_unreachable(self.source, str(error))
                    backoff_s = min(_LONGEST_BACKOFF_S, max(_FIRST_BACKOFF_S, 2 * backoff_s))
                    await asyncio.sleep(backoff_s * self._random.uniform(0.5, 1.0))
        finally:
            await self._api.close()

    async def _list(self, registry: Registry) -> None:
        """Lists everything and publishes it."""
        found = await self._api.list()
        if not found.objects and len(self._watched):
            await asyncio.sleep(_CONFIRM_S)
            found = await self._api.list()
        self._watched.replace(found.objects, found.version)
        self._publish(registry)

    async def _follow(self, registry: Registry) -> None:
        """Applies events until it is time to list anew.

        A watch that is cut, or that the server ends, goes on from the last event.
        """
        loop = asyncio.get_running_loop()
        relist_s = _RELIST_S if len(self._watched) else _RELIST_EMPTY_S
        end_s = loop.time() + relist_s * self._random.uniform(0.8, 1.2)
        failures = 0
        while (left_s := end_s - loop.time()) > 0:
            before = self._watched.version
            try:
                await self._watch_once(registry, int(left_s) + 1)
                failures = 0
            except ExpiredVersion:
                raise
            except KubernetesError as error:
                failures = 0 if self._watched.version != before else failures + 1
                if failures > 3:
                    raise
                _log.info("%s: %s; it goes on from the last event", self.source, error)
            if self._watched.version == before:
                await asyncio.sleep(_FIRST_BACKOFF_S * self._random.uniform(0.5, 1.0))

    async def _watch_once(self, registry: Registry, seconds: int) -> None:
        publisher: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        try:
            async with aclosing(self._api.watch(self._watched.version, seconds, _SILENCE_S)) as events:
                async for event in events:
                    is_due = publisher is None or publisher.when() < loop.time()
                    if self._watched.apply(event.kind, event.object) and is_due:
                        publisher = loop.call_later(_BATCH_S, self._publish, registry)
        finally:
            if publisher is not None:
                publisher.cancel()
                self._publish(registry)

    def _publish(self, registry: Registry) -> None:
        """Publishes what is known now. Objects that cannot be used are left out, and said once."""
        read: dict[str, _ReadObject] = {}
        specs: dict[str, InstanceSpec] = {}
        for key, document in self._watched.objects.items():
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
            return _ReadObject(document, tuple(self._spec(each) for each in self._entries(document)))
        except ValueError as error:
            problem = str(error)
        if problem != said:
            _log.warning("%s: %s is not used: %s", self.source, name_of(document), problem)
        return _ReadObject(document, (), problem)

    def _entries(self, document: Mapping[str, Any]) -> Sequence[EngineEntry]:
        if self._settings.resource == "endpointslices":
            return tuple(endpoint_slice_entries(document, self._settings.port))
        entry = pod_entry(document, self._settings.port)
        return () if entry is None else (entry,)

    def _spec(self, entry: EngineEntry) -> InstanceSpec:
        problems = ConfigProblems()
        spec = parse_spec(entry.document, "", self._rules, problems)
        problems.raise_if_any()
        assert spec is not None
        return replace(spec, uid=entry.uid)


class _ReadObject(NamedTuple):
    """A `_ReadObject` is what was made of one version of an object."""

    document: Mapping[str, Any]
    specs: tuple[InstanceSpec, ...]
    problem: str = ""
