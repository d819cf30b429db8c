"""Our stores under LMCache 0.5.6, as a remote connector of its plugin framework; how to configure it: `settings.py`.

Every chunk is stored behind a header of ours with a checksum, and verified before LMCache sees it: a flipped byte is a
miss. This runs on the event loop of LMCache's storage manager, which its puts and gets share, so nothing here blocks
it. What LMCache cannot be told safely is refused when the plugin is made, not while it serves.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvparams_connectors.engines.lmcache.chunk_keys import LMCacheChunk, LMCacheChunkLayout
from kvparams_connectors.engines.lmcache.chunk_pipeline import ChunkBuffer, LMCacheChunkPipeline
from kvparams_connectors.engines.lmcache.interface import (
    CacheEngineKey,
    ConnectorContext,
    LMCacheEngineConfig,
    LMCacheMetadata,
    LocalCPUBackend,
    MemoryObj,
)
from kvparams_connectors.engines.lmcache.settings import PLUGIN, PluginSettings
from kvparams_connectors.engines.log_forwarding import forward_logs
from kvparams_connectors.store import KVStore
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.stores.guard.store import open_guarded
from kvparams_connectors.transfer.page_pipeline import STORED_CODES

if TYPE_CHECKING:  # LMCache's own classes, as far as they matter here; they come with the extra `lmcache`

    class ConnectorAdapter:
        """lmcache/v1/storage_backend/connector/__init__.py."""

        def __init__(self, schema: str = "") -> None: ...

    class RemoteConnector:
        """lmcache/v1/storage_backend/connector/base_connector.py."""

        meta_fmt: Any

        def __init__(self, config: LMCacheEngineConfig, metadata: LMCacheMetadata) -> None: ...

    def init_logger(name: str) -> logging.Logger:
        """lmcache/logging.py: a logger with a handler of its own."""
        ...

else:
    from lmcache.logging import init_logger
    from lmcache.v1.storage_backend.connector import ConnectorAdapter
    from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

__all__ = ["KVParamsAdapter", "KVParamsRemoteConnector", "chunk_layout_of"]

_LOGGER: Final = logging.getLogger(__name__)

# LMCache calls one of the methods below `list`.
_Chunks = list[LMCacheChunk]
_Objects = list[MemoryObj]
_Found = list[MemoryObj | None]
_Texts = list[str]


class KVParamsAdapter(ConnectorAdapter):
    """Describes what LMCache makes from `module_path` and `class_name`."""

    def __init__(self) -> None:
        super().__init__(f"plugin://{PLUGIN}")
        forward_logs(init_logger("lmcache.kvparams"))

    def can_parse(self, url: str) -> bool:
        """Returns whether a plugin is ours: `plugin://kvparams` or `plugin://kvparams.ANYTHING`."""
        kind, _, name = url.partition("://")
        return kind == "plugin" and name.split(".", 1)[0] == PLUGIN

    def create_connector(self, context: ConnectorContext) -> "KVParamsRemoteConnector":
        """Raises StoreError or PageAuthError; LMCache logs that and goes on without a remote store."""
        if context.config is None or context.metadata is None:
            raise StoreError("LMCache plugin: LMCache gave no configuration or no metadata")
        settings = PluginSettings.of(context.config.extra_config, context.plugin_name or PLUGIN)
        _refuse(context.config)
        seals = settings.read_seals()
        store = open_guarded(settings.store)
        traffic = LMCacheChunkPipeline(
            store, deadline_s=settings.deadline_ms / 1000, lookup_s=settings.deadline_ms / 5000, seals=seals
        )
        return KVParamsRemoteConnector(
            context.config, context.metadata, context.local_cpu_backend, store, traffic, settings.revision or ""
        )


def _refuse(config: LMCacheEngineConfig) -> None:
    if config.use_layerwise:
        raise StoreError(
            "LMCache plugin: use_layerwise counts a chunk as loaded before its layers are read (retrieve_layer in "
            "lmcache/v1/cache_engine.py of 0.5.6), so that a missing or damaged layer would be used; set it to false"
        )
    if config.remote_serde not in (None, "naive"):
        raise StoreError(f"LMCache plugin: remote_serde is {config.remote_serde!r}; only naive can be verified")


def chunk_layout_of(metadata: LMCacheMetadata, order: str, revision: str) -> LMCacheChunkLayout:
    """Returns how the chunks of an engine lie in memory, as LMCache knows it at this moment."""
    shapes, dtypes = metadata.get_shapes(1), metadata.get_dtypes()
    return LMCacheChunkLayout(
        order,
        tuple(
            (str(dtype).removeprefix("torch."), shape[0], shape[1], shape[3])
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ),
        sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)),
        metadata.chunk_size,
        revision,
    )


class KVParamsRemoteConnector(RemoteConnector):
    """LMCache's chunks in a store."""

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        memory: LocalCPUBackend,
        store: KVStore,
        traffic: LMCacheChunkPipeline,
        revision: str = "",
    ) -> None:
        """Takes a store that is open already; LMCache calls `KVParamsAdapter`, which opens it.

        Args:
            config: LMCache's configuration.
            metadata: LMCache's description of the engine; layers may be registered later.
            memory: allocates the chunks that are read.
            store: the store behind `traffic`; closed with the connector.
            traffic: moves the chunks.
            revision: the revision of the weights; part of every key.
        """
        super().__init__(config, metadata)
        self._metadata = metadata
        self._memory = memory
        self._store = store
        self._revision = revision
        self.traffic: Final = traffic
        """What was refused stands there."""

    # ---- what is there

    async def exists(self, key: CacheEngineKey) -> bool:
        """Returns whether a chunk is stored."""
        return bool(await self.traffic.lookup(self._chunks([key])))

    def exists_sync(self, key: CacheEngineKey) -> bool:
        """Returns whether a chunk is stored; waits."""
        return bool(self.batched_contains([key]))

    def support_batched_contains(self) -> bool:
        """Returns True: `batched_contains` is there."""
        return True

    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        """Returns the number of stored chunks before the first that is missing.

        It waits; LMCache calls it from its own threads, the loop's never.
        """
        return self.traffic.lookup(self._chunks(keys)).result()

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[CacheEngineKey], pin: bool = False) -> int:
        """Returns how many chunks are stored, counted until the first that is not."""
        return await self.traffic.lookup(self._chunks(keys))

    # ---- put

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        """Stores a chunk; see `batched_put`."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """Returns True: `batched_put` is there."""
        return True

    async def batched_put(self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]) -> None:
        """Store chunks.

        Raises:
            StoreError: some are not stored; LMCache logs and counts it.
        """
        codes = await self.traffic.put(
            [
                ChunkBuffer(chunk, self._bytes(memory), memory)
                for chunk, memory in zip(self._chunks(keys), memory_objs, strict=True)
            ]
        )
        failed = sorted({code.value for code in codes if code not in STORED_CODES})
        if failed:
            number = sum(code not in STORED_CODES for code in codes)
            raise StoreError(f"{number} of {len(codes)} chunks are not stored: {', '.join(failed)}")

    def _bytes(self, memory: MemoryObj) -> memoryview:
        """The bytes of a chunk; none if it is not of this engine's form, so that it is refused."""
        whole = memory.byte_array.cast("B")  # its own format is one that few libraries know
        form = self._form()
        tokens = form.tokens(whole.nbytes)
        fits = (
            tokens is not None
            and memory.get_memory_format().name == form.order
            and [tuple(shape) for shape in memory.get_shapes()]
            == [tuple(shape) for shape in self._metadata.get_shapes(tokens)]
        )
        return whole if fits else whole[:0]

    # ---- get

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """Returns a chunk, or None; see `batched_get`."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """Returns True: `batched_get` is there."""
        return True

    async def batched_get(self, keys: Sequence[CacheEngineKey]) -> _Found:
        """The chunks; None for each that is missing, damaged or late, or for which there is no memory."""
        objects = self._allocate(len(keys))
        kept: set[int] = set()
        try:
            found = await self.traffic.get(
                [
                    ChunkBuffer(chunk, memory.byte_array.cast("B"), memory)
                    for chunk, memory in zip(self._chunks(keys[: len(objects)]), objects, strict=True)
                ]
            )
            results: _Found = [None] * len(keys)
            for number, (tokens, memory) in enumerate(zip(found, objects, strict=True)):
                if tokens == self._metadata.chunk_size:
                    results[number] = memory
                    kept.add(number)
                elif tokens is not None:
                    results[number] = self._shorter(memory, tokens)
            return results
        finally:  # also when LMCache has cancelled us: then nothing is kept
            for number, memory in enumerate(objects):
                if number not in kept:
                    memory.ref_count_down()

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[CacheEngineKey]) -> _Objects:
        """The chunks until the first that is missing."""
        found = await self.batched_get(keys)
        end = found.index(None) if None in found else len(found)
        for memory in found[end:]:
            if memory is not None:
                memory.ref_count_down()
        return [memory for memory in found[:end] if memory is not None]

    def _allocate(self, number: int) -> _Objects:
        """Allocates room for these full chunks, or for the first of them.

        It never waits: that would stop the loop on which the operations that hold the memory end.
        """
        shapes, dtypes = self._metadata.get_shapes(), self._metadata.get_dtypes()
        together = self._memory.batched_allocate(shapes, dtypes, number, self.meta_fmt, busy_loop=False)
        if together is not None:
            return together
        objects: _Objects = []
        while len(objects) < number:
            memory = self._memory.allocate(shapes, dtypes, self.meta_fmt, busy_loop=False)
            if memory is None:
                _LOGGER.warning("LMCache has no memory for %d of %d chunks", number - len(objects), number)
                break
            objects.append(memory)
        return objects

    def _shorter(self, memory: MemoryObj, tokens: int) -> MemoryObj | None:
        """A chunk that is not full, in memory of its own size: the last one of a prompt."""
        shapes = self._metadata.get_shapes(tokens)
        shorter = self._memory.allocate(shapes, self._metadata.get_dtypes(), self.meta_fmt, busy_loop=False)
        if shorter is not None:
            target = shorter.byte_array.cast("B")
            target[:] = memory.byte_array.cast("B")[: target.nbytes]
        return shorter

    # ---- the rest

    def remove_sync(self, key: CacheEngineKey) -> bool:
        """Deletes a chunk, and returns whether it was there."""
        return self.traffic.remove(self._chunks([key])[0]).result()

    async def list(self) -> _Texts:
        """A store does not say what is in it."""
        raise NotImplementedError

    def support_ping(self) -> bool:
        """Returns True: `ping` is there."""
        return True

    async def ping(self) -> int:
        """0 if the store answers, for LMCache's health monitor."""
        return 0 if await self.traffic.ping() else -1

    async def close(self) -> None:
        """Closes the store without stopping the loop."""
        await asyncio.to_thread(self._store.close)

    def _form(self) -> LMCacheChunkLayout:
        return chunk_layout_of(self._metadata, self.meta_fmt.name, self._revision)

    def _chunks(self, keys: Sequence[CacheEngineKey]) -> _Chunks:
        form = self._form()
        return [LMCacheChunk(form, key.to_string(), key.worker_id) for key in keys]
