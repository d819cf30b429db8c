"""The scheduler's half against a store on disk, with requests as vLLM makes them, without vLLM."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvparams_connectors.engines.vllm.scheduler_half import SchedulerHalf
from kvparams_connectors.engines.vllm.settings import VLLMSettings
from kvparams_connectors.layout_forms import LayoutError
from kvparams_connectors.settings import StoreError

_PROMPT = list(range(300))


class FullAttentionSpec:
    """As vLLM's, as far as it is read."""

    block_size, num_kv_heads, head_size, dtype = 32, 2, 64, "torch.float32"


class SlidingWindowSpec(FullAttentionSpec):
    pass


def _config(folder: Path, **transfer: object) -> Any:
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


def _cache(*specs: object) -> Any:
    groups = [SimpleNamespace(layer_names=["l.0", "l.1"], kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(num_blocks=100, kv_cache_groups=groups)


def _request(name: str, **more: Any) -> Any:
    told: dict[str, Any] = {
        "request_id": name,
        "kv_transfer_params": None,
        "prompt_token_ids": list(_PROMPT),
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
        "pooling_params": None,
        "resumable": False,
        "all_token_ids": list(_PROMPT),
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "num_computed_tokens": 0,
        "num_preemptions": 0,
        **more,
    }
    return SimpleNamespace(**told)


class _Manager:
    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return (list(range(10)),)


class _Blocks:
    def get_block_ids(self) -> tuple[list[int], ...]:
        return ([],)


def _image(identifier: str, offset: int = 10, length: int = 20) -> Any:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


@pytest.fixture
def half(tmp_path: Path) -> Iterator[SchedulerHalf]:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    settings = VLLMSettings.of({"store": f"file://{tmp_path}/kv?size=16MiB"})
    made = SchedulerHalf(_config(tmp_path), _cache(FullAttentionSpec()), settings)
    made.bind(_Manager())
    yield made
    made.shutdown()


def _saves(half: SchedulerHalf, request: Any) -> list[Any]:
    """What is saved when the whole prompt is computed in one step."""
    half.new_request(request)
    give_up = time.monotonic() + 20
    while (found := half.matched(request, 0)) == (None, False):
        assert time.monotonic() < give_up
    assert found == (0, False)
    half.allocated(request, _Blocks(), 0)
    new = SimpleNamespace(req_id=request.request_id, num_computed_tokens=0)
    cached = SimpleNamespace(req_ids=[], num_computed_tokens=[])
    counts = {request.request_id: len(_PROMPT)}
    output = SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=cached, num_scheduled_tokens=counts)
    saves = half.orders(output).saves  # pyright: ignore[reportArgumentType]
    half.finished(request)
    assert not len(half.book)
    return list(saves)


def _key(half: SchedulerHalf, request: Any) -> str:
    """Of the first page that is saved."""
    (save,) = _saves(half, request)
    assert (save.start, save.end) == (0, 256)
    sequence = save.sequence
    return half.book.plan_of(sequence.token_ids, sequence.shared, sequence.extras).keys[0]


def test_equal_ids_with_other_content_have_other_keys(half: SchedulerHalf, tmp_path: Path) -> None:
    adapters: list[Any] = []
    for name, weights in (("a", b"1"), ("b", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(weights)
        adapters.append(SimpleNamespace(lora_name=name, lora_path=str(tmp_path / name)))
    renamed = SimpleNamespace(lora_name="a", lora_path=str(tmp_path / "b"))
    requests = [
        _request("plain"),
        _request("salt", cache_salt="s"),
        _request("other salt", cache_salt="t"),
        _request("image", mm_features=[_image("x")]),
        _request("other image", mm_features=[_image("y")]),
        _request("moved image", mm_features=[_image("x", 11)]),
        _request("two images", mm_features=[_image("x"), _image("y", 40)]),
        *(_request(one.lora_name, lora_request=one) for one in adapters),
        _request("adapter of the same name", lora_request=renamed),
    ]
    keys = [_key(half, one) for one in requests]
    assert len(set(keys)) == len(keys)
    assert _key(half, _request("again", mm_features=[_image("x")])) == keys[3]
    assert _key(half, _request("again too", lora_request=adapters[0])) == keys[7]


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
        {"mm_features": [_image("x", 5, 0)]},
    ],
)
def test_what_no_key_can_say_is_not_cached(half: SchedulerHalf, more: dict[str, Any]) -> None:
    request = _request("r", **more)
    assert _saves(half, request) == []


def test_a_consumer_saves_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    settings = VLLMSettings.of({"store": f"file://{tmp_path}/kv?size=16MiB"})
    half = SchedulerHalf(_config(tmp_path, is_kv_producer=False), _cache(FullAttentionSpec()), settings)
    try:
        assert _saves(half, _request("r")) == []
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
        SchedulerHalf(_config(tmp_path), _cache(*specs), settings)
    assert words in str(caught.value)
