"""Tests the SGLang backend without SGLang: layouts, settings, weights, and page transfers under faults."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvparams.page_auth import PageAuthKeys
from kvparams.pages import HEADER_BYTES
from kvparams_connectors.conformance import Fault, FaultyStore
from kvparams_connectors.conformance.faults import Operation
from kvparams_connectors.engines.sglang.model_identity import identify_model
from kvparams_connectors.engines.sglang.page_buffers import PageBuffers, gather_page, scatter_page
from kvparams_connectors.engines.sglang.page_keys import HiCachePageLayout
from kvparams_connectors.engines.sglang.page_pipeline import HiCachePagePipeline
from kvparams_connectors.engines.sglang.settings import SGLangSettings
from kvparams_connectors.engines.sglang.transfer_stats import HiCacheStats
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode, is_valid_key
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.stores.memory.store import MemoryStore
from tests.support.waiting import wait_until

_PAGE: Final = 12 * 1024
FORM: Final = HiCachePageLayout(
    *("org/model", "1", None, "mha", "page_first", "bfloat16", 16, 0, 4, 0, 2, 32, 32, (0, 1), (0, 1), (0, 1)),
    payload_bytes=_PAGE,
)
OTHERS: Final = [
    {"model": "other"},
    {"revision": "2"},
    {"tenant": ""},
    {"tenant": "a"},
    {"kind": "mla"},
    {"layout": "layer_first"},
    {"dtype": "float16"},
    {"page_tokens": 8},
    {"layer_start": 4},
    {"layers": 8},
    {"draft_layers": 1},
    {"heads": 4},
    {"k_dim": 64},
    {"v_dim": 64},
    {"tensor": (0, 2)},
    {"tensor": (1, 2)},
    {"pipeline": (0, 2)},
    {"context": (0, 2)},
    {"payload_bytes": _PAGE // 2},
    {"tag": "x"},
]


def pool(count: int, seed: int | None, pieces: int = 2) -> list[PageBuffers]:
    """Pages in so many pieces, that lie apart; zero without a seed."""
    memory = np.zeros((pieces, count, _PAGE // pieces), np.uint8)
    if seed is not None:
        memory[:] = np.frombuffer(Random(seed).randbytes(memory.nbytes), np.uint8).reshape(memory.shape)
    return [[memory[piece, number] for piece in range(pieces)] for number in range(count)]


def content(places: list[PageBuffers]) -> list[bytes]:
    return [b"".join(piece.tobytes() for piece in place) for place in places]


def names(count: int) -> list[str]:
    return [f"{number:064x}" for number in range(count)]


def traffic(store: KVStore, form: HiCachePageLayout = FORM, **more: Any) -> HiCachePagePipeline:
    settings: dict[str, Any] = {"arena_bytes": 1 << 20, "deadline_s": 5.0, **more}
    return HiCachePagePipeline(store, form, settings.pop("tally", HiCacheStats()), **settings)


@pytest.fixture
def store() -> Iterator[KVStore]:
    store = MemoryStore(8 << 20, unit_bytes=4096)
    yield store
    store.close()


# ---- names


def test_every_field_changes_the_key() -> None:
    assert {name for other in OTHERS for name in other} == {field.name for field in fields(HiCachePageLayout)}
    keys = {replace(FORM, **other).page("a").key for other in OTHERS}  # type: ignore[arg-type]
    assert len(keys | {FORM.page("a").key}) == len(OTHERS) + 1


@settings(deadline=None)
@given(st.text(max_size=300), st.text(max_size=300))
def test_every_name_gets_a_key_that_every_store_takes_and_its_own(one: str, other: str) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in (one, other)]
    keys = [FORM.page(text).key for text in texts]
    assert all(is_valid_key(key) for key in keys)
    assert (keys[0] == keys[1]) is (texts[0] == texts[1])


def test_a_form_without_a_model_is_none() -> None:
    for wrong in ({"model": ""}, {"revision": ""}, {"payload_bytes": 0}):
        with pytest.raises(ValueError, match=r"empty|at least"):
            replace(FORM, **wrong)  # type: ignore[arg-type]


# ---- settings


def test_settings_stand_among_sglangs_own() -> None:
    given: dict[str, object] = {
        "backend_name": "kvparams",
        "module_path": "x",
        "class_name": "y",
        "interface_v1": 1,
        "prefetch_threshold": 1,
        "store": "memory:",
        "deadline_s": 2,
        "seal_keys": "/k",
    }
    assert SGLangSettings.of(given) == SGLangSettings(store="memory:", deadline_s=2.0, seal_keys=Path("/k"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (None, "store: must be the store's URL"),
        ({"store": 5}, "store: must be the store's URL"),
        ({"store": ""}, "store: must be the store's URL"),
        ({"store": "memory:", "stor": 5}, "stor: is not known here; did you mean store"),
        ({"store": "memory:", "stor": None}, "stor: is not known here; did you mean store"),
        ({"store": "memory:", "deadline_s": 0}, "must be a number above 0"),
        ({"store": "memory:", "deadline_s": True}, "must be a number above 0"),
        ({"store": "memory:", "deadline_s": float("nan")}, "must be a number above 0"),
        ({"store": "memory:", "verify": False}, "verify: is not known here"),
        ({"store": "memory:", "tenant": "a" * 257}, "text of 1 to 256 bytes"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, object] | None, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        SGLangSettings.of(settings)


# ---- weights

TOLD: Final[Mapping[str, object]] = {
    "model_path": "org/model",
    "revision": None,
    "load_format": "auto",
    "quantization": None,
    "quantization_param_path": None,
    "json_model_override_args": "{}",
    "kv_cache_dtype": "auto",
    "model_impl": "auto",
    "speculative_draft_model_path": None,
    "speculative_draft_model_revision": None,
    "adapters": [],
}
PLAIN: Final = SGLangSettings(store="memory:")


def folder(path: Path, weights: bytes, config: str = "{}") -> Path:
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(weights)
    (path / "config.json").write_text(config)
    return path


def test_of_a_folder_the_files_count_and_not_where_it_lies(tmp_path: Path) -> None:
    def of(name: str, weights: bytes, config: str = "{}") -> tuple[str, str]:
        told = {**TOLD, "model_path": str(folder(tmp_path / name / "m", weights, config))}
        return identify_model(PLAIN, "served", told, draft_layers=0)

    one = of("a", b"1" * 100)
    assert one[0] == "m"
    assert one == of("b", b"1" * 100)
    assert one[1] not in (of("c", b"2" * 100)[1], of("d", b"1" * 100, '{"rope": 1}')[1])


def test_of_a_folder_of_the_hubs_cache_its_commit_counts(tmp_path: Path) -> None:
    commits = [folder(tmp_path / "models--org--model" / "snapshots" / commit, b"") for commit in ("aa", "bb")]
    seen = [identify_model(PLAIN, "s", {**TOLD, "model_path": str(path)}, draft_layers=0) for path in commits]
    assert [name for name, _ in seen] == ["org/model"] * 2
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    "other",
    [
        {"quantization": "fp8"},
        {"json_model_override_args": '{"a": 1}'},
        {"model_impl": "transformers"},
        {"quantization_param_path": "/scales.json"},
    ],
)
def test_what_is_made_of_the_weights_counts(other: dict[str, object]) -> None:
    said = SGLangSettings(store="memory:", revision="1")
    plain = identify_model(said, "s", TOLD, draft_layers=0)
    assert plain[0] == "org/model"
    assert identify_model(said, "s", {**TOLD, **other}, draft_layers=0)[1] != plain[1]
    assert identify_model(said.model_copy(update={"model": "mine"}), "s", TOLD, draft_layers=0) == ("mine", plain[1])


def test_adapters_of_one_name_and_path_with_other_weights_share_nothing(tmp_path: Path) -> None:
    """SGLang's hashes have their name and path: after a new training they are the same."""
    said = SGLangSettings(store="memory:", revision="1")
    path = folder(tmp_path / "adapter", b"1" * 100)

    def seen(*adapters: tuple[str, str], settings: SGLangSettings = said) -> str:
        return identify_model(settings, "s", {**TOLD, "adapters": adapters}, draft_layers=0)[1]

    before = seen(("a", str(path)))
    assert before == seen(("a", str(folder(tmp_path / "elsewhere", b"1" * 100))))
    assert before not in (seen(), seen(("b", str(path))), seen(("a", str(path)), ("b", str(path))))
    assert seen(("a", str(path)), ("b", "x")) == seen(("b", "x"), ("a", str(path)))
    (path / "model.safetensors").write_bytes(b"2" * 100)
    assert seen(("a", str(path))) != before
    weights = SGLangSettings(store="memory:")
    model = folder(tmp_path / "model", b"3")
    told = {**TOLD, "model_path": str(model), "adapters": [("b", str(tmp_path / "nothing"))]}
    with pytest.raises(StoreError, match="the weights of the LoRA adapter b cannot be identified"):
        identify_model(weights, "s", told, draft_layers=0)


def test_weights_that_cannot_be_known_are_refused(tmp_path: Path) -> None:
    said = SGLangSettings(store="memory:", revision="1")
    (tmp_path / "empty").mkdir()
    for path in ("org/model-that-is-not-here", str(tmp_path / "empty")):
        with pytest.raises(StoreError, match="cannot be identified; name the weights with the setting revision"):
            identify_model(PLAIN, "s", {**TOLD, "model_path": path}, draft_layers=0)
    with pytest.raises(StoreError, match="the weights are random"):
        identify_model(PLAIN, "s", {**TOLD, "load_format": "dummy"}, draft_layers=0)
    with pytest.raises(StoreError, match="does not name its model; set model and revision"):
        identify_model(PLAIN, "s", None, draft_layers=0)
    with pytest.raises(StoreError, match="for both models"):
        identify_model(PLAIN, "s", TOLD, draft_layers=1)
    assert identify_model(said, "s", None, draft_layers=0) == ("s", "1")
    drafts = [{**TOLD, "speculative_draft_model_path": path} for path in ("a", "b")]
    assert len({identify_model(said, "s", told, draft_layers=1) for told in drafts}) == 2


# ---- pages on their way


def test_a_place_is_its_stretches_in_their_order() -> None:
    (place,) = pool(1, 1, pieces=4)
    into = bytearray(_PAGE)
    gather_page(place, memoryview(into))
    assert [bytes(into)] == content([place])
    (other,) = pool(1, None, pieces=8)
    scatter_page(memoryview(into), other)
    assert content([other]) == [bytes(into)]


@pytest.mark.parametrize("pieces", [1, 2, 16], ids=["one", "in place", "gathered"])
@pytest.mark.parametrize("keys", [None, PageAuthKeys([b"k" * 32], "hmac-sha256")], ids=["plain", "authenticated"])
def test_pages_come_back_as_they_were(store: KVStore, pieces: int, keys: PageAuthKeys | None) -> None:
    way = traffic(store, keys=keys and keys.for_tenant(None))
    source, target = pool(20, 1, pieces), pool(20, None, pieces)
    assert way.put(names(20), source) == [ResultCode.OK] * 20
    assert way.put(names(20), source) == [ResultCode.EXISTS] * 20
    assert way.lookup(names(21)) == 20
    assert way.get(names(20), target) == 20
    assert content(target) == content(source)
    # However the memory is cut, the page is the same.
    whole = pool(20, None, 1)
    assert way.get(names(20), whole) == 20
    assert content(whole) == content(source)
    assert way.get(["other"], pool(1, None)) == 0
    way.delete(names(1))
    assert way.lookup(names(20)) == 0


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_little_room_is_enough(store: KVStore, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvparams_connectors.engines.sglang.page_pipeline._PORTION_PAGES", 2)
    way = traffic(store, arena_bytes=slots * (HEADER_BYTES + _PAGE))
    for pieces in (2, 16):
        source, target = pool(17, pieces, pieces), pool(17, None, pieces)
        kind = [f"{pieces} {name}" for name in names(17)]
        assert way.put(kind, source) == [ResultCode.OK] * 17
        assert way.get(kind, target) == 17
        assert content(target) == content(source)
    assert way._arena.free_slots == slots  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("kind", ["flip", "truncate", "swap", "drop", "fail"])
@pytest.mark.parametrize("at", [0, 3, 6])
def test_whatever_goes_wrong_with_a_page_ends_the_prefix(store: KVStore, kind: Any, at: int) -> None:
    bad, other = (FORM.page(name).key for name in (names(7)[at], names(7)[5]))
    if kind == "swap" and at == 5:
        return
    tally = HiCacheStats()
    faulty = FaultyStore(
        store, lambda operation, key: Fault(kind, 2100, other) if (operation, key) == ("get", bad) else None
    )
    way = traffic(faulty, tally=tally)
    source, target = pool(7, 1), pool(7, None)
    way.put(names(7), source)
    assert way.get(names(7), target) == at
    assert content(target) == content(source)[:at] + [bytes(_PAGE)] * (7 - at)
    assert any(name.startswith(("pages_refused", "store_failures")) for name in tally.counts)
    faulty.close()


def test_a_store_that_answers_late_writes_nothing_into_the_pool(store: KVStore) -> None:
    traffic(store).put(names(3), pool(3, 1))
    faulty = FaultyStore(store, lambda operation, key: Fault("late") if operation == "get" else None)
    way = traffic(faulty, deadline_s=1.0)
    target = pool(3, None)
    assert way.get(names(3), target) == 0
    free = way._arena.free_slots  # pyright: ignore[reportPrivateUsage]
    faulty.gate.set()
    faulty.close()  # waits until what was submitted has ended
    assert content(target) == [bytes(_PAGE)] * 3
    assert way._arena.free_slots == free + 3 == way._arena.slots  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("pieces", [2, 16], ids=["in place", "gathered"])
def test_a_store_that_reads_late_keeps_no_mixture(store: KVStore, pieces: int) -> None:
    late = threading.Event()
    faulty = FaultyStore(store, lambda operation, key: Fault("late") if operation == "put" and late.is_set() else None)
    way = traffic(faulty, deadline_s=1.0)
    source, other, target = pool(3, 1, pieces), pool(3, 2, pieces), pool(3, None, pieces)
    before = content(source)
    late.set()
    assert way.put(names(3), source) == [ResultCode.TIMEOUT] * 3
    late.clear()
    for place, new in zip(source, other, strict=True):  # SGLang has its memory back
        scatter_page(memoryview(content([new])[0]), place)
    faulty.gate.set()
    arenas = (way._arena, way._headers)  # pyright: ignore[reportPrivateUsage]
    wait_until(lambda: all(arena.free_slots == arena.slots for arena in arenas))
    # In place, the store has read what came after, behind a header for what was before; gathered, what was before.
    loaded = 0 if pieces == 2 else 3
    patient = traffic(faulty)
    assert patient.lookup(names(3)) == loaded
    assert patient.get(names(3), target) == loaded
    assert content(target)[:loaded] == before[:loaded]
    faulty.close()


def test_behind_a_portion_without_an_answer_nothing_is_tried(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvparams_connectors.engines.sglang.page_pipeline._PORTION_PAGES", 2)
    asked: list[str] = []

    def judge(operation: Operation, key: str) -> Fault | None:
        asked.append(key)
        return Fault("fail", code=ResultCode.UNAVAILABLE)

    faulty = FaultyStore(store, judge)
    assert traffic(faulty).put(names(40), pool(40, 1)) == [ResultCode.UNAVAILABLE] * 40
    assert len(asked) <= 8
    asked.clear()
    assert traffic(faulty).get(names(40), pool(40, None)) == 0
    faulty.close()
    assert len(asked) <= 8


def test_what_is_on_its_way_behind_a_miss_keeps_no_room(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvparams_connectors.engines.sglang.page_pipeline._PORTION_PAGES", 2)
    way = traffic(store)
    way.put(names(20), pool(20, 1))
    way.delete(names(2))
    arena = way._arena  # pyright: ignore[reportPrivateUsage]
    for _ in range(20):
        assert way.get(names(20), pool(20, None)) == 0
    wait_until(lambda: arena.free_slots == arena.slots)


def test_without_a_key_or_with_another_one_nothing_is_used(store: KVStore) -> None:
    keys = [PageAuthKeys([letter * 32], "hmac-sha256") for letter in (b"k", b"j")]
    way, other = (traffic(store, keys=key.for_tenant("t")) for key in keys)
    way.put(names(1), pool(1, 1))
    assert traffic(store).get(names(1), pool(1, None)) == 0
    assert other.get(names(1), pool(1, None)) == 0
    assert traffic(store, keys=keys[0].for_tenant("u")).get(names(1), pool(1, None)) == 0
    # Of another key: perhaps good for others, so it stays. That of another tenant has the same id, and is forged.
    assert way.lookup(names(1)) == 0


def test_the_control_without_verification_a_flip_is_not_noticed(store: KVStore) -> None:
    traffic(store).put(names(1), pool(1, 1))
    key = FORM.page(names(1)[0]).key
    value = memoryview(bytearray(HEADER_BYTES + _PAGE))
    store.get([GetOp(key, (value,))]).result()
    value[HEADER_BYTES + 5] ^= 1
    store.delete([key]).result()
    store.put([PutOp(key, (value,))]).result()
    target = pool(1, None)
    assert traffic(store, verified=False).get(names(1), target) == 1
    assert content(target) != content(pool(1, 1))
    assert traffic(store).get(names(1), pool(1, None)) == 0


def test_a_value_of_another_size_is_not_there(store: KVStore) -> None:
    key = FORM.page(names(1)[0]).key
    for size in (0, 255, HEADER_BYTES + _PAGE - 1, HEADER_BYTES + _PAGE + 1):
        store.put([PutOp(key, (memoryview(bytes(size)),))]).result()
        assert traffic(store).lookup(names(1)) == 0
        assert traffic(store).get(names(1), pool(1, None)) == 0
        assert store.exists([key]).result()[0].code is ResultCode.MISS  # good for nobody
