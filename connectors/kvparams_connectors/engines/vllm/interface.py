"""What is used of vLLM 0.28 to 0.32, with the file that each part stands in.

Nothing of vLLM is used that is not declared here; `tests/interop/vllm/test_vllm_contract.py` checks it against the
installed vLLM.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = [
    "BlockPool",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "LoRARequest",
    "SchedulerOutput",
    "VLLMRequest",
    "VllmConfig",
]


class _HFConfig(Protocol):
    """`hf_config` of transformers."""

    def to_dict(self) -> dict[str, Any]: ...


class _ModelConfig(Protocol):
    """vllm/config/model.py, `ModelConfig`."""

    @property
    def model(self) -> str: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def quantization(self) -> object: ...
    @property
    def hf_config(self) -> _HFConfig: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def use_mla(self) -> bool: ...
    def get_total_num_kv_heads(self) -> int: ...
    def get_total_num_hidden_layers(self) -> int: ...


class _ParallelConfig(Protocol):
    """vllm/config/parallel.py, `ParallelConfig`. `data_parallel_rank_local` counts the engines that one server has
    started on this machine (vllm/v1/engine/core.py, `run_engine_core`); None or 0 without data parallelism."""

    @property
    def tensor_parallel_size(self) -> int: ...
    @property
    def pipeline_parallel_size(self) -> int: ...
    @property
    def decode_context_parallel_size(self) -> int: ...
    @property
    def prefill_context_parallel_size(self) -> int: ...
    @property
    def data_parallel_rank_local(self) -> int | None: ...


class _CacheConfig(Protocol):
    """vllm/config/cache.py, `KVCacheConfig`."""

    @property
    def block_size(self) -> int: ...
    @property
    def cache_dtype(self) -> str: ...


class _KVTransferConfig(Protocol):
    """vllm/config/kv_transfer.py, `KVTransferConfig`."""

    @property
    def engine_id(self) -> str | None: ...
    @property
    def kv_load_failure_policy(self) -> str: ...
    @property
    def is_kv_producer(self) -> bool: ...
    @property
    def is_kv_consumer(self) -> bool: ...
    @property
    def kv_role(self) -> str | None: ...
    @property
    def kv_connector_extra_config(self) -> dict[str, Any]: ...


class VllmConfig(Protocol):
    """vllm/config/vllm.py, `VllmConfig`."""

    @property
    def model_config(self) -> _ModelConfig: ...
    @property
    def parallel_config(self) -> _ParallelConfig: ...
    @property
    def cache_config(self) -> _CacheConfig: ...
    @property
    def kv_transfer_config(self) -> _KVTransferConfig | None: ...


class KVCacheGroupSpec(Protocol):
    """vllm/v1/kv_cache_interface.py, `KVCacheGroupSpec`."""

    @property
    def layer_names(self) -> list[str]: ...
    @property
    def kv_cache_spec(self) -> object: ...


class KVCacheConfig(Protocol):
    """vllm/v1/kv_cache_interface.py, `KVCacheConfig`."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def kv_cache_groups(self) -> Sequence[KVCacheGroupSpec]: ...


class LoRARequest(Protocol):
    """vllm/lora/request.py, `LoRARequest`."""

    @property
    def lora_name(self) -> str: ...
    @property
    def lora_path(self) -> str: ...


class _PlaceholderRange(Protocol):
    """vllm/multimodal/inputs.py, `PlaceholderRange`."""

    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...


class _MultiModalFeature(Protocol):
    """vllm/multimodal/inputs.py, `MultiModalFeatureSpec`. Its identifier is a hash of the content, or
    what a client has called it."""

    @property
    def identifier(self) -> str: ...
    @property
    def mm_position(self) -> _PlaceholderRange: ...


class VLLMRequest(Protocol):
    """vllm/v1/request.py."""

    @property
    def request_id(self) -> str: ...
    @property
    def kv_transfer_params(self) -> Mapping[str, object] | None: ...
    @property
    def prompt_token_ids(self) -> list[int] | None: ...
    @property
    def prompt_embeds(self) -> object: ...
    @property
    def prompt_is_token_ids(self) -> object: ...
    @property
    def pooling_params(self) -> object: ...
    @property
    def resumable(self) -> bool: ...
    @property
    def skip_reading_prefix_cache(self) -> bool: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def lora_request(self) -> LoRARequest | None: ...
    @property
    def mm_features(self) -> Sequence[_MultiModalFeature]: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def arrival_time(self) -> float: ...


class KVCacheBlocks(Protocol):
    """vllm/v1/core/kv_cache_manager.py, `KVCacheBlocks`."""

    def get_block_ids(self) -> tuple[list[int], ...]: ...


class KVCacheBlock(Protocol):
    """vllm/v1/core/kv_cache_utils.py, `KVCacheBlock`."""

    ref_cnt: int


class BlockPool(Protocol):
    """vllm/v1/core/block_pool.py."""

    @property
    def blocks(self) -> Sequence[KVCacheBlock]: ...
    @property
    def cached_block_hash_to_block(self) -> object: ...
    def touch(self, blocks: Sequence[Any]) -> None: ...
    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None: ...


class KVCacheManager(Protocol):
    """vllm/v1/core/kv_cache_manager.py."""

    @property
    def block_pool(self) -> BlockPool: ...
    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]: ...


class _NewRequestData(Protocol):
    """vllm/v1/core/sched/output.py, `NewRequestData`."""

    @property
    def req_id(self) -> str: ...
    @property
    def block_ids(self) -> tuple[list[int], ...]: ...
    @property
    def num_computed_tokens(self) -> int: ...


class _CachedRequestData(Protocol):
    """vllm/v1/core/sched/output.py, `CachedRequestData`."""

    @property
    def req_ids(self) -> list[str]: ...
    @property
    def resumed_req_ids(self) -> set[str]: ...
    @property
    def new_block_ids(self) -> Sequence[tuple[list[int], ...] | None]: ...
    @property
    def num_computed_tokens(self) -> list[int]: ...


class SchedulerOutput(Protocol):
    """vllm/v1/core/sched/output.py."""

    @property
    def scheduled_new_reqs(self) -> Sequence[_NewRequestData]: ...
    @property
    def scheduled_cached_reqs(self) -> _CachedRequestData: ...
    @property
    def num_scheduled_tokens(self) -> dict[str, int]: ...
