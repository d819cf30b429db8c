"""Checks that the installed vLLM is what `interface.py` and `connector.py` state; another one fails here, by name."""

import inspect
import json
import subprocess
import sys
from functools import partial
from importlib import import_module
from typing import Any

import pytest

from kvparams.dialects.ec import write_encodings
from kvparams.instances import Instance, Role
from kvparams.routing.handoff_verifier import HandoffVerifier
from kvparams_connectors.engines.vllm.transfer_specs import NULL_BLOCK
from tests.interop.vllm.version import is_earlier

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


_HOOKS = {
    "__init__": ["vllm_config", "role", "kv_cache_config"],
    "bind_kv_cache_manager": ["kv_cache_manager"],
    "bind_gpu_block_pool": ["gpu_block_pool"],
    "has_pending_push_work": [],
    "has_pending_block_frees": [],
    "on_new_request": ["request"],
    "get_num_new_matched_tokens": ["request", "num_computed_tokens"],
    "update_state_after_alloc": ["request", "blocks", "num_external_tokens"],
    "build_connector_meta": ["scheduler_output"],
    "update_connector_output": ["connector_output"],
    "request_finished": ["request", "block_ids"],
    "reset_cache": [],
    "register_kv_caches": ["kv_caches"],
    "start_load_kv": ["forward_context", "kwargs"],
    "wait_for_layer_load": ["layer_name"],
    "save_kv_layer": ["layer_name", "kv_layer", "attn_metadata", "kwargs"],
    "wait_for_save": [],
    "get_finished": ["finished_req_ids"],
    "get_transfer_results": ["finished_req_ids"],
    "get_block_ids_with_load_errors": [],
    "build_connector_worker_meta": [],
    "get_kv_connector_stats": [],
    "shutdown": [],
}
"""Of `KVConnectorBase_V1`, with what vLLM passes."""
_SINCE_032 = {"bind_kv_cache_manager", "get_transfer_results", "has_pending_block_frees"}
"""Of these."""
_MEMBERS = {
    "vllm.v1.request:Request": ["all_token_ids", "update_block_hashes"],
    "vllm.v1.core.sched.output:SchedulerOutput": [
        *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens"),
    ],
    "vllm.v1.core.sched.output:NewRequestData": ["req_id", "block_ids", "num_computed_tokens"],
    "vllm.v1.core.sched.output:CachedRequestData": [
        *("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
    ],
    "vllm.v1.core.kv_cache_manager:KVCacheManager": ["get_block_ids", "block_pool"],
    "vllm.v1.core.block_pool:BlockPool": ["blocks", "touch", "free_blocks"],
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": ["ref_cnt"],
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": ["get_block_ids"],
    "vllm.v1.kv_cache_interface:KVCacheConfig": ["num_blocks", "kv_cache_groups"],
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": ["layer_names", "kv_cache_spec"],
    "vllm.v1.kv_cache_interface:FullAttentionSpec": ["block_size", "num_kv_heads", "head_size", "dtype"],
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": ["block_size", "num_kv_heads", "head_size", "sliding_window"],
    "vllm.config.kv_transfer:KVTransferConfig": [
        *("engine_id", "kv_role", "kv_load_failure_policy", "kv_connector_extra_config", "is_kv_producer"),
    ],
    "vllm.multimodal.inputs:MultiModalFeatureSpec": ["identifier", "mm_position"],
    "vllm.multimodal.inputs:PlaceholderRange": ["offset", "length"],
    "vllm.lora.request:LoRARequest": ["lora_name", "lora_path"],
}
_ATTRIBUTES = [
    *("request_id", "kv_transfer_params", "prompt_token_ids", "prompt_embeds", "prompt_is_token_ids", "pooling_params"),
    *("resumable", "all_token_ids", "cache_salt", "lora_request", "mm_features", "num_computed_tokens"),
    *("num_preemptions", "arrival_time", "skip_reading_prefix_cache"),
]
"""That `Request.__init__` sets."""


def _class(name: str) -> type:
    module, _, member = name.partition(":")
    __import__(module)
    return getattr(sys.modules[module], member)


def test_hooks_take_what_ours_take() -> None:
    base = _class("vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1")
    ours = _class("kvparams_connectors.engines.vllm.connector:KVParamsConnector")
    for name, parameters in _HOOKS.items():
        for kind in (base, ours):
            if kind is base and name in _SINCE_032 and is_earlier():
                continue
            found = [one for one in inspect.signature(getattr(kind, name)).parameters if one != "self"]
            assert found == parameters, f"{kind.__name__}.{name}"
    assert not getattr(ours, "__abstractmethods__", None)


def test_hooks_that_are_new_are_looked_at() -> None:
    """What we leave to the base class is known; one that a newer vLLM adds must be judged before it is."""
    base = _class("vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1")
    left = {
        *("bind_connector_metadata", "build_kv_connector_stats", "build_prom_metrics"),
        *("clear_connector_metadata", "finish_forward", "get_external_cache_hit_sources", "get_finished_count"),
        *("get_handshake_metadata", "get_kv_connector_kv_cache_events", "get_loaded_kv_cache_group_ids"),
        *("get_mem_pool_context", "get_required_kvcache_layout", "handle_preemptions"),
        *("has_connector_metadata",),
        *("register_finished_partial_tail", "requires_kv_delivery", "requires_piecewise_for_cudagraph"),
        *("reset_capture_state", "role", "set_host_xfer_buffer_ops", "set_xfer_handshake_metadata"),
        *("set_xfer_handshake_metadata_pp_aware", "supports_divergent_local_hybrid_hits", "take_events"),
    }
    if is_earlier():
        left -= {
            *("finish_forward", "get_external_cache_hit_sources", "get_loaded_kv_cache_group_ids"),
            *("get_mem_pool_context", "register_finished_partial_tail", "reset_capture_state"),
        }
        left |= {"prefer_cross_layer_blocks", "register_cross_layers_kv_cache"}  # only for who prefers it
    public = {name for name in vars(base) if not name.startswith("_")}
    assert public - left - set(_HOOKS) == set()
    assert left - public == set()


def test_blocks_are_kept_by_counting_users() -> None:
    """What `block_pins.py` relies on: a block that is touched once more outlives its request, and is free
    afterwards."""
    pool_kind = _class("vllm.v1.core.block_pool:BlockPool")
    for caching in (True, False):
        pool = pool_kind(num_gpu_blocks=4, enable_caching=caching, hash_block_size=32)
        (block,) = pool.get_new_blocks(1)
        assert pool.blocks[block.block_id] is block
        pool.touch([block])
        pool.free_blocks([block])  # its request ends
        assert (block.ref_cnt, pool.get_num_free_blocks()) == (1, 2)
        assert block.block_id not in [other.block_id for other in pool.get_new_blocks(2)]
        pool.free_blocks([block])
        assert pool.get_new_blocks(1) == [block]


def test_the_rank_of_an_engine_on_its_machine_is_told() -> None:
    """`ParallelConfig` has it, and it is set before connectors are made."""
    parallel: Any = _class("vllm.config.parallel:ParallelConfig")
    assert not parallel().data_parallel_rank_local
    engine: Any = _class("vllm.v1.engine.core:EngineCoreProc")
    started = inspect.getsource(engine.run_engine_core)
    assert "parallel_config.data_parallel_rank_local = local_dp_rank" in started


def test_a_reset_of_the_prefix_cache_begins_a_new_map() -> None:
    """What `prefix_cache_resets.py` relies on; nothing else does."""
    pool_kind = _class("vllm.v1.core.block_pool:BlockPool")
    for caching in (True, False):
        pool = pool_kind(num_gpu_blocks=4, enable_caching=caching, hash_block_size=32)
        before = pool.cached_block_hash_to_block
        blocks = pool.get_new_blocks(1)
        assert not pool.reset_prefix_cache()  # it fails while blocks are used, and what is cached stays
        assert pool.cached_block_hash_to_block is before
        pool.free_blocks(blocks)
        assert pool.cached_block_hash_to_block is before
        assert pool.reset_prefix_cache()
        assert pool.cached_block_hash_to_block is not before


@pytest.mark.skipif(is_earlier(), reason="windows are refused in words there")
def test_windows_are_kept_and_failures_told_as_is_relied_on() -> None:
    """Block 0 is the one that holds nothing, a window's table begins with it, and loads fail as a whole."""
    pool = _class("vllm.v1.core.block_pool:BlockPool")(num_gpu_blocks=4, enable_caching=True, hash_block_size=32)
    assert pool.null_block.block_id == NULL_BLOCK
    manager: Any = _class("vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager")
    skipped = inspect.getsource(manager.get_num_skipped_tokens)
    assert "num_computed_tokens - self.sliding_window + 1" in skipped
    results = _class("vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorTransferResults")
    told = results(finished_recving={"r"}, failed_recving={"r"})
    assert (told.finished_sending, told.failed_recving) == (set(), {"r"})
    scheduler: Any = _class("vllm.v1.core.sched.scheduler:Scheduler")
    assert "request.num_computed_tokens = 0" in inspect.getsource(scheduler._handle_failed_recving)
    ours: Any = _class("kvparams_connectors.engines.vllm.connector:KVParamsConnector")
    assert issubclass(ours, _class("vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA"))
    hook = list(inspect.signature(ours.request_finished_all_groups).parameters)
    assert hook == ["self", "request", "block_ids"]


@pytest.mark.parametrize("name", list(_MEMBERS))
def test_members_are_there(name: str) -> None:
    kind = _class(name)
    annotated = {member for one in kind.__mro__ for member in getattr(one, "__annotations__", {})}
    for member in _MEMBERS[name]:
        assert member in annotated or hasattr(kind, member) or member in inspect.getsource(kind), member


def test_requests_have_what_is_read() -> None:
    source = inspect.getsource(_class("vllm.v1.request:Request").__init__)
    for name in _ATTRIBUTES:
        assert f"self.{name}" in source, name


def test_a_cpus_attention_says_its_kernel() -> None:
    module = "vllm.v1.attention.backends.cpu_attn:_get_attn_isa"
    parameters = list(inspect.signature(_class(module)).parameters)
    assert parameters == ["dtype", "block_size", "head_size", "kv_cache_dtype"]


def test_the_tier_loads_in_the_version_that_it_knows_and_says_so_in_another() -> None:
    program = "import kvparams_connectors.engines.vllm_tier.tier"
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=200)
    if is_earlier():
        assert run.returncode == 1
        assert "has another tier interface than the supported version 0.32" in run.stderr.splitlines()[-1]
    else:
        assert run.returncode == 0, run.stderr


def test_the_plugin_may_be_called_twice() -> None:
    program = """
from kvparams_connectors.engines.vllm.plugin import register
register(); register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
print(KVConnectorFactory.get_connector_class_by_name("KVParamsConnector").__module__)
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=200)
    assert run.stdout.splitlines()[-1:] == ["kvparams_connectors.engines.vllm.connector"], run.stderr


@pytest.mark.skipif(is_earlier(), reason="the request classes have no ec_transfer_params before 0.32")
def test_what_an_encode_engine_says_reaches_the_connector_of_the_engine_of_the_prompt() -> None:
    """The encodings have the form of ECCPUConnector, which needs Triton (vLLM's V2 model runner) and runs on no CPU."""
    chats: Any = import_module("vllm.entrypoints.openai.chat_completion.protocol")
    responses: Any = import_module("vllm.entrypoints.openai.responses.protocol")
    agents: Any = import_module("vllm.entrypoints.anthropic.protocol")
    said: dict[str, Any] = {
        "5e" * 32: {
            "item_indices": [0],
            "metadata": {},
            "peer_host": "10.0.0.5",
            "peer_port": 5601,
            "size_bytes": 16_384,
            "shape": [16, 256],
        }
    }
    engine = Instance("e", "b", Role.ENCODE, "http://10.0.0.5:8000", "ec")
    verify = partial(HandoffVerifier(()).verify, engine)
    told = {"model": "m", "ec_transfer_params": json.loads(write_encodings(said, verify))}
    said["5e" * 32].pop("metadata")
    messages = [{"role": "user", "content": "Who?"}]
    chat = chats.ChatCompletionRequest.model_validate({**told, "messages": messages})
    response = responses.ResponsesRequest.model_validate({**told, "input": "Who?"})
    for params in (chat.to_sampling_params(1, {}), response.to_sampling_params(1, {})):
        assert params.extra_args is not None
        assert params.extra_args["ec_transfer_params"] == said
    message = agents.AnthropicMessagesRequest.model_validate({**told, "messages": messages, "max_tokens": 1})
    assert message.ec_transfer_params == said
    for answer in (chats.ChatCompletionResponse, responses.ResponsesResponse):
        assert "ec_transfer_params" in answer.model_fields
