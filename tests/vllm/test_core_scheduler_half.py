"""The scheduler's half against a store on disk, with requests as vLLM makes them, without vLLM."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvparams_connectors.engines.vllm.scheduler_half import SchedulerHalf
from kvparams_connectors.engines.vllm.settings import VLLMSettings
from kvparams_connectors.engines.vllm.tables import BlockTables
from kvparams_connectors.layout_forms import LayoutError
from kvparams_connectors.settings import StoreError
from tests.vllm.half_steps import (
    FullAttentionSpec,
    Manager,
    Pool,
    SlidingWindowSpec,
    key_of,
    make_cache,
    make_config,
    make_image,
    make_request,
    saves_of,
)


@pytest.fixture
def half(tmp_path: Path) -> Iterator[SchedulerHalf]:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    settings = VLLMSettings.of({"store": f"file://{tmp_path}/kv?size=16MiB"})
    made = SchedulerHalf(make_config(tmp_path), make_cache(FullAttentionSpec()), settings)
    made.bind(Manager())
    yield made
    made.shutdown()


def test_equal_ids_with_other_content_have_other_keys(half: SchedulerHalf, tmp_path: Path) -> None:
    adapters: list[Any] = []
    for name, weights in (("a", b"1"), ("b", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(weights)
        adapters.append(SimpleNamespace(lora_name=name, lora_path=str(tmp_path / name)))
    renamed = SimpleNamespace(lora_name="a", lora_path=str(tmp_path / "b"))
    requests = [
        make_request("plain"),
        make_request("salt", cache_salt="s"),
        make_request("other salt", cache_salt="t"),
        make_request("image", mm_features=[make_image("x")]),
        make_request("other image", mm_features=[make_image("y")]),
        make_request("moved image", mm_features=[make_image("x", 11)]),
        make_request("two images", mm_features=[make_image("x"), make_image("y", 40)]),
        *(make_request(one.lora_name, lora_request=one) for one in adapters),
        make_request("adapter of the same name", lora_request=renamed),
    ]
    keys = [key_of(half, one) for one in requests]
    assert len(set(keys)) == len(keys)
    assert key_of(half, make_request("again", mm_features=[make_image("x")])) == keys[3]
    assert key_of(half, make_request("again too", lora_request=adapters[0])) == keys[7]


@pytest.mark.parametrize(
    "more",
    [
        {"prompt_embeds": object()},
        {"prompt_embeds": object(), "prompt_token_ids": None},
        {"prompt_is_token_ids": [True, False]},
        {"pooling_params": object()},
        {"resumable": True},
        {"lora_request": SimpleNamespace(lora_name="a", lora_path="/nowhere")},
        {"kv_transfer_params": {"kvparams": {"version": "1.0"}}},
        {"prompt_token_ids": [-1, 2], "all_token_ids": [-1, 2]},
        {"mm_features": [make_image("x", 5, 0)]},
    ],
)
def test_what_no_key_can_say_is_not_cached(half: SchedulerHalf, more: dict[str, Any]) -> None:
    assert saves_of(half, make_request("r", **more)) == []


def test_a_consumer_saves_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    settings = VLLMSettings.of({"store": f"file://{tmp_path}/kv?size=16MiB"})
    half = SchedulerHalf(make_config(tmp_path, is_kv_producer=False), make_cache(FullAttentionSpec()), settings)
    try:
        assert saves_of(half, make_request("r")) == []
    finally:
        half.shutdown()


@pytest.mark.parametrize(
    ("store", "specs", "words"),
    [
        ("memory:?size=1MiB", [FullAttentionSpec()], "several: choose one that others can reach"),
        ("tiered:?l1=memory:", [FullAttentionSpec()], ""),
        ("peer://127.0.0.1?size=1MiB", [FullAttentionSpec()], "at which port the worker listens"),
        ("file://{}/kv?size=16MiB", [SlidingWindowSpec()], "SlidingWindowSpec is not known"),
        ("file://{}/kv?size=16MiB", [FullAttentionSpec(), SlidingWindowSpec()], "--disable-hybrid-kv-cache-manager"),
        ("file://{}/kv?size=16MiB", [], "0 groups of layers (none)"),
    ],
)
def test_what_cannot_be_shared_is_refused(tmp_path: Path, store: str, specs: list[object], words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    settings = VLLMSettings.of({"store": store.format(tmp_path)})
    with pytest.raises((StoreError, LayoutError)) as caught:
        SchedulerHalf(make_config(tmp_path), make_cache(*specs), settings)
    assert words in str(caught.value)


def test_blocks_are_held_until_they_are_copied(half: SchedulerHalf) -> None:
    pool: Any = Pool()
    (save,) = saves_of(half, make_request("without a pool"))
    assert save.number is None
    half.bind_pool(pool)
    assert not half.copying
    (save,) = saves_of(half, make_request("r"))
    assert [block.ref_cnt for block in pool.blocks] == [2] * 8 + [1, 1]  # 256 tokens in blocks of 32
    assert half.copying
    assert not half.keeps_others_waiting
    pool.free_blocks(pool.blocks[:])  # the request is over
    assert half.keeps_others_waiting
    half.news([(1 << 20, 0.1)], [save.number])
    assert not half.copying
    assert not half.keeps_others_waiting
    assert [block.ref_cnt for block in pool.blocks] == [0] * 10


def _scheduled(new: dict[str, list[int]], more: dict[str, list[int] | None], resumed: set[str]) -> Any:
    """A `SchedulerOutput` with blocks of requests that are new, and what comes to others."""
    cached = SimpleNamespace(
        req_ids=list(more),
        new_block_ids=[None if blocks is None else (blocks,) for blocks in more.values()],
        resumed_req_ids=resumed,
        num_computed_tokens=[0] * len(more),
    )
    first = [SimpleNamespace(req_id=name, block_ids=(blocks,)) for name, blocks in new.items()]
    return SimpleNamespace(scheduled_new_reqs=first, scheduled_cached_reqs=cached)


def test_without_a_manager_block_tables_are_kept_along_the_orders() -> None:
    tables = BlockTables()
    tables.follow(_scheduled({"a": [1, 2], "b": [3]}, {}, set()))
    tables.follow(_scheduled({}, {"a": [4], "b": None}, set()))
    assert (tables.of("a"), tables.of("b")) == ([1, 2, 4], [3])
    tables.follow(_scheduled({}, {"a": [7, 8], "b": [9]}, {"a"}))  # a was preempted meanwhile
    assert (tables.of("a"), tables.of("b")) == ([7, 8], [3, 9])
    tables.forget("a")
    with pytest.raises(KeyError):
        tables.of("a")
    tables.bind(Manager())
    assert tables.of("a") == list(range(10))
