"""The fleet file as a provider: read at the start, read again whenever it changes.

It is watched by looking at it: no library, and it works where files are replaced, linked or on a network. A version is
read once it has stood still for one look, so a file that is being written is not taken for a smaller fleet. The keys
and certificates that it names are watched with it. A version that cannot be used changes nothing.
"""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from kvparams.errors import PluginError
from kvparams_proxy.config.fleet_document import FleetDocument, parse_fleet_document
from kvparams_proxy.config.yaml_reader import MAX_YAML_BYTES
from kvparams_proxy.config_errors import ConfigError, ConfigProblems
from kvparams_proxy.fleet.registry.credentials import CredentialSources, EngineCredentials, load_credentials
from kvparams_proxy.fleet.registry.instance_spec import SpecRules
from kvparams_proxy.fleet.registry.reconcile import rollout_steps
from kvparams_proxy.fleet.registry.registry import Registry

__all__ = ["FleetFileProvider"]

_PORTION: Final = 4
"""Instances that change at a time, before requests have their turn again: each costs a look at the whole fleet."""
_log = logging.getLogger(__name__)


class _FileState(NamedTuple):
    """The state of a file. Another content has another state."""

    device: int
    inode: int
    size: int
    mtime_ns: int


class FleetFileProvider:
    """A `kvparams_proxy.fleet.registry.providers.Provider`."""

    def __init__(self, path: Path, rules: SpecRules, every_s: float = 1.0) -> None:
        """Read the file a first time. Blocks.

        Args:
            path: where it is.
            rules: what was said outside of it. Relative paths in it begin where it is.
            every_s: how often it is looked at.

        Raises:
            ConfigError: it cannot be read, or everything that is wrong with it.
        """
        self.source: Final = "file"
        self._path = path
        self._rules = replace(rules, folder=path.parent)
        self._every_s = every_s
        self._files: tuple[Path, ...] = ()
        """What the file names; watched with it."""
        self._read = self._look()
        """The states of the files that were read last; looked at before they were read, so that no change is missed."""
        self._seen = self._read
        """What the last look has found."""
        self.document: FleetDocument = self._read_version()
        """The version that is in force."""

    def publish_initial(self, registry: Registry) -> None:
        """Publish the first version."""
        registry.spec_rules = self.document.rules
        registry.publish(self.source, self.document.entries)

    async def watch(self, registry: Registry) -> NoReturn:
        """Look at it for ever."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.reload_if_changed(registry)

    async def reload_if_changed(self, registry: Registry) -> None:
        """Publish a new version, if there is one and it stood still since the last look."""
        now = await asyncio.to_thread(self._look)
        stands, self._seen = now == self._seen, now
        if now == self._read or not stands:
            return
        self._read = now
        try:
            document = await asyncio.to_thread(self._read_version)
        except ConfigError as error:
            registry.report_invalid(self.source, error.problems)
            return
        if document.settings != self.document.settings:
            _log.warning("%s: changes under `proxy` take effect at the next start", self._path)
        if _policies(document) != _policies(self.document):
            _log.warning("%s: changes of `policy` under `models` take effect at the next start", self._path)
        before = self.document
        try:
            if document.modes != before.modes:
                registry.switch_modes(self.source, document.modes)
                self.document = replace(before, modes=document.modes)
            if document.models != before.models:
                registry.switch_models(self.source, document.models)
        except (PluginError, ValueError) as error:  # what its own check has not found
            registry.report_invalid(self.source, (str(error),))
            return
        self.document = document
        registry.spec_rules = document.rules
        for entries in rollout_steps(before.entries, document.entries, _PORTION):
            registry.publish(self.source, entries, partly=True)
            await asyncio.sleep(0)
        registry.publish(self.source, document.entries)

    def _look(self) -> tuple[_FileState | None, ...]:
        return tuple(_see(path) for path in (self._path, *self._files))

    def _text(self) -> str:
        try:
            with self._path.open("rb") as file:
                raw = file.read(MAX_YAML_BYTES + 1)
        except OSError as error:
            raise ConfigError((f"{self._path} cannot be read: {error.strerror or 'failed'}",)) from error
        if len(raw) > MAX_YAML_BYTES:
            raise ConfigError((f"{self._path} is larger than {MAX_YAML_BYTES} bytes",))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ConfigError((f"{self._path} is not text in UTF-8",)) from None

    def _read_version(self) -> FleetDocument:
        """Reads the file, and the keys and certificates that it names; from then on these are watched. Blocks."""
        document = parse_fleet_document(self._text(), self._rules)
        places = {document.rules.credential_sources, *(entry.credential_sources for entry in document.entries)}
        self._files = tuple(sorted({path for place in places for path in place.files}))
        self._read = self._seen = (self._read[0], *map(_see, self._files))
        return self._with_credentials(document)

    def _with_credentials(self, document: FleetDocument) -> FleetDocument:
        problems = ConfigProblems()
        loaded: dict[CredentialSources, EngineCredentials] = {}
        named: list[tuple[str, CredentialSources]] = [("defaults", document.rules.credential_sources)]
        named += ((f"instance {entry.id}", entry.credential_sources) for entry in document.entries)
        for where, places in named:
            if places not in loaded:
                loaded[places] = load_credentials(places, where, problems)
        problems.raise_if_any()
        entries = tuple(replace(entry, credentials=loaded[entry.credential_sources]) for entry in document.entries)
        return replace(
            document,
            rules=replace(document.rules, credentials=loaded[document.rules.credential_sources]),
            entries=entries,
        )


def _policies(document: FleetDocument) -> dict[str, str]:
    return {name: each.policy for name, each in document.models.items() if each.policy is not None}


def _see(path: Path) -> _FileState | None:
    """None where there is nothing to be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return _FileState(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
