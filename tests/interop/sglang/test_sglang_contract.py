"""Checks that the installed SGLang is what `interface.py` and `backend.py` state; another one fails here, by name."""

import inspect
import re
from dataclasses import fields
from importlib.metadata import version

import pytest

from kvparams_connectors.engines.sglang import model_identity
from kvparams_connectors.engines.sglang.backend import KVParamsHiCache
from tests.interop.sglang.pools import MHA_LAYOUTS, MLA_LAYOUTS, Shape, config_of, host_pool, of_sglang, parallel

pytestmark = pytest.mark.filterwarnings("ignore")

_METHODS = {
    "register_mem_pool_host": ["mem_pool_host"],
    "register_mem_host_pool_v2": ["host_pool", "host_pool_name"],
    "on_host_pools_registered": [],
    "batch_get_v1": ["keys", "host_indices", "extra_info"],
    "batch_set_v1": ["keys", "host_indices", "extra_info"],
    "get": ["key", "target_location", "target_sizes"],
    "batch_get": ["keys", "target_locations", "target_sizes"],
    "set": ["key", "value", "target_location", "target_sizes"],
    "batch_set": ["keys", "values", "target_locations", "target_sizes"],
    "exists": ["key"],
    "batch_exists": ["keys", "extra_info"],
    "clear": [],
    "get_stats": [],
}
"""Of `HiCacheStorage`, with what SGLang passes; all of them are ours."""
_LEFT = {"batch_exists_v2", "batch_get_v2", "batch_set_v2"}
"""Only for pools besides KV, which are refused when they are registered."""
_CONFIG = [
    *("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "is_mla_model"),
    *("enable_storage_metrics", "is_page_first_layout", "model_name", "tp_lcm_size", "should_split_heads", "dp_rank"),
    *("extra_config", "dcp_size", "dcp_rank", "logical_page_size"),
]
"""Of `HiCacheStorageConfig`. A rank that is new may cut pages in a way that the keys do not say."""
_POOLS = {"MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost", "MHATokenToKVPoolMXFP8Host"}
"""What SGLang chooses from for heads; the last one is not known here."""


def _parameters(kind: type, name: str) -> list[str]:
    return [one for one in inspect.signature(getattr(kind, name)).parameters if one != "self"]


def test_methods_take_what_ours_take() -> None:
    base = of_sglang("mem_cache.hicache_storage:HiCacheStorage")
    for name, parameters in _METHODS.items():
        assert _parameters(base, name) == parameters, f"HiCacheStorage.{name}"
        assert _parameters(KVParamsHiCache, name) == parameters, name
        assert name in vars(KVParamsHiCache), name
    assert not getattr(KVParamsHiCache, "__abstractmethods__", None)


def test_methods_that_are_new_are_looked_at() -> None:
    base = of_sglang("mem_cache.hicache_storage:HiCacheStorage")
    public = {name for name in dir(base) if not name.startswith("_")}
    assert public == {*_METHODS, *_LEFT}


def test_the_configuration_of_a_backend_is_known_as_a_whole() -> None:
    config = of_sglang("mem_cache.hicache_storage:HiCacheStorageConfig")
    assert [field.name for field in fields(config)] == _CONFIG
    assert config_of("memory:").is_storage_writer
    assert not config_of("memory:", mla=True, tp_rank=1, tp_size=2).is_storage_writer
    known = {field.name for field in fields(of_sglang("mem_cache.hicache_storage:HiCacheStorageExtraInfo"))}
    assert known == {"prefix_keys", "extra_info"}
    assert of_sglang("mem_cache.hicache_storage:PoolName").KV.value == "kv"


def test_the_factory_makes_a_backend_as_it_did() -> None:
    factory = of_sglang("mem_cache.storage.backend_factory:StorageBackendFactory")
    assert "backend_class(storage_config, kwargs)" in inspect.getsource(factory._create_dynamic_backend)
    backend = factory.create_backend("dynamic", config_of("memory:?size=1MiB"), None)
    assert type(backend) is KVParamsHiCache
    backend.close()


@pytest.mark.parametrize("name", ["managers.cache_controller:HiCacheController"])
def test_the_controller_asks_what_it_asked(name: str) -> None:
    source = inspect.getsource(of_sglang(name))
    for text in (
        "batch_get_v1(\n            hash_values, host_indices, extra_info",
        "batch_set_v1(hash_values, host_indices, extra_info)",
        "batch_exists(batch_hashes, extra_info)",
        'extra_config.get("interface_v1", 0)',
    ):
        assert text in source, text


def test_layouts_are_those_that_are_known() -> None:
    """A layout that is new is judged before it is let in."""
    memory = of_sglang("arg_groups.fields.memory")
    for layout in {*MHA_LAYOUTS, *MLA_LAYOUTS}:
        assert f'"{layout}"' in inspect.getsource(memory)
    source = inspect.getsource(of_sglang("mem_cache.pool_host.mha:get_mha_host_pool_cls"))
    assert set(re.findall(r"return (\w+)", source)) == _POOLS


@pytest.mark.parametrize("kind", ["mha", "asymmetric", "mla"])
def test_pools_have_what_is_read(kind: str) -> None:
    pool = host_pool(Shape(kind))
    names = (
        *("layout", "dtype", "page_size", "page_num", "size_per_token", "start_layer", "layer_num"),
        *("target_layer_num", "dcp_size", "storage_format_tag", "shared_allocation_domain", "stores_page_envelope"),
        *("kv_buffer", "get_page_buffer_meta", "get_data_page", "get_dummy_flat_data_page", "alloc", "free"),
        *(("kv_cache_dim",) if kind == "mla" else ("head_num", "head_dim", "v_head_dim")),
    )
    assert [name for name in names if not hasattr(pool, name)] == []


def test_the_server_says_of_its_model_what_is_read() -> None:
    assert model_identity.published_config() is None
    with parallel():
        told = model_identity.published_config()
    assert told is not None
    assert set(told) == {*model_identity.MODEL_SETTINGS, *model_identity.DRAFT_SETTINGS, "adapters"}
    assert (told["model_path"], told["load_format"], told["kv_cache_dtype"]) == ("dummy", "auto", "auto")


def test_storage_metrics_are_what_is_filled() -> None:
    metrics = of_sglang("observability.metrics_collector:StorageMetrics")
    names = ["prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth"]
    assert [field.name for field in fields(metrics)] == names


def test_the_version_is_the_one_that_was_read() -> None:
    assert version("sglang").startswith("0.5.")


def test_adapters_of_the_command_line_are_told() -> None:
    reference = of_sglang("lora.lora_registry:LoRARef")
    same = [reference.deterministic_id("a", "/a") for _ in range(2)]
    assert same[0] == same[1]
    assert reference(lora_name="a").lora_id != reference(lora_name="a").lora_id
    with (
        parallel(),
        of_sglang("runtime_context")
        .get_lora()
        .override(enable_lora=True, lora_paths=[reference(lora_name="a", lora_path="/a")]),
    ):
        told = model_identity.published_config()
    assert told is not None
    assert told["adapters"] == [("a", "/a")]
