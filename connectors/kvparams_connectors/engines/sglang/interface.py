"""Defines what is used of SGLang 0.5.23, with the file that each part stands in. Paths are below `sglang/srt`.

Nothing of SGLang is used that does not stand here or in `backend.py`, `transfer_stats.py` and `model_identity.py`;
`tests/interop/sglang/test_sglang_contract.py` holds it against the SGLang that is installed.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import torch

__all__ = ["POOL_MODULE", "HiCacheStorageConfig", "HostKVCache", "MHAHostPool", "MLAHostPool"]

POOL_MODULE: Final = "sglang.srt.mem_cache.pool_host."
"""Where host pools stand whose memory is known here."""


class HiCacheStorageConfig(Protocol):
    """Declares `HiCacheStorageConfig` of mem_cache/hicache_storage.py.

    `model_name` is the server's name of the model (`--served-model-name`), so it says little about the weights.
    """

    @property
    def tp_rank(self) -> int:
        """Returns the rank of tensor parallelism."""
        ...

    @property
    def tp_size(self) -> int:
        """Returns the number of tensor parallel ranks."""
        ...

    @property
    def pp_rank(self) -> int:
        """Returns the rank of pipeline parallelism."""
        ...

    @property
    def pp_size(self) -> int:
        """Returns the number of pipeline parallel ranks."""
        ...

    @property
    def attn_cp_rank(self) -> int:
        """Returns the rank of context parallelism."""
        ...

    @property
    def attn_cp_size(self) -> int:
        """Returns the number of context parallel ranks."""
        ...

    @property
    def dcp_size(self) -> int:
        """Returns the number of ranks that share a decode context."""
        ...

    @property
    def is_mla_model(self) -> bool:
        """Returns whether the model has one latent for all heads."""
        ...

    @property
    def is_storage_writer(self) -> bool:
        """Returns whether this rank writes."""
        ...

    @property
    def enable_storage_metrics(self) -> bool:
        """Returns whether SGLang asks for `StorageMetrics`."""
        ...

    @property
    def model_name(self) -> str | None:
        """Returns what the server calls the model."""
        ...

    @property
    def tp_lcm_size(self) -> int | None:
        """Returns the least common multiple of tensor parallel sizes that share pages; None if none is configured."""
        ...

    @property
    def extra_config(self) -> Mapping[str, object] | None:
        """Returns the settings of the backend."""
        ...


class HostKVCache(Protocol):
    """Declares `HostKVCache` of mem_cache/pool_host/base.py, with the additions of mha.py and mla.py.

    Indices are of tokens; a page's are consecutive, and begin at a multiple of the page size.
    """

    @property
    def layout(self) -> str:
        """Returns the order of the elements."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Returns the type of the elements."""
        ...

    @property
    def page_size(self) -> int:
        """Returns the tokens of a page."""
        ...

    @property
    def page_num(self) -> int:
        """Returns the number of pages."""
        ...

    @property
    def size_per_token(self) -> int:
        """Returns the bytes of a token."""
        ...

    @property
    def start_layer(self) -> int:
        """Returns the first layer of this rank."""
        ...

    @property
    def layer_num(self) -> int:
        """Returns the number of layers of this rank."""
        ...

    @property
    def target_layer_num(self) -> int:
        """Returns the number of layers without those of a draft model."""
        ...

    @property
    def dcp_size(self) -> int:
        """Returns the number of ranks that share a decode context."""
        ...

    @property
    def storage_format_tag(self) -> str | None:
        """Returns the name of the format of a page, if it has one."""
        ...

    @property
    def shared_allocation_domain(self) -> object:
        """Returns the memory that this pool shares with others, or None."""
        ...

    @property
    def stores_page_envelope(self) -> bool:
        """Returns whether pages have an envelope of SGLang's."""
        ...

    @property
    def kv_buffer(self) -> torch.Tensor | Sequence[torch.Tensor] | None:
        """Returns the tensors of the pool."""
        ...

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[Sequence[int], Sequence[int]]:
        """Addresses and lengths of the stretches of memory that the pages of these tokens have."""
        ...

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """A copy of the page whose first token this is. Asymmetric K and V have none."""
        ...

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Room for such a copy."""
        ...

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Allocates slots for tokens, or returns None."""
        ...

    def free(self, indices: torch.Tensor) -> int:
        """Frees slots."""
        ...


class MHAHostPool(HostKVCache, Protocol):
    """mem_cache/pool_host/mha.py."""

    @property
    def head_num(self) -> int:
        """Returns the number of KV heads of this rank."""
        ...

    @property
    def head_dim(self) -> int:
        """Returns the elements of a head of K."""
        ...

    @property
    def v_head_dim(self) -> int:
        """Returns the elements of a head of V."""
        ...


class MLAHostPool(HostKVCache, Protocol):
    """mem_cache/pool_host/mla.py."""

    @property
    def kv_cache_dim(self) -> int:
        """Returns the elements of the latent."""
        ...
