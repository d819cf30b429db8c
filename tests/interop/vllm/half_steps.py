"""Drives the scheduler's half of vLLM without vLLM: its configuration, requests as vLLM makes them, single steps."""

import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from kvparams_connectors.engines.vllm.scheduler_connector import SchedulerConnector

__all__ = [
    "PROMPT",
    "FullAttentionSpec",
    "MambaSpec",
    "Manager",
    "NoBlocks",
    "Pool",
    "SlidingWindowSpec",
    "key_of",
    "make_cache",
    "make_config",
    "make_image",
    "make_request",
    "one_step",
    "saves_of",
]

PROMPT: Final = list(range(300))


class FullAttentionSpec:
    """As vLLM's, as far as it is read."""

    block_size, num_kv_heads, head_size, dtype = 32, 2, 64, "torch.float32"


class SlidingWindowSpec(FullAttentionSpec):
    """The same."""

    sliding_window: int | None = 128


class MambaSpec:
    """Of a kind that keeps no tokens."""

    block_size = 32


def make_config(folder: Path, **transfer: object) -> Any:
    """`VllmConfig`, as far as it is read."""
    model = SimpleNamespace(
        model=str(folder),
        revision=None,
        quantization=None,
        hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 1}),
        use_mla=False,
        get_total_num_kv_heads=lambda: 2,
        get_total_num_hidden_layers=lambda: 2,
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
    )
    told: dict[str, object] = {"engine_id": "E", "kv_load_failure_policy": "recompute"}
    told |= {"is_kv_producer": True, "is_kv_consumer": True, **transfer}
    return SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        cache_config=SimpleNamespace(block_size=32, cache_dtype="auto"),
        kv_transfer_config=SimpleNamespace(**told),
    )


def make_cache(*specs: object) -> Any:
    """`KVCacheConfig` with a group of each spec, of one of the two layers if there are two."""
    groups = [
        SimpleNamespace(layer_names=["l.0", "l.1"] if len(specs) == 1 else [f"l.{at}"], kv_cache_spec=spec)
        for at, spec in enumerate(specs)
    ]
    return SimpleNamespace(num_blocks=100, kv_cache_groups=groups)


def make_request(name: str, **more: Any) -> Any:
    """`Request`, with the prompt of 300 tokens."""
    told: dict[str, Any] = {
        "request_id": name,
        "kv_transfer_params": None,
        "prompt_token_ids": list(PROMPT),
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "pooling_params": None,
        "resumable": False,
        "skip_reading_prefix_cache": False,
        "all_token_ids": list(PROMPT),
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "num_computed_tokens": 0,
        "num_preemptions": 0,
        "arrival_time": time.time(),
        **more,
    }
    return SimpleNamespace(**told)


class Pool:
    """`BlockPool`: each block has one user."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=block, ref_cnt=1) for block in range(10)]
        self.cached_block_hash_to_block: dict[object, object] = {}

    def reset_prefix_cache(self) -> None:
        self.cached_block_hash_to_block = {}

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1


class Manager:
    """`KVCacheManager`: every request has blocks 0 to 9."""

    def __init__(self) -> None:
        self.block_pool: Any = Pool()

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return (list(range(10)),)


class NoBlocks:
    """`KVCacheBlocks`, of a request that loads nothing."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        return ([],)


def make_image(content: str, offset: int = 10, length: int = 20, *, identifier: str | None = None) -> Any:
    """`MultiModalFeatureSpec`; its identifier is a digest of the content, unless it is told."""
    identifier = sha256(content.encode()).hexdigest() if identifier is None else identifier
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


def one_step(asked: Any) -> Any:
    """`SchedulerOutput`, of a step that computes the whole prompt of a request."""
    new = SimpleNamespace(req_id=asked.request_id, num_computed_tokens=0, block_ids=(list(range(10)),))
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=set(), new_block_ids=[])
    counts = {asked.request_id: len(PROMPT)}
    return SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=cached, num_scheduled_tokens=counts)


def saves_of(half: SchedulerConnector, asked: Any) -> list[Any]:
    """What is saved when the whole prompt is computed in one step."""
    half.new_request(asked)
    give_up = time.monotonic() + 20
    while (found := half.get_num_new_matched_tokens(asked, 0)) == (None, False):
        assert time.monotonic() < give_up
    assert found == (0, False)
    half.update_state_after_alloc(asked, NoBlocks(), 0)
    found_saves = half.build_metadata(one_step(asked)).saves
    half.request_finished(asked)
    assert not len(half.state)
    return list(found_saves)


def key_of(half: SchedulerConnector, asked: Any) -> str:
    """Of the first page that is saved."""
    (save,) = saves_of(half, asked)
    assert (save.start, save.end) == (0, 256)
    sequence = save.sequence
    return half.state.plan_of(sequence.token_ids, sequence.shared_params, sequence.extras).keys[0]
