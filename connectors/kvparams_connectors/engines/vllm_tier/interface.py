"""What is used of vLLM 0.32's offloading, with the file that each part stands in.

The one rule: nothing of vLLM is used that does not stand here or in `interface_check.py`, which holds it against the
vLLM that is installed.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

__all__ = ["OffloadingConfig", "OffloadingSpec", "ReqContext", "TransferJob"]


class _OffloadingGroupConfig(Protocol):
    """vllm/v1/kv_offload/config.py, `OffloadingGroupConfig`."""

    @property
    def group_id(self) -> int: ...
    @property
    def tokens_per_block(self) -> int: ...
    @property
    def layer_names(self) -> tuple[str, ...]: ...


class _OffloadingModelConfig(Protocol):
    """Of the same file, `OffloadingModelConfig`."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...


class _OffloadingCacheConfig(Protocol):
    """Of the same file, `OffloadingCacheConfig`."""

    @property
    def tokens_per_hash(self) -> int: ...
    @property
    def blocks_per_chunk(self) -> int: ...


class _OffloadingParallelConfig(Protocol):
    """Of the same file, `OffloadingParallelConfig`."""

    @property
    def world_size(self) -> int: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
    @property
    def pcp_size(self) -> int: ...
    @property
    def dcp_size(self) -> int: ...


class OffloadingConfig(Protocol):
    """Of the same file, `OffloadingConfig`. `worker_kv_bytes_per_block` is of all layers."""

    @property
    def groups(self) -> Sequence[_OffloadingGroupConfig]: ...
    @property
    def worker_kv_bytes_per_block(self) -> int: ...
    @property
    def model(self) -> _OffloadingModelConfig: ...
    @property
    def cache(self) -> _OffloadingCacheConfig: ...
    @property
    def parallel(self) -> _OffloadingParallelConfig: ...
    @property
    def canonical_layout(self) -> bool: ...
    @property
    def kv_cache_layout(self) -> str | None: ...


class OffloadingSpec(Protocol):
    """vllm/v1/kv_offload/base.py, `OffloadingSpec`. `replicated_layout`: workers hold the same, and it is kept once."""

    @property
    def config(self) -> OffloadingConfig: ...
    @property
    def replicated_layout(self) -> bool: ...


class TransferJob(Protocol):
    """vllm/v1/kv_offload/tiering/base.py. `keys[i]` lies in row `chunk_ids[i]` of host memory, which stays ours until
    the job is reported."""

    @property
    def job_id(self) -> int: ...
    @property
    def keys(self) -> Collection[bytes]: ...
    @property
    def chunk_ids(self) -> Sequence[int]: ...


class ReqContext(Protocol):
    """vllm/v1/kv_offload/base.py, `ReqContext`."""

    @property
    def req_id(self) -> str: ...
