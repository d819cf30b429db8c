"""The settings of the tier, as they stand in `secondary_tiers` of vLLM's `--kv-transfer-config`.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
       "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592, "secondary_tiers": [
         {"type": "KVParamsTier", "module_path": "kvparams_connectors.engines.vllm_tier.tier",
          "store": "valkey://host:6379"}]}}

vLLM keeps `type`, `module_path` and `backpressure` to itself. A setting that is not known here is refused, with the
known ones listed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, Literal

from kvparams_connectors.engines.setting_values import SettingValues
from kvparams_connectors.store_url import StoreError

__all__ = ["TierSettings"]

_WHERE: Final = "secondary_tiers, KVParamsTier"
_VLLMS: Final = frozenset({"type", "module_path", "backpressure"})


@dataclass(frozen=True, slots=True)
class TierSettings:
    """A `TierSettings` holds the configured settings; every field is a setting of that name."""

    store: str = field(repr=False)
    """The URL of a store."""
    model: str | None = None
    """The model's name in the keys; None: as vLLM was told, of a folder its last part."""
    revision: str | None = None
    """What tells this engine's KV from that of others of the same name: weights, and whatever was changed on the
    command line (quantization, overrides of the model's configuration, attention backend), for vLLM tells a tier none
    of that. None: from the files, where the model is a folder."""
    deadline_s: float = 5.0
    """For each load and save."""
    lookup_s: float = 1.0
    """For the question what is stored; until then a request waits."""
    arena_bytes: int | None = None
    """For chunks on their way; None: 64 MiB, and room for 8 chunks at least."""
    verify: bool = True
    """False uses whatever the store gives back; to show what verification is good for."""
    self_test: bool = True
    """Send one chunk through the whole path before serving."""
    seal_keys: Path | None = None
    """A key file of authenticated pages."""
    keep_on_reset: bool = False
    """vLLM resets its caches when it sleeps and when its weights are changed, and does not say which. Then what is
    stored may be of other weights, so it is left alone from there on. True: the weights never change, it is used."""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """For requests that say from where they want to load; as for vLLM's own tiers."""

    @classmethod
    def of(cls, found: Mapping[str, object]) -> "TierSettings":
        """Read and check the settings.

        Raises:
            StoreError: no store, a setting that is not known, or a value that cannot be meant.
        """
        mine = {name: value for name, value in found.items() if name not in _VLLMS}
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(mine) - set(known))
        if unknown:
            raise StoreError(f"{_WHERE}: unknown setting {', '.join(unknown)}; known: {', '.join(known)}")
        store = mine.get("store")
        if not isinstance(store, str) or not store:
            raise StoreError(f"{_WHERE}: store is not there; it is the store's URL: valkey://host:6379")
        locality = mine.get("locality")
        if locality not in (None, "LOCAL", "REMOTE"):
            raise StoreError(f"{_WHERE}: locality is {locality!r}; it is LOCAL or REMOTE")
        given = SettingValues(mine, f"{_WHERE}: ")
        return cls(
            store=store,
            model=given.read_text("model"),
            revision=given.read_text("revision"),
            deadline_s=given.read_float("deadline_s") or 5.0,
            lookup_s=given.read_float("lookup_s") or 1.0,
            arena_bytes=given.read_int("arena_bytes"),
            verify=given.read_bool("verify", default=True),
            self_test=given.read_bool("self_test", default=True),
            seal_keys=given.read_path("seal_keys"),
            keep_on_reset=given.read_bool("keep_on_reset", default=False),
            locality=locality,
        )
