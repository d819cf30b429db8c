"""The settings of the connector, as they stand in `kv_connector_extra_config` of vLLM's `--kv-transfer-config`.

{"kv_connector": "KVParamsConnector", "kv_connector_module_path": "kvparams_connectors.engines.vllm.connector",
 "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
 "kv_connector_extra_config": {"store": "valkey://host:6379"}}
"""

from collections.abc import Mapping
from typing import Annotated, Final, Self, cast

from pydantic import BeforeValidator, Field, model_validator

from kvparams.settings_model import Allowed
from kvparams_connectors.engines.engine_settings import Count, EngineSettings, FilePath, PositiveNumber, Switch, Text
from kvparams_connectors.stores.peer.settings import url_for_rank
from kvparams_connectors.transfer.connector_settings import ConnectorSettings
from kvparams_connectors.transfer.shard_grid import ShardGrid

__all__ = ["PAGE_TOKENS", "VLLMSettings"]

PAGE_TOKENS: Final = 128
"""Of every block size that vLLM has by default (16 to 128) a multiple, so engines of any of them share pages."""
_ARENA_BYTES: Final = 64 << 20
_ARENA_PAGES: Final = 16
_WHERE: Final = "kv_connector_extra_config"
_VLLMS: Final = frozenset({"engine_id"})
"""What vLLM itself may put there (MultiConnector, for its children)."""
_Sizes = Annotated[
    tuple[Count, ...],
    BeforeValidator(lambda value: tuple(cast("list[object]", value)) if isinstance(value, list) else value),
    Field(min_length=1),
    Allowed("a list of sizes: [1, 2, 4]"),
]


class VLLMSettings(EngineSettings):
    """Holds what was configured; every field is a setting of that name.

    Of `peer://host:port` in `store` each data-parallel rank of a machine has a port of its own: `port` plus its rank on
    the machine.
    """

    page_tokens: Count = PAGE_TOKENS
    """The tokens of a stored page; the same on all engines that share."""
    model: Text | None = None
    """The model's name in the keys (default: as vLLM was told, of a folder its last part)."""
    tensor_parallel_sizes: _Sizes | None = None
    """The sizes of all engines that share (default: that of this engine)."""
    deadline_s: PositiveNumber = 5.0
    """The time limit of each load, save and lookup. A decode leg waits two fifths of it for pages that prefill has
    promised."""
    recompute_tokens_per_s: PositiveNumber | None = None
    """How fast this engine computes a prompt; slower loads are skipped (default: no load is skipped)."""
    verify_with: FilePath | None = None
    """A key file (`kvparams signing-keys`). A request's document counts only if it was signed with these keys, for this
    pool, recently, and was not used before (default: every document is believed)."""
    audience: Text | None = None
    """The name of the pool that documents must be signed for; needed with `verify_with`."""
    trust_media_hashes: Switch = False
    """Use the store for requests with images, audio or video that no proxy has signed. vLLM takes what a client calls
    an image (`uuid`) for a hash of its content, so only proxies may reach this engine then."""
    keep_on_reset: Switch = False
    """Use the store after a reset of vLLM's caches: these weights never change while the engine runs. Otherwise it is
    left alone from then on, because nobody tells the connector whether the weights have changed."""

    @classmethod
    def of(cls, extra_config: Mapping[str, object] | None) -> "VLLMSettings":
        """Read and check the settings.

        Raises:
            StoreError: no store, a setting that is not known, or a value that cannot be meant.
        """
        return cls.read(extra_config or {}, _WHERE, _VLLMS)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.verify_with is None) != (self.audience is None):
            raise ValueError(
                "verify_with and audience need each other: the file of signing keys, and the name of the engine pool"
            )
        return self

    def of_rank(self, rank: int) -> "VLLMSettings":
        """Returns the settings of one data-parallel rank, by its number on the machine.

        Raises:
            StoreError: the store's URL is wrong, or there is no port for it.
        """
        return self.model_copy(update={"store": url_for_rank(self.store, rank)})

    @property
    def promise_s(self) -> float:
        """Returns how long a decode leg waits for pages that prefill has promised."""
        return 0.4 * self.deadline_s

    def connector(
        self, grid: ShardGrid, page_bytes: int, *, groups: int = 1, verifies: bool = True
    ) -> ConnectorSettings:
        """The same for the store connector. Whether a load is worth its time is decided before it, so not there.

        Args:
            grid: of all engines that share.
            page_bytes: of what a rank holds of a page, of one group of layers.
            groups: of layers, each with a connector and its part of the memory: 64 MiB for all, and room for 16 pages
                each at least.
            verifies: False uses pages without verification.
        """
        arena_bytes = max(_ARENA_BYTES // groups, _ARENA_PAGES * page_bytes)
        return ConnectorSettings(deadline_s=self.deadline_s, arena_bytes=arena_bytes, verify=verifies, grid=grid)
