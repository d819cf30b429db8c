"""The settings of the connector, as they stand in `kv_connector_extra_config` of vLLM's `--kv-transfer-config`.

    {"kv_connector": "KVParamsConnector", "kv_connector_module_path": "kvparams_connectors.engines.vllm.connector",
     "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"store": "valkey://host:6379"}}

A setting that is not known here is refused, with the known ones listed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Final, cast

from kvparams_connectors.engines.setting_values import SettingValues
from kvparams_connectors.store_url import StoreError
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


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    """A `VLLMSettings` holds the configured settings; every field is a setting of that name."""

    store: str = field(repr=False)
    """The URL of a store that other processes reach. Of `peer://host:port` each data-parallel rank of a machine has a
    port of its own: `port` plus its rank on the machine."""
    page_tokens: int = PAGE_TOKENS
    """Tokens of a stored page; the same on all engines that share."""
    model: str | None = None
    """The model's name in the keys; None: as vLLM was told, of a folder its last part."""
    revision: str | None = None
    """What tells these weights from others of the same name; None: from the files."""
    tensor_parallel_sizes: tuple[int, ...] | None = None
    """Of all engines that share; None: those of this engine's size share."""
    deadline_s: float = 5.0
    """For each load, save and lookup."""
    promise_s: float = 2.0
    """How long a decode leg waits for pages that prefill has promised, and that are still on their way."""
    arena_bytes: int | None = None
    """For pages on their way; None: 64 MiB, and room for 16 pages at least."""
    recompute_tokens_per_s: float | None = None
    """How fast this engine computes a prompt; slower loads are skipped. None: none is."""
    store_bytes_per_s: float | None = None
    """The rate of loads until one has been measured."""
    verify: bool = True
    """False uses whatever the store gives back; to show what verification is good for."""
    self_test: bool = True
    """Send one page through the whole path before serving."""
    seal_keys: Path | None = None
    """A key file of authenticated pages."""
    verify_with: Path | None = None
    """A key file (`kvparams signing-keys`): a request's document and what stands beside it are acted on only if whoever
    has these keys has signed them, for this pool, not long ago, and not used before. None: all are believed."""
    audience: str | None = None
    """The name of the pool that they must be signed for."""
    trust_media_hashes: bool = False
    """vLLM takes what a client calls an image (`uuid`) for a hash of what is in it, and tells a connector nothing of
    where a hash comes from. So a request with images, audio or video uses the store only if a proxy vouches for it, by
    a signed document (`verify_with`): proxies take such names away. True: all hashes are vLLM's own, for nobody but
    proxies reaches this engine, or none of its clients means harm."""
    keep_on_reset: bool = False
    """vLLM's caches are reset when it sleeps and when its weights are changed, and nobody says which. Then what is
    stored may be of other weights, so it is left alone from there on, whether or not the connector was told of the
    reset. True: the weights never change, it is used. Weights that change without a reset are not noticed."""

    @classmethod
    def of(cls, extra_config: Mapping[str, object] | None) -> "VLLMSettings":
        """Read and check the settings.

        Raises:
            StoreError: no store, a setting that is not known, or a value that cannot be meant.
        """
        found = {name: value for name, value in (extra_config or {}).items() if name not in _VLLMS}
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(found) - set(known))
        if unknown:
            raise StoreError(f"{_WHERE}: unknown setting {', '.join(unknown)}; known: {', '.join(known)}")
        store = found.get("store")
        if not isinstance(store, str) or not store:
            raise StoreError(f"{_WHERE}.store is not there; it is the store's URL: valkey://host:6379")
        given = SettingValues(found, f"{_WHERE}.")
        settings = cls(
            store=store,
            page_tokens=given.read_int("page_tokens") or PAGE_TOKENS,
            model=given.read_text("model"),
            revision=given.read_text("revision"),
            tensor_parallel_sizes=_sizes(found.get("tensor_parallel_sizes")),
            deadline_s=given.read_float("deadline_s") or 5.0,
            promise_s=given.read_float("promise_s") or 2.0,
            arena_bytes=given.read_int("arena_bytes"),
            recompute_tokens_per_s=given.read_float("recompute_tokens_per_s"),
            store_bytes_per_s=given.read_float("store_bytes_per_s"),
            verify=given.read_bool("verify", default=True),
            self_test=given.read_bool("self_test", default=True),
            seal_keys=given.read_path("seal_keys"),
            verify_with=given.read_path("verify_with"),
            audience=given.read_text("audience"),
            trust_media_hashes=given.read_bool("trust_media_hashes", default=False),
            keep_on_reset=given.read_bool("keep_on_reset", default=False),
        )
        if settings.promise_s > settings.deadline_s:
            raise StoreError(f"{_WHERE}: promise_s is longer than deadline_s")
        if (settings.verify_with is None) != (settings.audience is None):
            raise StoreError(f"{_WHERE}: verify_with and audience go together: whose signature, and for which pool")
        return settings

    def of_rank(self, rank: int) -> "VLLMSettings":
        """Returns the settings of one data-parallel rank, by its number on the machine.

        Raises:
            StoreError: the store's URL is wrong, or there is no port for it.
        """
        return replace(self, store=url_for_rank(self.store, rank))

    def connector(self, grid: ShardGrid, page_bytes: int, *, groups: int = 1) -> ConnectorSettings:
        """The same for the store connector. Whether a load is worth its time is decided before it, so not there.

        Args:
            grid: of all engines that share.
            page_bytes: of what a rank holds of a page, of one group of layers.
            groups: of layers, each with a connector and its part of the memory.
        """
        arena_bytes = (self.arena_bytes or _ARENA_BYTES) // groups
        if self.arena_bytes is None:
            arena_bytes = max(arena_bytes, _ARENA_PAGES * page_bytes)
        return ConnectorSettings(deadline_s=self.deadline_s, arena_bytes=arena_bytes, verify=self.verify, grid=grid)


def _sizes(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    sizes = cast("list[object]", value) if isinstance(value, list) else []
    whole = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size > 0]
    if not whole or len(whole) != len(sizes):
        raise StoreError(f"{_WHERE}.tensor_parallel_sizes is {value!r}; it is a list of sizes: [1, 2, 4]")
    return tuple(whole)
