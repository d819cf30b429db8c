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
    """The model's name in the keys; None: as vLLM was told, of a folder its last part."""
    revision: Text | None = None
    """What tells this engine's KV from that of others of the same name: weights, and whatever was changed on the
    command line (quantization, overrides of the model's configuration, attention backend), for vLLM tells a tier none
    of that. None: from the files, where the model is a folder."""
    deadline_s: PositiveNumber = 5.0
    """For each load and save. The question what is stored has a fifth of it; until then a request waits."""
    keep_on_reset: Switch = False
    """vLLM resets its caches when it sleeps and when its weights are changed, and does not say which. Then what is
    stored may be of other weights, so it is left alone from there on. True: the weights never change, it is used."""
    locality: Annotated[Literal["LOCAL", "REMOTE"], Allowed("LOCAL or REMOTE")] | None = None
    """For requests that say from where they want to load; as for vLLM's own tiers."""

    @classmethod
    def of(cls, found: Mapping[str, object]) -> "TierSettings":
        """Read and check the settings.

        Raises:
            StoreError: no store, a setting that is not known, or a value that cannot be meant.
        """
        return cls.read(found, _WHERE, _VLLMS)
