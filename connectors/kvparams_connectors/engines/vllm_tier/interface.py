"""Defines what is used of vLLM 0.32's offloading, with the file that each part stands in.

Nothing of vLLM is used that does not stand here or in `interface_check.py`, which holds it against the vLLM that is
installed.
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
    """Declares `OffloadingModelConfig` of the same file."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...


class _OffloadingCacheConfig(Protocol):
    """Declares `OffloadingCacheConfig` of the same file."""

    @property
    def tokens_per_hash(self) -> int: ...
    @property
    def blocks_per_chunk(self) -> int: ...


class _OffloadingParallelConfig(Protocol):
    """Declares `OffloadingParallelConfig` of the same file."""

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
    """Declares `OffloadingConfig` of the same file; `worker_kv_bytes_per_block` is of all layers."""

    @property
    def groups(self) -> Sequence[_OffloadingGroupConfig]:
        """Returns the groups of layers."""
        ...

    @property
    def worker_kv_bytes_per_block(self) -> int:
        """Returns the bytes of a block on each worker."""
        ...

    @property
    def model(self) -> _OffloadingModelConfig:
        """Returns what is known of the model."""
        ...

    @property
    def cache(self) -> _OffloadingCacheConfig:
        """Returns the configuration of the cache."""
        ...

    @property
    def parallel(self) -> _OffloadingParallelConfig:
        """Returns the configuration of parallelism."""
        ...

    @property
    def canonical_layout(self) -> bool:
        """Returns whether vLLM puts the parts of workers together."""
        ...

    @property
    def kv_cache_layout(self) -> str | None:
        """Returns the name of the order of the elements."""
        ...


class OffloadingSpec(Protocol):
    """vllm/v1/kv_offload/base.py, `OffloadingSpec`. `replicated_layout`: workers hold the same, and it is kept once."""

    @property
    def config(self) -> OffloadingConfig:
        """Returns the configuration of offloading."""
        ...

    @property
    def replicated_layout(self) -> bool:
        """Returns whether all workers hold the same."""
        ...


class TransferJob(Protocol):
    """Declares `TransferJob` of vllm/v1/kv_offload/tiering/base.py.

    `keys[i]` lies in row `chunk_ids[i]` of host memory, which the tier may use until the job is reported.
    """

    @property
    def job_id(self) -> int:
        """Returns the id of the job."""
        ...

    @property
    def keys(self) -> Collection[bytes]:
        """Returns the keys of the chunks."""
        ...

    @property
    def chunk_ids(self) -> Sequence[int]:
        """Returns the row of each chunk."""
        ...


class ReqContext(Protocol):
    """vllm/v1/kv_offload/base.py, `ReqContext`."""

    @property
    def req_id(self) -> str:
        """Returns the id of the request."""
        ...
