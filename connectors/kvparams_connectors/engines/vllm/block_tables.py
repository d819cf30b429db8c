"""Determines which blocks a request has: vLLM's own word where it gives it, else kept along its orders.

vLLM 0.32 gives connectors its cache manager. 0.28 does not; there the scheduler's output says what is new
(vllm/v1/core/sched/output.py): all blocks of a request that is new or was preempted, what is added to those of others.
Where vLLM can be asked, nothing is remembered.
"""

from collections.abc import Sequence

from kvparams_connectors.engines.vllm.interface import KVCacheManager, SchedulerOutput

__all__ = ["BlockTables"]


class BlockTables:
    """Block tables of all groups of layers, by request."""

    def __init__(self) -> None:
        self._manager: KVCacheManager | None = None
        self._kept: dict[str, list[list[int]]] = {}

    def bind(self, manager: KVCacheManager) -> None:
        """Sets the object that knows the block tables."""
        self._manager = manager
        self._kept.clear()

    def follow(self, output: SchedulerOutput) -> None:
        """A step is scheduled."""
        if self._manager is not None:
            return
        for new in output.scheduled_new_reqs:
            self._kept[new.req_id] = [list(table) for table in new.block_ids]
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self._kept[name] = [list(table) for table in blocks or ([],)]
            elif blocks:
                for table, more in zip(self._kept.setdefault(name, [[] for _ in blocks]), blocks, strict=True):
                    table.extend(more)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._kept.pop(request_id, None)

    def of(self, request_id: str) -> Sequence[Sequence[int]]:
        """By group the block table from token 0. Only vLLM's own word says what is gone from behind a window."""
        if self._manager is not None:
            return self._manager.get_block_ids(request_id)
        return self._kept[request_id]
