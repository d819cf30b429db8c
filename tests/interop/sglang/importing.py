"""Imports SGLang's package on a CPU, as it is, without `sgl_kernel` and other packages that need a GPU.

On a CPU SGLang does not ask for them. SGLang imports torchvision for vision models. It is a CUDA build that does not
find its operators, so two of them are declared here; no test calls them.
"""

import os
import warnings
from importlib import import_module
from typing import Any, Final

__all__ = ["import_sglang"]

_MODULES: Final = (
    *("mem_cache.storage.backend_factory", "mem_cache.pool_host.mha", "mem_cache.pool_host.mla"),
    *("mem_cache.pool_host.mha_mxfp8", "mem_cache.memory_pool_host", "managers.cache_controller"),
    *("mem_cache.hybrid_cache.hybrid_cache_controller", "observability.metrics_collector", "server_args"),
)


def import_sglang() -> list[Any]:
    """Once, for it warns of much. What it returns must be kept."""
    os.environ.setdefault("SGLANG_LOG_LEVEL", "error")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library: Any = import_module("torch").library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return [library, *(import_module(f"sglang.srt.{name}") for name in _MODULES)]
