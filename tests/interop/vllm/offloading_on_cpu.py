"""Provides vLLM's TieringOffloadingSpec without a GPU, for tests: `spec_name` OnCPU, this `spec_module_path`.

vLLM 0.32 refuses to offload from a CPU ("only supported on CUDA-alike and XPU GPUs", vllm/v1/kv_offload/cpu/spec.py).
All of its code runs here nevertheless, except for four stand-ins: the question whether a tensor is a GPU's, streams,
events, and the copy itself, which is done at once.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUntypedBaseClass=false, reportUnknownParameterType=false
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
import ctypes
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["OnCPU"]


class _Tensor(torch.Tensor):
    """The engine's KV, which is no GPU's."""

    is_cuda = True


class _Stream:
    """What is put on it is done by then."""

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass


class _Event:
    """Has always come."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0.0

    def record(self, stream: object) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "_Event") -> float:
        return (later._at - self._at) * 1e3


class _Platform:
    """vLLM's, with streams."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.Stream = _Stream

    def current_stream(self) -> _Stream:
        return _Stream()

    @contextmanager
    def stream(self, stream: object) -> Generator[None]:
        yield

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Torch:
    """torch, with events."""

    Event = _Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _copy(source: torch.Tensor, target: torch.Tensor, sizes: torch.Tensor, **_: object) -> None:
    for start, end, size in zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(end, start, size)


def _always_copy(*_: object, **__: object) -> Any:
    return _copy


gpu_worker.current_platform = _Platform(gpu_worker.current_platform)
gpu_worker.torch = _Torch()
gpu_worker._select_swap_blocks_fn = _always_copy


class OnCPU(TieringOffloadingSpec):
    """See the module."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> Any:
        if not self._worker:
            tensors = [
                CanonicalKVCacheTensor(one.tensor.as_subclass(_Tensor), one.page_size_bytes)
                for one in kv_caches.tensors
            ]
            self._worker = self.create_worker(CanonicalKVCaches(tensors, kv_caches.group_data_refs))
        return self._worker
