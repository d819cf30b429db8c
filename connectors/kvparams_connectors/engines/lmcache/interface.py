"""Defines what is used of LMCache 0.5.6, with the file that each part stands in. It has few types of its own.

Nothing of LMCache is used that does not stand here.
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
    def itemsize(self) -> int:
        """Returns the bytes of an element."""
        ...


class MemoryFormat(Protocol):
    """lmcache/v1/memory_management.py: an enumeration."""

    @property
    def name(self) -> str:
        """Returns the name of the format."""
        ...


class MemoryObj(Protocol):
    """Declares a piece of LMCache's pool (lmcache/v1/memory_management.py).

    Its memory goes back when the count reaches 0, also while `byte_array`, which keeps nothing alive, is still around.
    """

    @property
    def byte_array(self) -> memoryview:
        """Returns the bytes of the chunk."""
        ...

    def get_shapes(self) -> Sequence[Sequence[int]]:
        """Returns the shape of each group of layers."""
        ...

    def get_memory_format(self) -> MemoryFormat:
        """Returns the order of the elements."""
        ...

    def ref_count_up(self) -> None:
        """Counts one more user."""
        ...

    def ref_count_down(self) -> None:
        """Counts one user less; the last one frees the memory."""
        ...


class CacheEngineKey(Protocol):
    """lmcache/utils.py."""

    @property
    def worker_id(self) -> int:
        """Returns the rank whose part it is."""
        ...

    def to_string(self) -> str:
        """Returns the key as text, tags and all."""
        ...


class LMCacheMetadata(Protocol):
    """lmcache/v1/metadata.py, `LMCacheMetadata`. Shapes are [K and V, layers, tokens, elements] for each group."""

    @property
    def use_mla(self) -> bool:
        """Returns whether the model has one latent for all heads."""
        ...

    @property
    def chunk_size(self) -> int:
        """Returns the tokens of a full chunk."""
        ...

    def get_shapes(self, num_tokens: int | None = None) -> Sequence[Sequence[int]]:
        """Returns the shape of each group of layers."""
        ...

    def get_dtypes(self) -> Sequence[TorchDtype]:
        """Returns the element type of each group of layers."""
        ...


class LMCacheEngineConfig(Protocol):
    """lmcache/v1/config.py, `LMCacheEngineConfig`."""

    @property
    def extra_config(self) -> Mapping[str, object] | None:
        """Returns the settings that LMCache does not know itself."""
        ...

    @property
    def use_layerwise(self) -> bool:
        """Returns whether layers are stored one by one."""
        ...

    @property
    def remote_serde(self) -> str | None:
        """Returns the name of the encoding of remote chunks."""
        ...


class LocalCPUBackend(Protocol):
    """lmcache/v1/storage_backend/local_cpu_backend.py: where memory for chunks that are read comes from."""

    def allocate(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[TorchDtype],
        fmt: MemoryFormat,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> MemoryObj | None:
        """Allocates memory for one chunk, or returns None."""
        ...

    def batched_allocate(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[TorchDtype],
        batch_size: int,
        fmt: MemoryFormat,
        eviction: bool = True,
        busy_loop: bool = True,
    ) -> list[MemoryObj] | None:
        """Allocates memory for several chunks, or returns None."""
        ...


class ConnectorContext(Protocol):
    """Declares `ConnectorContext` of lmcache/v1/storage_backend/connector/__init__.py.

    In the scheduler's process `local_cpu_backend` is a stub that allocates nothing.
    """

    @property
    def config(self) -> LMCacheEngineConfig | None:
        """Returns the configuration of the engine."""
        ...

    @property
    def metadata(self) -> LMCacheMetadata | None:
        """Returns what is known of the model."""
        ...

    @property
    def local_cpu_backend(self) -> LocalCPUBackend:
        """Returns what allocates memory for chunks."""
        ...

    @property
    def plugin_name(self) -> str | None:
        """Returns the name of the plugin in the configuration."""
        ...
