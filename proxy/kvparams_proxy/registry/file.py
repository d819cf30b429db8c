"""The fleet file as a provider: read at the start, read again whenever it changes.

It is watched by looking at it: no library, and it works where files are replaced, linked or on a network. A version is
read once it has stood still for one look, so a file that is being written is not taken for a smaller fleet. The keys
and certificates that it names are watched with it. The one rule: a version that cannot be used changes nothing.
"""

import asyncio
import logging
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple, NoReturn, TypeVar

from kvparams_proxy.registry.access import Access, Places, load_access
from kvparams_proxy.registry.document import CheckSettings, FleetDocument, read_document
from kvparams_proxy.registry.entries import Rules
from kvparams_proxy.registry.problems import ConfigError, Problems
from kvparams_proxy.registry.reconcile import portions
from kvparams_proxy.registry.sources import Registry
from kvparams_proxy.registry.yamltext import MAX_BYTES

__all__ = ["FileProvider"]

T = TypeVar("T")

_SLICE_S: Final = 0.0005
"""Of work, before requests have their turn again."""
_PORTION: Final = 4
"""Instances that change at a time, for the same reason: in a large fleet each costs a look at all."""
_log = logging.getLogger(__name__)


class _State(NamedTuple):
    """Of a file; another content has another one."""

    device: int
    inode: int
    size: int
    mtime_ns: int


class FileProvider:
    """A `kvparams_proxy.registry.providers.Provider`."""

    def __init__(self, path: Path, rules: Rules, check_settings: CheckSettings, every_s: float = 1.0) -> None:
        """Read the file a first time. Blocks.

        Args:
            path: where it is.
            rules: what was said outside of it. Relative paths in it begin where it is.
            check_settings: for its member `proxy`.
            every_s: how often it is looked at.

        Raises:
            ConfigError: it cannot be read, or everything that is wrong with it.
        """
        self.source: Final = "file"
        self._path = path
        self._rules = replace(rules, folder=path.parent)
        self._check_settings = check_settings
        self._every_s = every_s
        self._files: tuple[Path, ...] = ()
        """What the file names; watched with it."""
        state = _see(path)
        checked = _at_once(self._check(self._text()))
        self._read: tuple[_State | None, ...] = (state, *map(_see, self._files))
        """The states of the files that were read last; looked at before they were read, so that no change is missed."""
        self._seen = self._read
        """What the last look has found."""
        self.document: FleetDocument = self._load(checked)
        """The version that is in force."""

    def begin(self, registry: Registry) -> None:
        """Publish the first version."""
        registry.rules = self.document.rules
        registry.publish(self.source, self.document.entries)

    async def follow(self, registry: Registry) -> NoReturn:
        """Look at it for ever."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.look(registry)

    async def look(self, registry: Registry) -> None:
        """Publish a new version, if there is one and it stood still since the last look."""
        now = await asyncio.to_thread(self._look)
        stands, self._seen = now == self._seen, now
        if now == self._read or not stands:
            return
        self._read = now
        try:
            checked = await _in_slices(self._check(await asyncio.to_thread(self._text)))
            self._read = self._seen = (now[0], *(await asyncio.to_thread(self._look))[1:])
            document = await asyncio.to_thread(self._load, checked)
        except ConfigError as error:
            registry.refuse(self.source, error.problems)
            return
        if document.settings != self.document.settings:
            _log.warning("%s: what has changed under `proxy` holds from the next start on", self._path)
        before, self.document = self.document, document
        registry.rules = document.rules
        if document.modes != before.modes:
            registry.switch(self.source, document.modes)
        for entries in portions(before.entries, document.entries, _PORTION):
            registry.publish(self.source, entries, partly=True)
            await asyncio.sleep(0)
        registry.publish(self.source, document.entries)

    def _look(self) -> tuple[_State | None, ...]:
        return tuple(_see(path) for path in (self._path, *self._files))

    def _text(self) -> str:
        try:
            with self._path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ConfigError((f"{self._path} cannot be read: {error.strerror or 'failed'}",)) from error
        if len(raw) > MAX_BYTES:
            raise ConfigError((f"{self._path} is larger than {MAX_BYTES} bytes",))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ConfigError((f"{self._path} is not text in UTF-8",)) from None

    def _check(self, text: str) -> Generator[None, None, FleetDocument]:
        """What the text says; from then on what it names is watched."""
        document = yield from read_document(text, self._rules, self._check_settings)
        places = {document.rules.places, *(entry.places for entry in document.entries)}
        self._files = tuple(sorted({path for place in places for path in place.files}))
        return document

    def _load(self, document: FleetDocument) -> FleetDocument:
        """With the keys and certificates that it names. Blocks."""
        problems = Problems()
        loaded: dict[Places, Access] = {}
        named: list[tuple[str, Places]] = [("defaults", document.rules.places)]
        named += ((f"instance {entry.id}", entry.places) for entry in document.entries)
        for where, places in named:
            if places not in loaded:
                loaded[places] = load_access(places, where, problems)
        problems.check()
        entries = tuple(replace(entry, access=loaded[entry.places]) for entry in document.entries)
        return replace(document, rules=replace(document.rules, access=loaded[document.rules.places]), entries=entries)


def _see(path: Path) -> _State | None:
    """None where there is nothing to be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return _State(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _at_once(work: Generator[None, None, T]) -> T:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


async def _in_slices(work: Generator[None, None, T]) -> T:
    while True:
        until = perf_counter() + _SLICE_S
        while perf_counter() < until:
            try:
                next(work)
            except StopIteration as end:
                return end.value
        await asyncio.sleep(0)
