"""`KVParamsHiCache`: what SGLang's HiCache makes of `--hicache-storage-backend dynamic`; `settings.py` says how.

SGLang's controller asks `batch_exists` what is stored, has `batch_get_v1` read pages into its host pool before a prompt
is computed, and `batch_set_v1` write what was computed (srt/managers/cache_controller.py of 0.5.23), each on a thread
of its own. What cannot be kept safely is refused when SGLang attaches the backend, not while it serves; once it serves,
nothing that a store does reaches a request but as a miss.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from kvparams_connectors.engines.sglang.host_pages import KINDS, HostPages, heads_and_dims
from kvparams_connectors.engines.sglang.interface import HiCacheStorageConfig, HostKVCache
from kvparams_connectors.engines.sglang.model_identity import identify_model, published_config
from kvparams_connectors.engines.sglang.page_buffers import PageBuffers, flat_bytes
from kvparams_connectors.engines.sglang.page_keys import HiCachePageLayout
from kvparams_connectors.engines.sglang.page_pipeline import HiCachePagePipeline
from kvparams_connectors.engines.sglang.self_test import run_self_test
from kvparams_connectors.engines.sglang.settings import WHERE, SGLangSettings
from kvparams_connectors.engines.sglang.transfer_stats import HiCacheStats
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.stores.guard.store import open_guarded
from kvparams_connectors.transfer.cache_layouts import LayoutError
from kvparams_connectors.transfer.page_pipeline import STORED_CODES

if TYPE_CHECKING:  # SGLang's own class, as far as it matters here

    class HiCacheStorage:
        """sglang/srt/mem_cache/hicache_storage.py."""

        def register_mem_pool_host(self, mem_pool_host: Any) -> None: ...

else:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

__all__ = ["KVParamsHiCache", "page_layout_of"]

_LOGGER: Final = logging.getLogger(__name__)
_KV: Final = "kv"
"""`PoolName.KV`."""


def page_layout_of(
    config: HiCacheStorageConfig,
    settings: SGLangSettings,
    pool: HostKVCache,
    payload_bytes: int,
    told: Mapping[str, object] | None,
) -> HiCachePageLayout:
    """Returns what the pages of this rank are.

    Args:
        config: what SGLang gave the backend.
        settings: of the backend.
        pool: one that is known, see `check_pool`.
        payload_bytes: of a page.
        told: what this process's SGLang was started with; None if that is not known.

    Raises:
        LayoutError: the ranks share out a page in a way that is not known.
        StoreError: which weights these are, or what the elements mean, is not known.
    """
    kind = KINDS[type(pool).__name__]
    if config.is_mla_model is not (kind == "mla"):
        raise LayoutError(f"{WHERE}: SGLang keeps this model's KV in a {type(pool).__name__}, which is not supported")
    if config.tp_lcm_size is not None:
        raise StoreError(f"{WHERE}: engines of different tensor parallel sizes cannot share pages; remove tp_lcm_size")
    draft_layers = pool.layer_num - pool.target_layer_num
    model, revision = identify_model(settings, config.model_name, told, draft_layers=draft_layers)
    heads, k_dim, v_dim = heads_and_dims(pool)
    return HiCachePageLayout(
        model=model,
        revision=revision,
        tenant=settings.tenant,
        kind=kind,
        layout=pool.layout,
        dtype=_dtype(pool, told),
        page_tokens=pool.page_size,
        layer_start=pool.start_layer,
        layers=pool.layer_num,
        draft_layers=draft_layers,
        heads=heads,
        k_dim=k_dim,
        v_dim=v_dim,
        tensor=(0, 1) if kind == "mla" else (config.tp_rank, config.tp_size),
        pipeline=(config.pp_rank, config.pp_size),
        context=(config.attn_cp_rank, config.attn_cp_size),
        payload_bytes=payload_bytes,
        tag=pool.storage_format_tag or "",
    )


def _dtype(pool: HostKVCache, told: Mapping[str, object] | None) -> str:
    """The elements. SGLang keeps both kinds of fp8 as bytes, so there what it was told counts."""
    name = str(pool.dtype).removeprefix("torch.")
    if pool.dtype is not torch.uint8:
        return name
    if told is None:
        raise StoreError(f"{WHERE}: the KV is stored as bytes of an unknown element type")
    return f"{name} {told['kv_cache_dtype']}"


class KVParamsHiCache(HiCacheStorage):
    """See the module. `extra_info` says which pages come before; SGLang's hashes say that already."""

    verifies: ClassVar[bool] = True
    """False uses whatever the store gives back: a subclass shows what verification is good for."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, object] | None = None) -> None:
        """Opens the store of SGLang's settings (`settings.py`). SGLang does not start if this raises.

        Raises:
            StoreError: the store cannot be opened, or a setting is wrong.
            PageAuthError: the key file of authenticated pages cannot be used.
            PluginError: no plugin provides the store.
        """
        settings = SGLangSettings.of(storage_config.extra_config)
        if not (storage_config.extra_config or {}).get("interface_v1"):
            _LOGGER.warning('%s: set "interface_v1": 1; without it SGLang copies every page once more', WHERE)
        self._config = storage_config
        self._settings = settings
        self._keys = settings.read_tenant_seals()
        self._writes = storage_config.is_storage_writer
        self._pool: HostKVCache | None = None
        self.tally: Final = HiCacheStats()
        """What was counted."""
        self._store = open_guarded(settings.store)

    # ---- SGLang's host pool

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Raises LayoutError or StoreError: its pages cannot be kept; the message says what to do."""
        pages = HostPages(mem_pool_host)
        settings = self._settings
        form = page_layout_of(self._config, settings, mem_pool_host, pages.page_bytes, published_config())
        self._traffic = HiCachePagePipeline(
            self._store,
            form,
            self.tally,
            deadline_s=settings.deadline_s,
            lookup_s=settings.deadline_s / 5,
            keys=self._keys,
            verified=self.verifies,
        )
        super().register_mem_pool_host(mem_pool_host)
        self._pages, self._pool = pages, mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: str) -> None:
        """SGLang registers every pool so, the one that it has registered already among them.

        Raises:
            LayoutError: another one, whose part of each page would be missing.
        """
        if str(host_pool_name) != _KV or host_pool is not self._pool:
            raise LayoutError(
                f"{WHERE}: this model has state besides its KV (the pool {host_pool_name}), which cannot be "
                "stored; run it without this storage backend, or, if the state belongs to a draft model, without "
                "speculative decoding"
            )

    def on_host_pools_registered(self) -> None:
        """Runs the self test once all pools are known; raises SelfTestError (see `self_test.py`)."""
        if self._pool is not None:
            run_self_test(self._pool, self._pages, self._traffic)

    # ---- what is stored

    def exists(self, key: str) -> bool:
        """Returns whether a page is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: object = None) -> int:
        """Returns how many of the pages are stored, counted until the first that is not."""
        return self._traffic.lookup(keys)

    # ---- pages of the host pool

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: object = None) -> list[bool]:
        """Read pages into the pool; True for those that lie there, which are the first ones."""
        loaded = self._traffic.get(keys, self._pages.places(host_indices, len(keys)))
        return [number < loaded for number in range(len(keys))]

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: object = None) -> list[bool]:
        """Writes pages of the pool and returns True for those that are stored now.

        Where all ranks have the same pages, only one writes; the others return the same result without writing.
        """
        places = self._pages.places(host_indices, len(keys))
        return self._put(keys, places)

    # ---- copies of pages, which SGLang uses without interface_v1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """A page, in `target_location` where it is given; None if it is missing or damaged."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Copies of pages, until the first that is missing or damaged; None for that one and for all behind it."""
        targets: Sequence[torch.Tensor] = target_locations or [self._blank() for _ in keys]
        loaded = self._traffic.get(keys, [self._copy(target) for target in targets])
        return [target if number < loaded else None for number, target in enumerate(targets)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a copy of a page."""
        return self.batch_set([key], [target_location if value is None else value])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store copies of pages; whether all are stored."""
        copies: Sequence[torch.Tensor] = target_locations if values is None else values
        return all(self._put(keys, [self._copy(copy.contiguous()) for copy in copies]))

    def _put(self, keys: Sequence[str], places: Sequence[PageBuffers]) -> list[bool]:
        if not self._writes:
            return [True] * len(keys)
        return [code in STORED_CODES for code in self._traffic.put(keys, places)]

    def _blank(self) -> torch.Tensor:
        pool = self._pool
        if pool is None:
            raise StoreError(f"{WHERE}: SGLang has not registered its host pool")
        return pool.get_dummy_flat_data_page()

    def _copy(self, page: torch.Tensor) -> PageBuffers:
        """The place of a copy. Raises ValueError if it is none of a page."""
        if not page.is_contiguous() or page.nbytes != self._pages.page_bytes:
            raise ValueError(f"a copy of a page has {self._pages.page_bytes} bytes in one piece, not {page.nbytes}")
        return [flat_bytes(page)]

    # ---- the rest

    def clear(self) -> None:
        """Raises StoreError: a store is not one engine's to clear, and does not say what is in it."""
        raise StoreError(
            f"{WHERE}: this engine does not clear a store that others use. Clear the store's server, or set "
            "another tenant or revision, so that stored pages are no longer found"
        )

    def get_stats(self) -> object:
        """SGLang's `StorageMetrics` since it asked last; None unless it was started with metrics."""
        return self.tally.for_sglang() if self._config.enable_storage_metrics else None

    def close(self) -> None:
        """SGLang has detached the backend; a second call does nothing."""
        self._store.close()
