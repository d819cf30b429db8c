"""Provides our connector with saves that are copied late; vLLM loads `LateConnector` by its module path.

Each save waits until another one has been ordered, at most `KVPARAMS_LATE_S` seconds. With `KVPARAMS_LATE_HELD=no` the
engine is not told to keep the blocks, so such a save is copied when other requests have its blocks.
"""

import os
import threading
from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

import torch

from kvparams_connectors.engines.vllm.connector import KVParamsConnector
from kvparams_connectors.engines.vllm.interface import BlockPool
from kvparams_connectors.jobs import Job, WorkerPool

__all__ = ["LateConnector"]

T = TypeVar("T")


class _LateLane(WorkerPool):
    """Does nothing at once."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._ordered = threading.Condition()
        self._orders = 0

    def submit(self, work: Callable[[Job[T]], T], deadline_s: float, *, timed_out: T, refused: T) -> Job[T]:
        with self._ordered:
            self._orders += 1
            mine = self._orders
            self._ordered.notify_all()

        def late(job: Job[T]) -> T:
            with self._ordered:
                self._ordered.wait_for(lambda: self._orders > mine, float(os.environ["KVPARAMS_LATE_S"]))
            return work(job)

        return super().submit(late, deadline_s, timed_out=timed_out, refused=refused)


class LateConnector(KVParamsConnector):
    """See the module."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        mover: Any = self._worker
        transfers = mover._transfers
        assert transfers._aside is not None
        transfers._aside = _LateLane("late")

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        if os.environ.get("KVPARAMS_LATE_HELD") == "no":
            numbers = count(1 << 40)
            self._planner.state.pin_blocks = lambda blocks: next(numbers)
