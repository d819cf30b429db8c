"""Defines what is used of vLLM 0.28 to 0.32, with the file that each part stands in.

Nothing of vLLM is used that is not declared here; `tests/interop/vllm/test_vllm_contract.py` compares it with the
vLLM that is installed.
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
    """Declares `ParallelConfig` of vllm/config/parallel.py.

    `data_parallel_rank_local` counts the engines that one server has started on this machine (vllm/v1/engine/core.py,
    `run_engine_core`); None or 0 without data parallelism.
    """

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
    def model_config(self) -> _ModelConfig:
        """Returns the configuration of the model."""
        ...

    @property
    def parallel_config(self) -> _ParallelConfig:
        """Returns the configuration of parallelism."""
        ...

    @property
    def cache_config(self) -> _CacheConfig:
        """Returns the configuration of the cache."""
        ...

    @property
    def kv_transfer_config(self) -> _KVTransferConfig | None:
        """Returns the configuration of KV transfer, if there is one."""
        ...


class KVCacheGroupSpec(Protocol):
    """vllm/v1/kv_cache_interface.py, `KVCacheGroupSpec`."""

    @property
    def layer_names(self) -> list[str]:
        """Returns the names of the layers."""
        ...

    @property
    def kv_cache_spec(self) -> object:
        """Returns what the layers keep of a token."""
        ...


class KVCacheConfig(Protocol):
    """vllm/v1/kv_cache_interface.py, `KVCacheConfig`."""

    @property
    def num_blocks(self) -> int:
        """Returns the number of blocks."""
        ...

    @property
    def kv_cache_groups(self) -> Sequence[KVCacheGroupSpec]:
        """Returns the groups of layers."""
        ...


class LoRARequest(Protocol):
    """vllm/lora/request.py, `LoRARequest`."""

    @property
    def lora_name(self) -> str:
        """Returns the name of the adapter."""
        ...

    @property
    def lora_path(self) -> str:
        """Returns where the adapter lies."""
        ...


class _PlaceholderRange(Protocol):
    """vllm/multimodal/inputs.py, `PlaceholderRange`."""

    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...


class _MultiModalFeature(Protocol):
    """Declares `MultiModalFeatureSpec` of vllm/multimodal/inputs.py.

    Its identifier is a hash of the content, or a client's name for it.
    """

    @property
    def identifier(self) -> str: ...
    @property
    def mm_position(self) -> _PlaceholderRange: ...


class VLLMRequest(Protocol):
    """vllm/v1/request.py."""

    @property
    def request_id(self) -> str:
        """Returns the id of the request."""
        ...

    @property
    def kv_transfer_params(self) -> Mapping[str, object] | None:
        """Returns what the request says of KV transfer."""
        ...

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """Returns the token ids of the prompt, if there are any."""
        ...

    @property
    def prompt_embeds(self) -> object:
        """Returns the embeddings of the prompt, if there are any."""
        ...

    @property
    def prompt_is_token_ids(self) -> object:
        """Returns which positions are token ids, if some are not."""
        ...

    @property
    def pooling_params(self) -> object:
        """Returns the parameters of pooling, if it pools."""
        ...

    @property
    def resumable(self) -> bool:
        """Returns whether its prompt may grow."""
        ...

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Returns whether no cache may be read for it."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Returns the token ids of prompt and answer."""
        ...

    @property
    def cache_salt(self) -> str | None:
        """Returns the cache salt, if it has one."""
        ...

    @property
    def lora_request(self) -> LoRARequest | None:
        """Returns the adapter, if it has one."""
        ...

    @property
    def mm_features(self) -> Sequence[_MultiModalFeature]:
        """Returns images and other media of the prompt."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Returns how many tokens are computed."""
        ...

    @property
    def num_preemptions(self) -> int:
        """Returns how often it was preempted."""
        ...

    @property
    def arrival_time(self) -> float:
        """Returns when it arrived, in seconds since 1970."""
        ...


class KVCacheBlocks(Protocol):
    """vllm/v1/core/kv_cache_manager.py, `KVCacheBlocks`."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Returns the ids of its blocks, group by group."""
        ...


class KVCacheBlock(Protocol):
    """vllm/v1/core/kv_cache_utils.py, `KVCacheBlock`."""

    ref_cnt: int


class BlockPool(Protocol):
    """vllm/v1/core/block_pool.py."""

    @property
    def blocks(self) -> Sequence[KVCacheBlock]:
        """Returns all blocks."""
        ...

    @property
    def cached_block_hash_to_block(self) -> object:
        """Returns the blocks of the prefix cache by hash."""
        ...

    def touch(self, blocks: Sequence[Any]) -> None:
        """Counts one more user of blocks."""
        ...

    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None:
        """Counts one user less of blocks."""
        ...


class KVCacheManager(Protocol):
    """vllm/v1/core/kv_cache_manager.py."""

    @property
    def block_pool(self) -> BlockPool:
        """Returns the pool of blocks."""
        ...

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Returns the ids of its blocks, group by group."""
        ...


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
    def scheduled_new_reqs(self) -> Sequence[_NewRequestData]:
        """Returns requests that are scheduled for the first time."""
        ...

    @property
    def scheduled_cached_reqs(self) -> _CachedRequestData:
        """Returns requests that were scheduled before."""
        ...

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """Returns the tokens of each request in this step."""
        ...
