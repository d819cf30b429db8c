"""Tests settings, documents, names and the self-test of the vLLM connector, without vLLM."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvparams.codec import parse
from kvparams.keys import ExtraKey, Geometry, KVShard, Namespace, chain_pages
from kvparams.params import Endpoint
from kvparams_connectors.engines.vllm.layer_groups import layer_index
from kvparams_connectors.engines.vllm.rank_geometry import ParallelRanks, RankShard, check_layer_range, rank_shard
from kvparams_connectors.engines.vllm.rank_shards import cpu_cache_layout
from kvparams_connectors.engines.vllm.request_params import prefill_result, read_request_params
from kvparams_connectors.engines.vllm.self_test import SelfTestError, run_self_test
from kvparams_connectors.engines.vllm.settings import VLLMSettings
from kvparams_connectors.engines.weights_identity import (
    Adapters,
    folder_digest,
    model_name,
    revision_of,
    snapshot_commit,
)
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, Results, open_store
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.transfer.cache_layouts import CacheSpec, LayoutError
from kvparams_connectors.transfer.connector import KVStoreConnector
from kvparams_connectors.transfer.connector_settings import ConnectorSettings
from kvparams_connectors.transfer.layout import PagedKVLayout
from kvparams_connectors.transfer.shard_grid import ShardGrid

# ---- settings


def test_settings_have_defaults() -> None:
    settings = VLLMSettings.of({"store": "file:///x", "engine_id": "MultiConnector writes it"})
    assert (settings.store, settings.page_tokens, settings.promise_s) == ("file:///x", 128, 2.0)
    connector = settings.connector(ShardGrid(1, 1), 100 << 20)
    assert connector.arena_bytes == 1600 << 20  # room for 16 pages
    assert settings.connector(ShardGrid(1, 1), 100, groups=4).arena_bytes == 16 << 20  # together as much as one
    assert settings.connector(ShardGrid(1, 1), 100 << 20, groups=4).arena_bytes == 1600 << 20


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (None, "store: must be the store's URL"),
        ({"store": ""}, "store: must be the store's URL"),
        ({"store": "x", "stroe": 1, "a": 2}, "stroe: is not known here; did you mean store"),
        ({"store": "x", "page_tokens": 0}, "page_tokens: must be"),
        ({"store": "x", "page_tokens": True}, "page_tokens: must be"),
        ({"store": "x", "deadline_s": "5"}, "deadline_s: must be"),
        ({"store": "x", "deadline_s": float("nan")}, "deadline_s: must be"),
        ({"store": "x", "keep_on_reset": "no"}, "keep_on_reset: must be true or false"),
        ({"store": "x", "tensor_parallel_sizes": 2}, "a list of sizes"),
        ({"store": "x", "tensor_parallel_sizes": [1, 0]}, "tensor_parallel_sizes[1]: must be a whole number"),
        ({"store": "x", "tensor_parallel_sizes": []}, "a list of sizes"),
        ({"store": "x", "model": ""}, "model: must be text"),
        ({"store": "x", "audience": "x"}, "verify_with and audience need each other"),
        ({"store": "x", "verify": False}, "verify: is not known here; did you mean verify_with"),
    ],
)
def test_settings_are_refused_in_words(extra: dict[str, object] | None, words: str) -> None:
    with pytest.raises(StoreError, match="kv_connector_extra_config") as caught:
        VLLMSettings.of(extra)
    assert words in str(caught.value)


# ---- documents

_DOCUMENT = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill",
    "mode": "store",
}
_OTHERS = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers())


def _read(document: object, **more: Any) -> Any:
    told = {"request_id": "q", "prompt": [1, 2, 3], "cache_salt": None, "lora": None, **more}
    return read_request_params(None if document is None else {"kvparams": document}, **told)  # pyright: ignore[reportArgumentType]


def test_no_document_is_an_ordinary_request() -> None:
    handoff = _read(None)
    assert (handoff.params, handoff.shared_params, handoff.disabled_reason) == (None, None, None)
    salted = _read(None, cache_salt="s", lora="l")
    assert (salted.shared_params.isolation.cache_salt, salted.shared_params.isolation.lora) == ("s", "l")


def test_what_keys_depend_on_is_kept() -> None:
    document = {
        **_DOCUMENT,
        "phase": "decode",
        "load_keys": ["a"],
        "store_keys": ["b"],
        "producer": {"id": "P", "address": "h:1"},
        "isolation": {"cache_salt": "s"},
    }
    handoff = _read(document, cache_salt="s", lora="l")
    assert handoff.is_decode
    assert not handoff.is_prefill
    assert handoff.shared_params.load_keys is None  # a promise is no part of a key
    assert handoff.shared_params.store_keys == ("b",)
    assert handoff.shared_params.producer.address == "h:1"
    assert (handoff.shared_params.isolation.cache_salt, handoff.shared_params.isolation.lora) == ("s", "l")


def test_kv_that_another_connector_moves_makes_an_ordinary_request() -> None:
    """Its pages are saved and found all the same, under the salt that its document names."""
    handoff = _read({**_DOCUMENT, "mode": "pull", "isolation": {"cache_salt": "s"}})
    assert (handoff.params, handoff.disabled_reason) == (None, None)
    assert handoff.shared_params.isolation.cache_salt == "s"


@pytest.mark.parametrize(
    ("change", "more", "words"),
    [
        ({"phase": "release"}, {}, "does not belong to a request for tokens"),
        ({"isolation": {"lora": "x"}}, {"lora": "y"}, "isolation.lora"),
        ({"isolation": {"lora": "x"}}, {}, "isolation.lora"),
        ({"isolation": {"cache_salt": "x"}}, {"cache_salt": "y"}, "isolation.cache_salt"),
        ({"isolation": {"cache_salt": None}}, {"cache_salt": "y"}, "isolation.cache_salt"),
        ({"version": "2.0"}, {}, "kv_transfer_params"),
        ({}, {"cache_salt": "x" * 300}, "longer than 256"),
    ],
)
def test_what_is_in_doubt_switches_the_store_off(change: dict[str, Any], more: dict[str, Any], words: str) -> None:
    """Spec-mandated, 1.0#12.3: another salt than the document's shares nothing, nor does one where it says null."""
    handoff = _read({**_DOCUMENT, **change}, **more)
    assert handoff.params is None
    assert handoff.shared_params is None
    assert words in handoff.disabled_reason


def test_a_salt_that_the_document_does_not_name_is_the_requests() -> None:
    """Spec-mandated, 1.0#12.3."""
    for isolation, salt in (({"lora": "l"}, "s"), ({"lora": "l", "cache_salt": "s"}, None)):
        handoff = _read({**_DOCUMENT, "isolation": isolation}, cache_salt=salt, lora="l")
        assert (handoff.shared_params.isolation.cache_salt, handoff.shared_params.isolation.lora) == ("s", "l")


def test_a_document_of_another_prompt_promises_nothing() -> None:
    """Spec-mandated, 1.0#8.6: the control is a beginning of the prompt."""
    handoff = _read({**_DOCUMENT, "prefix": [9]})
    assert (handoff.params, handoff.disabled_reason) == (None, None)
    assert _read({**_DOCUMENT, "prefix": [1, 2]}).is_prefill


@given(st.dictionaries(st.sampled_from([*_DOCUMENT, "prefix", "isolation", "load_keys"]), _OTHERS))
def test_no_document_raises(change: dict[str, Any]) -> None:
    """One bad request must not end the engine's loop."""
    _read({**_DOCUMENT, **change})
    _read(change)


def test_the_answer_is_a_document() -> None:
    handoff = _read(_DOCUMENT)
    told: dict[str, Any] = {"producer": Endpoint(id="P"), "prompt": [1, 2, 3], "cached_tokens": 9, "loaded_tokens": 2}
    found = prefill_result(handoff, load_keys=["k"], **told)
    assert found is not None
    result = parse(found["kvparams"])  # pyright: ignore[reportArgumentType]
    assert (result.phase, result.load_keys, result.request_id) == ("prefill_result", ("k",), "r")
    assert result.usage is not None
    assert (result.usage.cached_tokens, result.usage.computed_tokens) == (3, 0)
    assert result.prefix is not None
    assert result.prefix.covers([1, 2, 3])
    assert prefill_result(_read(None), load_keys=[], **told) is None
    decoded = prefill_result(_read({**_DOCUMENT, "phase": "decode"}), load_keys=["k"], **told)
    assert decoded is not None
    assert "load_keys" not in decoded["kvparams"]  # pyright: ignore[reportOperatorIssue]


# ---- names and parts


def _share(
    spec_heads: int = 2, heads: int = 4, ranks: ParallelRanks | None = None, sizes: list[int] | None = None
) -> RankShard:
    spec = CacheSpec(16, spec_heads, 8, 8, "float32")
    told: dict[str, Any] = {"model": "m", "revision": "r", "page_tokens": 128, "layers": 2}
    return rank_shard(spec=spec, kv_heads=heads, ranks=ranks or ParallelRanks(2, 1), sizes=sizes, **told)


def test_a_rank_holds_its_heads() -> None:
    share = _share()
    assert (share.shard, share.grid) == (KVShard(0, 2, 2, 4), ShardGrid(2, 2))
    assert _share(sizes=[1, 2, 4]).grid == ShardGrid(2, 1)
    # more ranks than heads: two ranks hold the same
    assert [_share(1, 2, ParallelRanks(4, rank)).shard.head_start for rank in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ranks": ParallelRanks(2, 0, pipeline=2)}, "--pipeline-parallel-size 1"),
        ({"ranks": ParallelRanks(2, 0, context=2)}, "context parallelism"),
        ({"spec_heads": 4}, "turn the store off"),
        ({"ranks": ParallelRanks(3, 0)}, "cannot be divided equally"),
        ({"sizes": [1]}, "must include this engine's size, 2"),
        ({"sizes": [3]}, "cannot be divided over 3 ranks"),
    ],
)
def test_ranks_that_are_not_known_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError) as caught:
        _share(**arguments)
    assert words in str(caught.value)


def test_layers_are_counted_by_their_names() -> None:
    assert layer_index("model.layers.17.self_attn.attn") == 17
    for name in ("model.attn", "model.layers.1.attn.2"):
        with pytest.raises(LayoutError):
            layer_index(name)
    check_layer_range([1, 0], 2)
    for wrong in ([0], [0, 0], [0, 1, 2], [1, 2]):
        with pytest.raises(LayoutError, match="Turn the store off"):
            check_layer_range(wrong, 2)


def test_kernels_that_are_not_known_are_refused() -> None:
    assert cpu_cache_layout("vec") == "vllm_cpu_vec"
    with pytest.raises(LayoutError, match="--dtype float32"):
        cpu_cache_layout("amx")


def test_weights_are_told_apart(tmp_path: Path) -> None:
    one, other = tmp_path / "a" / "m", tmp_path / "b" / "m"
    for folder, last in ((one, b"1"), (other, b"2")):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(1 << 20) + last)
    assert model_name(str(one)) == model_name(str(other)) == "m"
    assert model_name("meta/llama") == "meta/llama"
    assert folder_digest(one) != folder_digest(other)
    (other / "model.safetensors").write_bytes(bytes(1 << 20) + b"1")
    assert folder_digest(one) == folder_digest(other)
    with pytest.raises(StoreError, match="revision"):
        folder_digest(tmp_path)
    with pytest.raises(StoreError, match="revision"):
        snapshot_commit(None)
    assert snapshot_commit("/c/models--x/snapshots/abc/config.json") == "abc"


def test_what_the_engine_makes_of_the_weights_is_part_of_the_name() -> None:
    config = {"rope_theta": 1, "_name_or_path": "/a"}
    name = revision_of("w", None, config)
    assert name == revision_of("w", None, {**config, "_name_or_path": "/b"})
    assert name != revision_of("w", "fp8", config)
    assert name != revision_of("w", None, {**config, "rope_theta": 2})
    assert name != revision_of("v", None, config)


def test_adapters_of_one_name_and_other_weights(tmp_path: Path) -> None:
    adapters = Adapters()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"a" * 100)
    first = adapters.digest(str(tmp_path))
    assert first == adapters.digest(str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"b" * 101)
    second = adapters.digest(str(tmp_path))
    assert first != second
    with pytest.raises(StoreError):
        adapters.digest("hub/adapter")
    namespace = Namespace("m", "r", "float32", Geometry(1, 1, 4, 4), 4)
    chains = {
        chain_pages(namespace, range(8), (ExtraKey(0, 1 << 40, digest),))[1].chain for digest in (first, second)
    } | {chain_pages(namespace, range(8))[1].chain}
    assert len(chains) == 3


# ---- self-test


class _Bent(KVStore):
    """Gives back other bytes than it took, or nothing."""

    def __init__(self, inner: KVStore, *, gone: bool) -> None:
        self._inner, self._gone = inner, gone

    @property
    def capabilities(self) -> Any:
        return self._inner.capabilities

    def register(self, arena: Any) -> None:
        self._inner.register(arena)

    def put(self, ops: Any, deadline_s: float = 5.0) -> Any:
        if self._gone:
            return self._inner.put([PutOp("!", op.buffers) for op in ops], deadline_s)
        return self._inner.put(ops, deadline_s)

    def get(self, ops: Any, deadline_s: float = 5.0) -> Any:
        def bend(results: Results) -> list[Result]:
            for op in ops:
                op.buffers[0][-200 if len(op.buffers[0]) > 400 else -1] ^= 1
            return results

        return self._inner.get([GetOp(op.key, op.buffers) for op in ops], deadline_s).then(bend)

    def exists(self, keys: Any, deadline_s: float = 5.0) -> Any:
        return self._inner.exists(keys, deadline_s)

    def delete(self, keys: Any, deadline_s: float = 5.0) -> Any:
        return self._inner.delete(keys, deadline_s)

    def close(self) -> None:
        self._inner.close()


def _test_of(store: KVStore, *, page_tokens: int = 12, verify: bool = True) -> tuple[bool, list[torch.Tensor]]:
    tensors = [torch.ones(9, 2, 8, 16) for _ in range(2)]
    spec = CacheSpec(8, 2, 8, 8, "float32")
    layout = PagedKVLayout.from_engine(tensors, spec, form="vllm_cpu_vec")
    namespace = Namespace("m", "r", "float32", Geometry(2, 2, 8, 8), page_tokens)
    connector = KVStoreConnector(store, namespace, layout, ConnectorSettings(verify=verify, grid=ShardGrid(2, 1)))
    try:
        told = {"page_tokens": page_tokens, "block_size": 8, "deadline_s": 5.0}
        return run_self_test(connector, store, tensors, **told), tensors  # pyright: ignore[reportArgumentType]
    finally:
        connector.close()
        store.close()


def test_the_self_test_leaves_nothing() -> None:
    passed, tensors = _test_of(open_store("memory:?size=4MiB"))
    assert passed
    for tensor in tensors:
        assert not tensor[-2:].any()
        assert tensor[:-2].all()  # no other block was touched


def test_the_self_test_sees_bytes_that_change() -> None:
    with pytest.raises(SelfTestError, match="came back as"):
        _test_of(_Bent(open_store("memory:?size=4MiB"), gone=False))
    with pytest.raises(SelfTestError, match="changed between save and load"):
        _test_of(_Bent(open_store("memory:?size=4MiB"), gone=False), verify=False)


def test_a_store_that_takes_nothing_does_not_stop_the_engine() -> None:
    passed, _ = _test_of(_Bent(open_store("memory:?size=4MiB"), gone=True))
    assert not passed


def test_a_cache_without_room_for_a_page_is_refused() -> None:
    with pytest.raises(SelfTestError, match="9 blocks"):
        _test_of(open_store("memory:?size=4MiB"), page_tokens=128)
