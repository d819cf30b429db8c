"""Determines whether vLLM has reset its prefix cache, seen from its block pool.

After new weights whoever operates vLLM resets its caches, but `POST /reset_prefix_cache` tells the connector only with
`reset_external=true` (vllm/v1/core/sched/scheduler.py, `reset_prefix_cache`, 0.28 and 0.32). The pool, however, then
begins a new map of hashes (vllm/v1/core/block_pool.py, `reset_prefix_cache`), with prefix caching on or off.
"""

import logging
from typing import Final

from kvparams_connectors.engines.vllm.interface import BlockPool

__all__ = ["PrefixCacheResets"]

_LOGGER: Final = logging.getLogger(__name__)
_MAP: Final = "cached_block_hash_to_block"


class PrefixCacheResets:
    """Notices resets between two looks. Used by the scheduler's thread alone, as is the pool."""

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._map: object = None

    def bind(self, pool: BlockPool) -> None:
        """Watches this pool."""
        if not hasattr(pool, _MAP):
            _LOGGER.warning(
                "this version of vLLM does not show resets of its prefix cache. After a change of weights, reset "
                "the cache with reset_external=true; otherwise stored KV of the old weights is used"
            )
            return
        self._pool, self._map = pool, pool.cached_block_hash_to_block

    def was_reset(self) -> bool:
        """Returns whether the prefix cache was reset since the last look."""
        if self._pool is None or self._pool.cached_block_hash_to_block is self._map:
            return False
        self._map = self._pool.cached_block_hash_to_block
        return True
