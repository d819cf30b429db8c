"""The settings of the tier, as they stand in `secondary_tiers` of vLLM's `--kv-transfer-config`.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
       "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592, "secondary_tiers": [
         {"type": "KVParamsTier", "module_path": "kvparams_connectors.engines.vllm_tier.tier",
          "store": "valkey://host:6379"}]}}

vLLM keeps `type`, `module_path` and `backpressure` to itself.
"""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from kvparams.settings_model import Allowed
from kvparams_connectors.engines.engine_settings import EngineSettings, PositiveNumber, Switch, Text

__all__ = ["TierSettings"]

_WHERE: Final = "secondary_tiers, KVParamsTier"
_VLLMS: Final = frozenset({"type", "module_path", "backpressure"})


class TierSettings(EngineSettings):
    """Holds what was configured; every field is a setting of that name."""

    model: Text | None = None
    """The model's name in the keys (default: as vLLM was told, of a folder its last part)."""
    revision: Text | None = None
    """Identifies these weights, and what was changed on the command line (quantization, overrides of the model's
    configuration, attention backend), because vLLM does not tell a tier (default: what the files say, where the
    model is a folder)."""
    deadline_s: PositiveNumber = 5.0
    """The time limit of each load and save. A lookup, for which a request waits, has a fifth of it."""
    keep_on_reset: Switch = False
    """Use the store after a reset of vLLM's caches: these weights never change while the engine runs. Otherwise it is
    left alone from then on, because vLLM does not say whether the weights have changed."""
    locality: Annotated[Literal["LOCAL", "REMOTE"], Allowed("LOCAL or REMOTE")] | None = None
    """Where this tier is, for requests that say from where they load; as for vLLM's own tiers."""

    @classmethod
    def of(cls, found: Mapping[str, object]) -> "TierSettings":
        """Read and check the settings.

        Raises:
            StoreError: no store, a setting that is not known, or a value that cannot be meant.
        """
        return cls.read(found, _WHERE, _VLLMS)
