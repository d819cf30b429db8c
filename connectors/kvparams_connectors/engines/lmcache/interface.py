"""What is used of LMCache 0.5.6, with the file that each part stands in. It has few types of its own.

The one rule: nothing of LMCache is used that does not stand here.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

__all__ = [
    "CacheEngineKey",
    "ConnectorContext",
    "LMCacheEngineConfig",
    "LMCacheMetadata",
    "LocalCPUBackend",
    "MemoryFormat",
    "MemoryObj",
    "TorchDtype",
]


class TorchDtype(Protocol):
    """`torch.dtype`."""

    @property
    def itemsize(self) -> int: ...


class MemoryFormat(Protocol):
    """lmcache/v1/memory_management.py: an enumeration."""

    @property
    def name(self) -> str: ...


class MemoryObj(Protocol):
    """lmcache/v1/memory_management.py: a piece of LMCache's pool. Its memory goes back when the count reaches 0, also
    while `byte_array`, which keeps nothing alive, is still around."""

    @property
    def byte_array(self) -> memoryview: ...
    def get_shapes(self) -> Sequence[Sequence[int]]: ...
    def get_memory_format(self) -> MemoryFormat: ...
    def ref_count_up(self) -> None: ...
    def ref_count_down(self) -> None: ...


class CacheEngineKey(Protocol):
    """lmcache/utils.py."""

    @property
    def worker_id(self) -> int: ...
    def to_string(self) -> str: ...


class LMCacheMetadata(Protocol):
    """lmcache/v1/metadata.py, `LMCacheMetadata`. Shapes are [K and V, layers, tokens, elements] for each group."""

    @property
    def use_mla(self) -> bool: ...
    @property
    def chunk_size(self) -> int: ...
    def get_shapes(self, num_tokens: int | None = None) -> Sequence[Sequence[int]]: ...
    def get_dtypes(self) -> Sequence[TorchDtype]: ...


class LMCacheEngineConfig(Protocol):
    """lmcache/v1/config.py, `LMCacheEngineConfig`."""

    @property
    def extra_config(self) -> Mapping[str, object] | None: ...
    @property
    def use_layerwise(self) -> bool: ...
    @property
    def remote_serde(self) -> str | None: ...


class LocalCPUBackend(Protocol):
    """lmcache/v1/storage_backend/local_cpu_backend.py: where memory for chunks that are read comes from."""

    def allocate(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[TorchDtype],
        fmt: MemoryFormat,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> MemoryObj | None: ...
    def batched_allocate(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[TorchDtype],
        batch_size: int,
        fmt: MemoryFormat,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> list[MemoryObj] | None: ...


class ConnectorContext(Protocol):
    """lmcache/v1/storage_backend/connector/__init__.py, `ConnectorContext`. In the scheduler's process
    `local_cpu_backend` is a stub that allocates nothing."""

    @property
    def config(self) -> LMCacheEngineConfig | None: ...
    @property
    def metadata(self) -> LMCacheMetadata | None: ...
    @property
    def local_cpu_backend(self) -> LocalCPUBackend: ...
    @property
    def plugin_name(self) -> str | None: ...
