"""The settings of the plugin, as they stand in LMCache's own configuration.

    remote_storage_plugins: ["kvparams"]
    extra_config:
      remote_storage_plugin.kvparams.module_path: kvparams_connectors.engines.lmcache.plugin
      remote_storage_plugin.kvparams.class_name: KVParamsAdapter
      remote_storage_plugin.kvparams.store: valkey://host:6379

More, all optional: `revision` of the weights, `deadline_ms` of a put or get (5000), `seal_keys`, a key file for
authenticated pages.
"""

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import Field

from kvparams.settings_model import Allowed
from kvparams_connectors.engines.engine_settings import EngineSettings

__all__ = ["PLUGIN", "PluginSettings"]

PLUGIN: Final = "kvparams"
"""What the plugin is called in `remote_storage_plugins`, alone or as `kvparams.ANYTHING` where there are several."""

_LMCACHES: Final = frozenset({"module_path", "class_name"})
_MAX_MS: Final = 600_000
_Milliseconds = Annotated[int, Field(ge=1, le=_MAX_MS), Allowed(f"a whole number from 1 to {_MAX_MS}")]


class PluginSettings(EngineSettings):
    """Holds what was configured; every field is a setting of that name."""

    deadline_ms: _Milliseconds = 5000
    """The time limit of a put or get in milliseconds; a lookup has a fifth of it."""

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
        return cls.read(found, f"LMCache's {start.removesuffix('.')}", _LMCACHES)
