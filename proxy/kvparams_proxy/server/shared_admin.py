"""Puts changes by the admin API of one proxy to use at all proxies of its site.

What a proxy cannot use (an id that its fleet file names, a connector that it does not know) is logged and left out: the
other proxies keep it.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvparams_proxy.config.mode_parsing import mode_document, parse_modes
from kvparams_proxy.config.spec_parsing import parse_specs
from kvparams_proxy.config_errors import ConfigError, ConfigProblems
from kvparams_proxy.coordination.settings_sync import SettingsSync
from kvparams_proxy.execution.active_modes import ActiveModes
from kvparams_proxy.fleet.registry.credentials import load_credentials
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec, rank_id, rank_stream
from kvparams_proxy.fleet.registry.registry import Registry

__all__ = ["ADMIN_SOURCE", "SharedAdmin", "admin_specs", "checked_spec", "checked_specs", "spec_document"]

ADMIN_SOURCE: Final = "admin"
"""The name of this source."""
_log: Final = logging.getLogger(__name__)


class SharedAdmin:
    """Tells changes to the other proxies, and makes theirs."""

    def __init__(self, registry: Registry, modes: ActiveModes, settings: SettingsSync | None) -> None:
        """`settings` brings the changes of siblings here from now on; None where there are no other proxies."""
        self._registry = registry
        self._modes = modes
        self._settings = settings
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting_drains: dict[str, bool] = {}
        """Drains of instances that are not known here yet."""
        if settings is not None:
            settings.apply = self._apply

    def instance_changed(self, spec: InstanceSpec) -> None:
        """Tells that an instance was added or changed here."""
        self._tell(f"instance/{spec.id}", spec_document(spec))

    def instance_removed(self, id: str) -> None:
        """Tells that an instance was removed here."""
        self._tell(f"instance/{id}", None)
        self._tell(f"drain/{id}", None)  # another instance of this name is not drained

    def drained(self, id: str, on: bool) -> None:
        """Tells that an instance was drained here, or its drain was ended."""
        self._tell(f"drain/{id}", on)

    def modes_changed(self) -> None:
        """Tells which modes are active."""
        self._tell("modes", [mode_document(mode) for mode in self._modes.active])

    async def close(self) -> None:
        """Ends what is under way."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _tell(self, name: str, value: object) -> None:
        if self._settings is None:
            return
        try:
            self._settings.write(name, value)
        except ValueError as error:
            _log.error("a change by the admin API holds at this proxy alone: %s", error)

    def _apply(self, name: str, value: object) -> None:
        kind, _, id = name.partition("/")
        if kind == "drain":
            if isinstance(value, bool):
                self._drain(id, value)
            else:
                self._waiting_drains.pop(id, None)
        else:
            task = asyncio.get_running_loop().create_task(self._change(kind, id, value), name=f"apply {name}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _change(self, kind: str, id: str, value: object) -> None:
        try:
            if kind == "modes":
                problems = ConfigProblems()
                wanted = parse_modes(value, "modes", problems)
                problems.raise_if_any()
                self._modes.replace(wanted, "another proxy's admin API")
            elif kind == "instance":
                await self._change_instance(id, value)
        except (ConfigError, ValueError) as error:
            _log.warning("a change by another proxy's admin API cannot be made here: %s", error)

    async def _change_instance(self, id: str, document: object) -> None:
        registry = self._registry
        others = [spec for spec in admin_specs(registry) if spec.id != id]
        if document is None:
            registry.publish(ADMIN_SOURCE, others)
            return
        spec = await checked_spec(registry, document, id)
        others = [spec for spec in admin_specs(registry) if spec.id != id]  # they may have changed meanwhile
        registry.publish(ADMIN_SOURCE, [*others, spec])
        drain = self._waiting_drains.pop(id, None)
        if drain is not None:
            self._drain(id, drain)

    def _drain(self, id: str, on: bool) -> None:
        if id in self._registry.owned:
            self._registry.drain(id, on)
        else:
            self._waiting_drains[id] = on


async def checked_spec(registry: Registry, document: object, id: str) -> InstanceSpec:
    """Checks an entry of this instance, or of the ranks of which it is one: see `checked_specs`.

    Raises:
        ConfigError: it cannot be used.
    """
    for spec in await checked_specs(registry, document):
        if spec.id == id:
            return spec
    raise ConfigError((f"id: the entry names no instance {id}",))


async def checked_specs(registry: Registry, document: object) -> tuple[InstanceSpec, ...]:
    """Checks an entry that came over the network, and loads its credentials. With ranks it is several instances.

    Raises:
        ConfigError: it cannot be used.
    """
    problems = ConfigProblems()
    rules = replace(registry.spec_rules, may_name_credentials=False)
    specs = parse_specs(document, "", rules, problems)
    problems.raise_if_any()
    entry = specs[0]
    if registry.is_local(entry):
        raise ConfigError(
            (f"role: the engine beside this sidecar does all {entry.role}; add only engines of the other role",)
        )
    if entry.credential_sources != rules.credential_sources:
        access = await asyncio.to_thread(load_credentials, entry.credential_sources, "the instance", problems)
        problems.raise_if_any()
        specs = tuple(replace(spec, credentials=access) for spec in specs)
    return specs


def admin_specs(registry: Registry) -> Sequence[InstanceSpec]:
    """Returns the instances that were added by the admin API."""
    state = registry.sources.get(ADMIN_SOURCE)
    return () if state is None else state.desired_specs


def spec_document(spec: InstanceSpec) -> dict[str, object]:
    """Returns an entry as it would be written, without credentials. Of a rank it is the entry of all ranks."""
    document: dict[str, object] = {"id": spec.id, "url": spec.url, "role": spec.role.value}
    document |= {"connector": spec.dialect, "labels": dict(spec.labels), "store": spec.store or False}
    if spec.addresses:
        document["addresses"] = list(spec.addresses)
    for name in ("bootstrap", "kv_events", "kv_events_replay", "group", "compatibility"):
        if (value := getattr(spec, name)) is not None:
            document[name] = value
    if spec.drain:
        document["drain"] = True
    if (rank := spec.rank) is not None:
        document["id"] = spec.id.removesuffix(rank_id("", rank.number))
        document["ranks"] = rank.count if rank.start == 0 else f"{rank.start}-{rank.start + rank.count - 1}"
        for name in ("kv_events", "kv_events_replay"):
            if name in document:
                document[name] = rank_stream(getattr(spec, name), -rank.number)
    return document
