"""Creates SGLang's own pools, small and on a CPU, and our backend on them through SGLang's own factory.

No code of SGLang is replaced. The arguments here stand for those of a server's command line.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, cast

import torch

from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode

__all__ = [
    "ALIKE",
    "MHA_LAYOUTS",
    "MLA_LAYOUTS",
    "Shape",
    "backend_on",
    "config_of",
    "device_pool",
    "extra_config",
    "fill",
    "fill_pages",
    "host_pool",
    "names",
    "of_sglang",
    "page_bytes",
    "parallel",
    "put_value",
    "value_of",
]

MHA_LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct")
ALIKE: Final = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}

_PATIENT: Final = {"deadline_s": 300.0}
"""On a busy machine too all that is stored is found and loaded."""


@dataclass(frozen=True)
class Shape:
    """Of a tiny model's cache."""

    kind: str = "mha"
    """mha, asymmetric or mla."""
    layout: str = "page_first"
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 16
    layers: int = 5
    """Five times two pieces of a page are gathered where they lie by layer, five are not."""
    heads: int = 2
    tokens: int = 512


def of_sglang(path: str) -> Any:
    """`module:member`, the module below `sglang.srt`."""
    module, _, member = path.partition(":")
    found: Any = import_module(f"sglang.srt.{module}")
    return getattr(found, member) if member else found


def device_pool(shape: Shape) -> Any:
    """As a server makes it, in ordinary memory."""
    memory = of_sglang("mem_cache.memory_pool")
    common: dict[str, Any] = {
        "size": shape.tokens,
        "page_size": shape.page_size,
        "dtype": shape.dtype,
        "layer_num": shape.layers,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if shape.kind == "mla":
        return memory.MLATokenToKVPool(kv_lora_rank=64, qk_rope_head_dim=16, **common)
    more = {"v_head_dim": 16} if shape.kind == "asymmetric" else {}
    return memory.MHATokenToKVPool(head_num=shape.heads, head_dim=32, **more, **common)


def host_pool(shape: Shape, device: Any = None) -> Any:
    """SGLang's host pool of the class that it would choose."""
    pool = device_pool(shape) if device is None else device
    info = pool.get_device_pool_infos()[0].buffer_info
    if shape.kind == "mla":
        kind, more = of_sglang("mem_cache.pool_host.mla:MLATokenToKVPoolHost"), {"target_layer_num": shape.layers}
    else:
        kind, more = of_sglang("mem_cache.pool_host.mha:get_mha_host_pool_cls")(info), cast("dict[str, int]", {})
    with of_sglang("mem_cache.pool_host.base:host_memory_budget_scope")(1 << 30):
        return kind(
            *(info, 2.0, 0, shape.page_size, shape.layout),
            pin_memory=False,
            device_capacity_tokens=pool.size,
            start_layer=pool.start_layer,
            end_layer=pool.end_layer,
            **more,
        )


def extra_config(url: str, **more: object) -> dict[str, object]:
    """What stands in `--hicache-storage-backend-extra-config`."""
    return {
        "backend_name": "kvparams",
        "module_path": "kvparams_connectors.engines.sglang.backend",
        "class_name": "KVParamsHiCache",
        "interface_v1": 1,
        "store": url,
        "revision": "1",
        **_PATIENT,
        **more,
    }


def config_of(url: str, *, mla: object = False, extra: Mapping[str, object] | None = None, **more: object) -> Any:
    """SGLang's own configuration of a backend."""
    values: dict[str, object] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": bool(mla),
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "tiny",
        "extra_config": extra_config(url, **(extra or {})),
        **more,
    }
    return of_sglang("mem_cache.hicache_storage:HiCacheStorageConfig")(**values)


@contextmanager
def backend_on(pool: Any, config: Any) -> Generator[Any]:
    """Our backend by SGLang's own factory, with the pool registered as its controller does it."""
    factory = of_sglang("mem_cache.storage.backend_factory:StorageBackendFactory")
    backend = factory.create_backend("dynamic", config, pool)
    try:
        backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, of_sglang("mem_cache.hicache_storage:PoolName").KV)
        backend.on_host_pools_registered()
        yield backend
    finally:
        backend.close()


@contextmanager
def parallel(**values: object) -> Generator[None]:
    """A published server configuration, and this process's place among the ranks."""
    context = of_sglang("runtime_context")
    with ExitStack() as stack:
        stack.enter_context(context.get_context().override_server_args())
        size = values.get("tp_size", 1)
        widths = {"attn_tp_size": size, "moe_tp_size": size, "attn_tp_rank": values.get("tp_rank", 0)}
        stack.enter_context(context.get_parallel().override(**{**ALIKE, **widths, **values}))
        yield


def fill(pool: Any, seed: int = 0) -> None:
    """Random bytes everywhere in a host pool."""
    random = torch.Generator().manual_seed(seed)
    for buffer in _buffers(pool):
        buffer.view(torch.uint8).random_(0, 256, generator=random)


def _buffers(pool: Any) -> Sequence[torch.Tensor]:
    found: Any = pool.kv_buffer
    return cast("tuple[torch.Tensor, ...]", found) if isinstance(found, tuple) else (found,)


def fill_pages(pool: Any, indices: torch.Tensor, seed: int) -> list[bytes]:
    """Random bytes in these pages, the same in every pool; what they are."""
    random = torch.Generator().manual_seed(seed)
    nbytes = pool.size_per_token * pool.page_size
    for index in indices[:: pool.page_size]:
        page = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=random)
        pool.set_from_flat_data_page(int(index), page.view(pool.dtype))
    return page_bytes(pool, indices)


def page_bytes(pool: Any, indices: torch.Tensor) -> list[bytes]:
    """What SGLang takes for the pages of these tokens."""
    return [_page(pool, int(index)) for index in indices[:: pool.page_size]]


def _page(pool: Any, index: int) -> bytes:
    if len(_buffers(pool)) > 1:  # asymmetric: SGLang has no copy of a page, so by its own dimensions
        page = index // pool.page_size
        whole = pool.layout == "page_first_direct"
        parts: list[torch.Tensor] = [
            buffer[page] if whole else buffer[index : index + pool.page_size] for buffer in _buffers(pool)
        ]
    else:
        parts = [pool.get_data_page(index)]
    return b"".join(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for part in parts)


def value_of(store: KVStore, key: str) -> bytes:
    """A stored value, byte by byte."""
    buffer = memoryview(bytearray(store.exists([key]).result()[0].nbytes))
    assert store.get([GetOp(key, (buffer,))]).result()[0].code is ResultCode.OK
    return bytes(buffer)


def put_value(store: KVStore, key: str, value: bytes) -> None:
    """Store another value under a key."""
    store.delete([key]).result()
    assert store.put([PutOp(key, (memoryview(value),))]).result()[0].code is ResultCode.OK


def names(count: int, start: int = 0) -> Sequence[str]:
    """As SGLang names pages: 64 hexadecimal digits."""
    return [f"{start + number:064x}" for number in range(count)]
