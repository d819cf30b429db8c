"""Tests the scheduler's half against a store on disk, with requests as vLLM makes them, without vLLM."""

# pyright: reportPrivateUsage=false
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvparams.codec import parse
from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.keyring_file import create_keyring, read_keyring
from kvparams.signing.signer import Signer
from kvparams_connectors.engines.vllm.block_tables import BlockTables
from kvparams_connectors.engines.vllm.scheduler_connector import SchedulerConnector
from kvparams_connectors.engines.vllm.settings import VLLMSettings
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.transfer.cache_layouts import LayoutError
from kvparams_connectors.transfer.reports import PrefixHit
from tests.interop.vllm.half_steps import (
    PROMPT,
    FullAttentionSpec,
    MambaSpec,
    Manager,
    NoBlocks,
    Pool,
    key_of,
    make_cache,
    make_config,
    make_image,
    make_request,
    one_step,
    saves_of,
)


@pytest.fixture
def half(tmp_path: Path) -> Iterator[SchedulerConnector]:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    settings = VLLMSettings.of({"store": f"file://{tmp_path}/kv?size=16MiB", "trust_media_hashes": True})
    made = SchedulerConnector(make_config(tmp_path), make_cache(FullAttentionSpec()), settings)
    made.bind(Manager())
    yield made
    made.shutdown()


def test_equal_ids_with_other_content_have_other_keys(half: SchedulerConnector, tmp_path: Path) -> None:
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


def record_lookups(half: SchedulerConnector, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Returns the plans that are looked up in the store from now on."""
    found: list[object] = []
    search = half.state._search

    def look_up(plan: Any) -> Any:
        found.append(plan)
        return search.look_up(plan)

    monkeypatch.setattr(half.state, "_search", SimpleNamespace(plan=search.plan, pages=search.pages, look_up=look_up))
    return found


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
        {"mm_features": [make_image("x", identifier="cat.jpg")]},
        {"mm_features": [make_image("x"), make_image("y", 40, identifier="")]},
        {"mm_features": [make_image("x", identifier="adapter:" + "0" * 64)]},
        {"mm_features": [make_image("x", identifier="0" * 64 + "\n")]},
    ],
)
def test_what_no_key_can_say_is_not_cached(
    half: SchedulerConnector, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither stored nor looked up."""
    assert saves_of(half, make_request("r", **more)) == []
    asked = make_request("again", **more)
    looked_up = record_lookups(half, monkeypatch)
    half.new_request(asked)
    assert half.get_num_new_matched_tokens(asked, 0) == (0, False)
    assert looked_up == []
    half.request_finished(asked)


def test_an_ordinary_request_is_stored_and_looked_up(half: SchedulerConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    assert len(saves_of(half, make_request("r"))) == 1
    asked = make_request("again")
    looked_up = record_lookups(half, monkeypatch)
    half.new_request(asked)
    assert len(looked_up) == 1
    half.request_finished(asked)


@pytest.mark.parametrize(
    "more",
    [
        {"mm_features": [make_image("x", identifier="cat.jpg")]},
        {"resumable": True},
        {"lora_request": SimpleNamespace(lora_name="a", lora_path="/nowhere")},
    ],
)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_leg_that_is_not_cached_is_answered_all_the_same(
    half: SchedulerConnector, more: dict[str, Any], phase: str
) -> None:
    """A proxy that gets no document back takes the engine for one that does not speak kvparams."""
    asked = make_request("r", kv_transfer_params={"kvparams": {**_DOCUMENT, "phase": phase}}, **more)
    half.new_request(asked)
    assert half.get_num_new_matched_tokens(asked, 0) == (0, False)
    half.update_state_after_alloc(asked, NoBlocks(), 0)
    assert half.build_metadata(one_step(asked)).saves == []
    asked.num_preemptions = 1
    assert half.get_num_new_matched_tokens(asked, 0) == (0, False)  # nothing is looked up for it later either
    asked.num_computed_tokens = 300
    answer = parse(cast("Any", half.request_finished(asked))["kvparams"])
    assert answer.phase == f"{phase}_result"
    assert not answer.load_keys
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 300
    assert not len(half.state)


def test_images_are_cached_only_where_somebody_vouches_for_their_hashes(tmp_path: Path) -> None:
    """What vLLM calls a hash may be what a client calls its image, and whoever reaches the engine may say so."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    keys = tmp_path / "signing-keys.json"
    create_keyring(keys, SigningKeyring([SigningKey.new(int(time.time()) - 7200)]))
    signer = Signer(read_keyring(keys), "pool", lambda: time.time() + 30)
    image = make_image("x")
    for trusted, signing in ((False, False), (False, True), (True, False)):
        told: dict[str, object] = {"store": f"file://{tmp_path}/kv?size=16MiB", "trust_media_hashes": trusted}
        if signing:
            told |= {"verify_with": str(keys), "audience": "pool"}
        half = SchedulerConnector(make_config(tmp_path), make_cache(FullAttentionSpec()), VLLMSettings.of(told))
        half.bind(Manager())
        try:
            words = {"kvparams": _DOCUMENT}
            assert bool(saves_of(half, make_request("plain", mm_features=[image]))) is trusted
            assert bool(saves_of(half, make_request("told", mm_features=[image], kv_transfer_params=words))) is trusted
            assert bool(saves_of(half, make_request("text"))) is True
            if signing:
                signed = signer.sign(parse(_DOCUMENT))
                assert saves_of(half, make_request("signed", mm_features=[image], kv_transfer_params=signed))
            named = make_image("x", identifier="cat.jpg")
            assert saves_of(half, make_request("named", mm_features=[named])) == []
        finally:
            half.shutdown()


def test_what_clients_do_is_logged_once_in_a_while(half: SchedulerConnector, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(20):
        saves_of(half, make_request(f"r{number}", prompt_embeds=object()))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert half.counts()["requests_off"] == 20


@pytest.mark.parametrize("digits", [64, 128])
def test_a_digest_names_an_image_with_the_adapter_before_it_too(
    half: SchedulerConnector, tmp_path: Path, digits: int
) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"1")
    image = make_image("x", identifier="0" * digits)
    named = make_image("x", identifier="a:" + "0" * digits)
    lora = SimpleNamespace(lora_name="a", lora_path=str(tmp_path))
    keys = {key_of(half, make_request("r", mm_features=[one], lora_request=lora)) for one in (image, named)}
    assert len(keys) == 2


class _Says:
    """An answer, whatever is asked."""

    def __init__(self, answer: int | None) -> None:
        self._answer = answer

    def __call__(self, *asked: object) -> int | None:
        return self._answer


def test_a_request_that_shall_not_read_is_offered_nothing_and_saved(
    half: SchedulerConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's own prefix cache: for `prompt_logprobs` the logits of the whole prompt are computed."""
    assert saves_of(half, make_request("saved", skip_reading_prefix_cache=True))
    monkeypatch.setattr(half.state, "get_matched_tokens", _Says(128))
    for skips, offer in ((False, (128, True)), (True, (0, False))):
        asked = make_request(f"skips {skips}", skip_reading_prefix_cache=skips)
        half.new_request(asked)
        assert half.get_num_new_matched_tokens(asked, 0) == offer
        half.request_finished(asked)
    monkeypatch.setattr(half.state, "get_matched_tokens", _Says(None))
    assert half.get_num_new_matched_tokens(make_request("not known yet", skip_reading_prefix_cache=True), 0) == (
        0,
        False,
    )


def test_a_consumer_saves_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    settings = VLLMSettings.of({"store": f"file://{tmp_path}/kv?size=16MiB"})
    half = SchedulerConnector(make_config(tmp_path, is_kv_producer=False), make_cache(FullAttentionSpec()), settings)
    try:
        assert saves_of(half, make_request("r")) == []
    finally:
        half.shutdown()


@pytest.mark.parametrize(
    ("store", "specs", "words"),
    [
        ("memory:?size=1MiB", [FullAttentionSpec()], "several processes; choose a shared store"),
        ("tiered:?l1=memory:", [FullAttentionSpec()], ""),
        ("peer://127.0.0.1?size=1MiB", [FullAttentionSpec()], "give the port of the worker"),
        ("file://{}/kv?size=16MiB", [MambaSpec()], "a cache of the kind MambaSpec is not supported"),
        (
            "file://{}/kv?size=16MiB",
            [FullAttentionSpec(), MambaSpec()],
            "a cache of the kind MambaSpec is not supported",
        ),
        ("file://{}/kv?size=16MiB", [FullAttentionSpec()] * 3, "Turn the store off"),
        ("file://{}/kv?size=16MiB", [], "no groups of layers"),
    ],
)
def test_what_cannot_be_shared_is_refused(tmp_path: Path, store: str, specs: list[object], words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    settings = VLLMSettings.of({"store": store.format(tmp_path)})
    with pytest.raises((StoreError, LayoutError)) as caught:
        SchedulerConnector(make_config(tmp_path), make_cache(*specs), settings)
    assert words in str(caught.value)


def test_blocks_are_held_until_they_are_copied(half: SchedulerConnector) -> None:
    pool: Any = Pool()
    (save,) = saves_of(half, make_request("without a pool"))
    assert save.pin_id is None
    half.bind_pool(pool)
    assert not half.has_pinned_blocks
    (save,) = saves_of(half, make_request("r"))
    assert [block.ref_cnt for block in pool.blocks] == [2] * 8 + [1, 1]  # 256 tokens in blocks of 32
    assert half.has_pinned_blocks
    assert not half.blocks_other_requests
    pool.free_blocks(pool.blocks[:])  # the request is over
    assert half.blocks_other_requests
    half.update_from_workers([(1 << 20, 0.1)], [save.pin_id])
    assert not half.has_pinned_blocks
    assert not half.blocks_other_requests
    assert [block.ref_cnt for block in pool.blocks] == [0] * 10


def test_after_a_reset_nothing_that_is_stored_is_used(
    half: SchedulerConnector, caplog: pytest.LogCaptureFixture
) -> None:
    before = key_of(half, make_request("before"))
    waiting = make_request("waiting", prompt_token_ids=[7] * 300, all_token_ids=[7] * 300)
    half.new_request(waiting)  # its lookup is under way
    half.reset()
    half.request_finished(waiting)
    after, again = key_of(half, make_request("after")), key_of(half, make_request("again"))
    assert before != after == again
    half.reset()
    assert key_of(half, make_request("later")) not in (before, after)
    assert half.counts()["resets"] == 2
    assert caplog.text.count("set keep_on_reset") == 1


@pytest.mark.parametrize("told", [False, True])
def test_a_reset_of_vllms_prefix_cache_alone_is_noticed(half: SchedulerConnector, told: bool) -> None:
    """vLLM tells of it only where it is asked to; either way it is one."""
    pool: Any = Pool()
    half.bind_pool(pool)
    keys = [key_of(half, make_request("before")), key_of(half, make_request("still before"))]
    for _ in range(2):
        pool.reset_prefix_cache()
        if told:
            half.reset()
        keys.append(key_of(half, make_request("after")))
    assert keys[0] == keys[1]
    assert len(set(keys[1:])) == 3
    assert half.counts()["resets"] == 2


@pytest.mark.parametrize("hook", ["new_request", "matched", "orders"])
def test_whatever_vllm_asks_first_after_a_reset_notices_it(half: SchedulerConnector, hook: str) -> None:
    pool: Any = Pool()
    half.bind_pool(pool)
    asked = make_request("r")
    half.new_request(asked)
    pool.reset_prefix_cache()
    {
        "new_request": lambda: half.new_request(make_request("another")),
        "matched": lambda: half.get_num_new_matched_tokens(asked, 0),
        "orders": lambda: half.build_metadata(one_step(asked)),
    }[hook]()
    assert half.counts()["resets"] == 1


def test_a_vllm_that_does_not_show_its_resets_is_told_of(
    half: SchedulerConnector, caplog: pytest.LogCaptureFixture
) -> None:
    pool: Any = Pool()
    del pool.cached_block_hash_to_block
    half.bind_pool(pool)
    assert "does not show resets of its prefix cache" in caplog.text
    assert key_of(half, make_request("r"))


def test_a_lookup_of_before_a_reset_is_made_again(half: SchedulerConnector) -> None:
    asked = make_request("r")
    half.new_request(asked)
    first = half.state.plan_of(PROMPT, None, ())
    half.state._entries["r"].prefix_hit = PrefixHit(256, 2, 100)  # stored, under the first weights
    half.state._entries["r"].lookup = None
    half.reset()
    give_up = time.monotonic() + 20
    while (found := half.get_num_new_matched_tokens(asked, 0)) == (None, False):
        assert time.monotonic() < give_up
    assert found == (0, False)
    plan = half.state._entries["r"].plan
    assert plan is not None
    assert not set(plan.keys) & set(first.keys)


def test_where_weights_never_change_a_reset_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    settings = VLLMSettings.of({"store": f"file://{tmp_path}/kv?size=16MiB", "keep_on_reset": True})
    half = SchedulerConnector(make_config(tmp_path), make_cache(FullAttentionSpec()), settings)
    half.bind(Manager())
    try:
        before = key_of(half, make_request("before"))
        half.reset()
        assert key_of(half, make_request("after")) == before
        assert half.counts()["resets"] == 1
    finally:
        half.shutdown()


_DOCUMENT = {
    "version": "1.0",
    "request_id": "r",
    "transfer": {"id": "t", "attempt": 1},
    "phase": "prefill",
    "mode": "store",
}


def test_only_what_was_signed_for_this_pool_is_acted_on_and_only_once(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    keys = tmp_path / "signing-keys.json"
    create_keyring(keys, SigningKeyring([SigningKey.new(int(time.time()) - 7200)]))
    told = {"store": f"file://{tmp_path}/kv?size=16MiB", "verify_with": str(keys), "audience": "pool"}
    half = SchedulerConnector(make_config(tmp_path), make_cache(FullAttentionSpec()), VLLMSettings.of(told))
    half.bind(Manager())
    try:
        # This process may have begun just now, so the proxy's clock is ahead by what clocks may differ.
        signer = Signer(read_keyring(keys), "pool", lambda: time.time() + 30)
        good = signer.sign(parse(_DOCUMENT))
        other = Signer(read_keyring(keys), "other", time.time).sign(parse(_DOCUMENT))
        late = Signer(read_keyring(keys), "pool", lambda: time.time() - 3600).sign(parse(_DOCUMENT))
        forged = {**good, "kvparams": {**cast("dict[str, object]", good["kvparams"]), "request_id": "s"}}
        saves = [
            len(saves_of(half, make_request(name, kv_transfer_params=params)))
            for name, params in {"good": good, "again": good, "other": other, "forged": forged, "late": late}.items()
        ]
        assert saves[0] >= 1
        assert saves[1:] == [0, 0, 0, 0]
        assert saves_of(half, make_request("unsigned", kv_transfer_params={"kvparams": _DOCUMENT})) == []
        assert saves_of(
            half, make_request("plain", all_token_ids=list(range(1, 301)), prompt_token_ids=list(range(1, 301)))
        )
        counts = {name: count for name, count in half.counts().items() if name.startswith("requests_untrusted")}
        refused = ("replayed", "audience", "forged", "expired", "unsigned")
        assert counts == {f"requests_untrusted/{why}": 1 for why in refused}
    finally:
        half.shutdown()


def test_a_document_that_is_none_is_counted_as_such(half: SchedulerConnector) -> None:
    """And not as one that nobody signed: it is a fault of whoever wrote it."""
    for name, params in {"lacks": {"kvparams": {"version": "1.0"}}, "text": {"kvparams": "x"}}.items():
        assert saves_of(half, make_request(name, kv_transfer_params=params)) == []
    assert saves_of(half, make_request("good", kv_transfer_params={"kvparams": _DOCUMENT}))
    assert half.counts()["requests_untrusted/malformed"] == half.counts()["requests_off"] == 2


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"audience": "pool"}, "verify_with and audience need each other"),
        ({"verify_with": "/nowhere/keys", "audience": "pool"}, "kv_connector_extra_config.verify_with"),
    ],
)
def test_keys_that_cannot_be_used_are_refused(tmp_path: Path, told: dict[str, object], words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(StoreError, match=words):
        SchedulerConnector(
            make_config(tmp_path),
            make_cache(FullAttentionSpec()),
            VLLMSettings.of({"store": f"file://{tmp_path}/kv?size=16MiB", **told}),
        )


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
    assert (tables.of("a"), tables.of("b")) == ([[1, 2, 4]], [[3]])
    tables.follow(_scheduled({}, {"a": [7, 8], "b": [9]}, {"a"}))  # a was preempted meanwhile
    assert (tables.of("a"), tables.of("b")) == ([[7, 8]], [[3, 9]])
    tables.forget("a")
    with pytest.raises(KeyError):
        tables.of("a")
    tables.bind(Manager())
    assert tables.of("a") == (list(range(10)),)
