"""Runs SGLang's own controllers with their storage threads, between a host pool and our backend, on a CPU.

It makes a scheduler's calls in the scheduler's order, and replaces no code of SGLang's controllers.
"""

import threading
from typing import Any, Final

from tests.interop.sglang.pools import Shape, device_pool, fill, fill_pages, host_pool, of_sglang, page_bytes

__all__ = ["Engine"]

_WAIT_S: Final = 120.0


def _same(layer: int) -> int:
    return layer


class Engine:
    """A controller and its pools."""

    def __init__(self, kind: str, shape: Shape, group: Any, config: dict[str, object], **more: Any) -> None:
        device = device_pool(shape)
        allocator = of_sglang("mem_cache.allocator.paged:PagedTokenToKVPoolAllocator")
        tokens = allocator(shape.tokens, shape.page_size, shape.dtype, "cpu", device, False)
        self.pool: Any = host_pool(shape, device)
        memory = self.pool
        self.hybrid = kind == "hybrid"
        if self.hybrid:
            groups = of_sglang("mem_cache.pool_host.group")
            name = of_sglang("mem_cache.hicache_storage:PoolName").KV
            entry = groups.PoolEntry(name, self.pool, device, _same, is_primary_index_anchor=True)
            memory = groups.HostPoolGroup([entry])
        where = {
            "plain": "managers.cache_controller:HiCacheController",
            "hybrid": "mem_cache.hybrid_cache.hybrid_cache_controller:HybridCacheController",
        }
        self.controller: Any = of_sglang(where[kind])(
            *(tokens, memory, shape.page_size, group, threading.Event()),
            **{"storage_backend": "dynamic", "prefetch_threshold": shape.page_size, "model_name": "tiny", **more},
            storage_backend_extra_config=config,
        )

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    def hashes(self, tokens: list[int]) -> list[str]:
        return of_sglang("mem_cache.utils:get_storage_hash_str")(tokens, None, page_size=self.pool.page_size)

    def store(self, tokens: list[int], seed: int) -> tuple[int, list[bytes]]:
        """Have pages backed up: how many tokens are stored, and the pages."""
        indices = self.pool.alloc(len(tokens))
        pages = fill_pages(self.pool, indices, seed)
        self.controller.write_storage(indices, tokens, hash_value=self.hashes(tokens))
        stored = self.controller.ack_backup_queue.get(timeout=_WAIT_S).completed_tokens
        self.pool.free(indices)
        return stored, pages

    def load(self, tokens: list[int]) -> tuple[int, int, list[bytes]]:
        """Have pages prefetched: tokens that the store was said to have, tokens that came, their pages."""
        fill(self.pool, 99)
        if self.hybrid:
            handle = of_sglang("mem_cache.base_prefix_cache:CacheRequestHandle")("request", 1)
            self.controller.prefetch(handle, tokens)
        else:
            self.controller.prefetch("request", tokens)
        operation = self.controller.prefetch_hit_queue.get(timeout=_WAIT_S)
        hit = operation.storage_hit_count
        operation.host_indices = self.pool.alloc(hit)
        self.controller.prefetch_buffer.put(operation)
        completed = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=_WAIT_S)
            completed = max(completed, ack.completed_tokens or 0)
            if ack.completed_req:
                break
        pages = page_bytes(self.pool, operation.host_indices[:completed])
        self.pool.free(operation.host_indices)
        return hit, completed, pages
