"""The settings of the plugin, as they stand in LMCache's own configuration.

    remote_storage_plugins: ["kvparams"]
    extra_config:
      remote_storage_plugin.kvparams.module_path: kvparams_connectors.engines.lmcache.plugin
      remote_storage_plugin.kvparams.class_name: KVParamsAdapter
      remote_storage_plugin.kvparams.store: valkey://host:6379

More, all optional: `revision` of the weights, `deadline_ms` of a put or get (5000), `lookup_ms` (1000), `seal_keys`, a
key file for authenticated pages. A setting that is not known here is refused, with the known ones listed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvparams.page_auth import PageAuthKeys
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.transfer.page_auth_keys import read_page_auth_keys

__all__ = ["PLUGIN", "PluginSettings"]

PLUGIN: Final = "kvparams"
"""What the plugin is called in `remote_storage_plugins`, alone or as `kvparams.ANYTHING` where there are several."""

_LMCACHES: Final = ("module_path", "class_name")
_KNOWN: Final = ("store", "revision", "deadline_ms", "lookup_ms", "seal_keys")
_DEADLINE_S: Final = 5.0
_LOOKUP_S: Final = 1.0
_MAX_MS: Final = 600_000


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """A `PluginSettings` holds the configured settings."""

    store: str = field(repr=False)
    """The store's URL."""
    revision: str = ""
    deadline_s: float = _DEADLINE_S
    """Of a put or get."""
    lookup_s: float = _LOOKUP_S
    """Of the question what is there."""
    seal_keys: Path | None = None

    @classmethod
    def of(cls, extra_config: Mapping[str, object] | None, plugin: str = PLUGIN) -> "PluginSettings":
        """Read the settings of the plugin called `plugin`.

        Raises:
            StoreError: no store, a setting that is not known, or a value that cannot be meant.
        """
        start = f"remote_storage_plugin.{plugin}."
        mine = {name[len(start) :]: value for name, value in (extra_config or {}).items() if name.startswith(start)}
        # With a dot in it, it belongs to another one: `kvparams.second`.
        found = {name: value for name, value in mine.items() if "." not in name}
        unknown = sorted(set(found) - {*_KNOWN, *_LMCACHES})
        if unknown:
            raise StoreError(f"LMCache plugin: unknown setting {', '.join(unknown)}; known: {', '.join(_KNOWN)}")
        store, revision, keys = found.get("store"), found.get("revision", ""), found.get("seal_keys")
        if not isinstance(store, str):
            raise StoreError(f"LMCache plugin: {start}store is not there; it is the store's URL: valkey://host:6379")
        if not isinstance(revision, str) or not (keys is None or isinstance(keys, str)):
            raise StoreError("LMCache plugin: revision and seal_keys are texts")
        return cls(
            store,
            revision,
            _seconds(found, "deadline_ms", _DEADLINE_S),
            _seconds(found, "lookup_ms", _LOOKUP_S),
            None if keys is None else Path(keys),
        )

    def read_seals(self) -> PageAuthKeys | None:
        """The keys of authenticated pages. Raises PageAuthError if they cannot be read."""
        return None if self.seal_keys is None else read_page_auth_keys(self.seal_keys)


def _seconds(found: Mapping[str, object], name: str, default_s: float) -> float:
    value = found.get(name)
    if value is None:
        return default_s
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_MS:
        raise StoreError(f"LMCache plugin: {name}={value!r} is not a whole number in [1, {_MAX_MS}]")
    return value / 1000
