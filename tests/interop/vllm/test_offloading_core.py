"""Tests the tier for vLLM's OffloadingConnector without vLLM: names, settings, lookups, and chunk transfers."""

import json
import mmap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvparams.page_auth import PageAuthKeys
from kvparams.pages import HEADER_BYTES
from kvparams_connectors.conformance import Fault, FaultyStore
from kvparams_connectors.conformance.faults import Operation
from kvparams_connectors.engines.vllm_tier.chunk_keys import OffloadChunkLayout, OffloadLayerGroup
from kvparams_connectors.engines.vllm_tier.chunk_layout import chunk_layout_of
from kvparams_connectors.engines.vllm_tier.chunk_lookup import ChunkLookup
from kvparams_connectors.engines.vllm_tier.chunk_pipeline import (
    NO_ROOM,
    ChunkTransferResult,
    HostRows,
    OffloadChunkPipeline,
)
from kvparams_connectors.engines.vllm_tier.interface_check import (
    ABSTRACT_SIGNATURES,
    HOOK_SIGNATURES,
    MEMBER_NAMES,
    find_differences,
    require_known_interface,
)
from kvparams_connectors.engines.vllm_tier.settings import TierSettings
from kvparams_connectors.engines.vllm_tier.tier_stats import COUNTERS, FAILED, REFUSED, TierStats
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import (
    DEFAULT_DEADLINE_S,
    GetOp,
    KVStore,
    PutOp,
    Result,
    ResultCode,
    Results,
    is_valid_key,
)
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.stores.guard.store import GuardedStore
from kvparams_connectors.stores.memory.store import MemoryStore
from tests.support.waiting import wait_until

FORM: Final = OffloadChunkLayout(
    vllm="0.32.0",
    platform="cuda",
    model="m",
    revision="r",
    dtype="bfloat16",
    layout="LBHNC",
    groups=(OffloadLayerGroup(0, 16, ("a", "b")), OffloadLayerGroup(2, 32, ("c",))),
    hash_tokens=16,
    chunk_blocks=2,
    block_bytes=300,
    ranks=(2, 1, 1, 1, 2),
    copies=2,
    canonical=False,
)
SIZE: Final = FORM.payload_bytes


def key(number: int, group: int = 0) -> bytes:
    """As vLLM makes one."""
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


# ---- names


@pytest.mark.parametrize(
    "change",
    [
        {"vllm": "0.33.0"},
        {"platform": "rocm"},
        {"model": "n"},
        {"revision": "s"},
        {"dtype": "float16"},
        {"layout": "BLHNC"},
        {"groups": FORM.groups[:1]},
        {"groups": (OffloadLayerGroup(0, 16, ("b", "a")), FORM.groups[1])},
        {"groups": (OffloadLayerGroup(0, 16, ("a",)), OffloadLayerGroup(2, 32, ("b", "c")))},
        {"groups": (OffloadLayerGroup(1, 16, ("a", "b")), FORM.groups[1])},
        {"groups": (OffloadLayerGroup(0, 32, ("a", "b")), FORM.groups[1])},
        {"hash_tokens": 32},
        {"chunk_blocks": 1, "block_bytes": 600},
        {"block_bytes": 301},
        {"ranks": (1, 2, 1, 1, 2)},
        {"ranks": (2, 1, 1, 1, 4)},
        {"copies": 1},
        {"canonical": True},
        {"epoch": "1"},
    ],
)
def test_whatever_changes_the_bytes_changes_the_name(change: dict[str, Any]) -> None:
    other = replace(FORM, **change)
    assert other.name(key(1)) != FORM.name(key(1))
    assert other.identity(key(1, other.groups[0].number)) != FORM.identity(key(1))


@given(st.binary(min_size=32, max_size=32), st.sampled_from([0, 2]))
def test_names_are_names_of_a_store(digest: bytes, group: int) -> None:
    mine = digest + group.to_bytes(4, "big")
    assert FORM.is_known_key(mine)
    assert is_valid_key(FORM.name(mine))
    identity = FORM.identity(mine)
    assert identity.stored_bytes == FORM.stored_bytes == HEADER_BYTES + 300 * 2 * 2
    assert identity.tokens == (32 if group == 0 else 64)
    assert FORM.name(mine) != FORM.name(mine[:-1] + bytes([mine[-1] ^ 2]))


@pytest.mark.parametrize("stranger", [b"", key(1)[1:], key(1) + b"x", key(1, 1), bytes(16) + bytes(4)])
def test_other_keys_are_not_ours(stranger: bytes) -> None:
    assert not FORM.is_known_key(stranger)


@pytest.mark.parametrize(
    "change",
    [
        {"groups": ()},
        {"block_bytes": 0},
        {"chunk_blocks": 0},
        {"ranks": (1, 1, 1, 1, 0)},
        {"groups": (FORM.groups[0], FORM.groups[0])},
        {"groups": (OffloadLayerGroup(0, 16, tuple(str(number) for number in range(70_000))),)},
    ],
)
def test_impossible_forms_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        replace(FORM, **change)


# ---- settings


def test_settings_have_defaults() -> None:
    told = TierSettings.of({"type": "KVParamsTier", "module_path": "x", "backpressure": {}, "store": "valkey://h"})
    assert (told.store, told.deadline_s) == ("valkey://h", 5.0)
    assert (told.keep_on_reset, told.locality) == (False, None)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({}, "store: must be the store's URL"),
        ({"store": 1}, "store: must be the store's URL"),
        ({"store": "x", "stroe": 1, "a": 2}, "stroe: is not known here; did you mean store"),
        ({"store": "x", "deadline_s": "5"}, "deadline_s: must be a number above 0"),
        ({"store": "x", "deadline_s": True}, "deadline_s: must be"),
        ({"store": "x", "deadline_s": float("inf")}, "deadline_s: must be"),
        ({"store": "x", "keep_on_reset": "no"}, "keep_on_reset: must be true or false"),
        ({"store": "x", "keep_on_reset": 1}, "keep_on_reset: must be"),
        ({"store": "x", "verify": False}, "verify: is not known here"),
        ({"store": "x", "revision": ""}, "revision: must be text, not empty"),
        ({"store": "x", "locality": "local"}, "locality: must be LOCAL or REMOTE"),
    ],
)
def test_settings_are_refused_in_words(found: dict[str, object], words: str) -> None:
    with pytest.raises(StoreError, match="secondary_tiers") as caught:
        TierSettings.of(found)
    assert words in str(caught.value)


# ---- what vLLM says of itself


@dataclass
class _Spec:
    config: Any
    replicated_layout: bool = False


def _spec(**change: Any) -> _Spec:
    group = SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("l0", "l1"))
    parallel = {"world_size": 2, "tp_size": 2, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    config = SimpleNamespace(
        groups=(group,),
        worker_kv_bytes_per_block=3000,
        model=SimpleNamespace(name="org/model", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=SimpleNamespace(**parallel),
        canonical_layout=False,
        kv_cache_layout="LBHNC",
    )
    vars(config).update(change)
    return _Spec(config)


def _form(spec: _Spec, row_bytes: int = 2 * mmap.PAGESIZE, **more: Any) -> OffloadChunkLayout:
    told = {"store": "x", "revision": "r", **more.pop("told", {})}
    told = {name: value for name, value in told.items() if value is not None}
    return chunk_layout_of(
        spec, TierSettings.of(told), row_bytes=row_bytes, **{"vllm": "0.32.0+cpu", "platform": "cuda", **more}
    )


def test_the_form_is_what_vllm_says() -> None:
    form = _form(_spec())
    assert (form.vllm, form.model, form.dtype, form.layout) == ("0.32.0", "org/model", "bfloat16", "LBHNC")
    assert form.payload_bytes == 6000
    assert form.ranks == (2, 1, 1, 1, 2)
    once = _spec()
    once.replicated_layout = True
    assert _form(once, mmap.PAGESIZE).payload_bytes == 3000
    assert _form(_spec(), told={"model": "other"}).model == "other"
    assert _form(_spec(), told={"revision": "s"}).revision != form.revision


def test_a_folder_says_which_weights_these_are(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    spec = _spec(model=SimpleNamespace(name=str(folder), dtype="bfloat16"))
    with pytest.raises(StoreError, match="has no files"):
        _form(spec, told={"revision": None})
    (folder / "model.safetensors").write_bytes(b"weights")
    first = _form(spec, told={"revision": None})
    assert first.model == "tiny"
    (folder / "config.json").write_text(json.dumps({"rope_theta": 1}))
    second = _form(spec, told={"revision": None})
    (folder / "model.safetensors").write_bytes(b"wEights")
    third = _form(spec, told={"revision": None})
    assert len({first.revision, second.revision, third.revision}) == 3


@pytest.mark.parametrize(
    ("change", "more", "words"),
    [
        ({}, {"told": {"revision": None}}, "set revision in secondary_tiers"),
        ({}, {"platform": "rocm", "told": {"revision": None}}, "on this platform (rocm)"),
        ({}, {"platform": "cpu", "told": {"revision": None}}, "Set revision to a text that names the weights and"),
        ({"kv_cache_layout": None}, {}, "does not report its KV layout"),
        ({"worker_kv_bytes_per_block": 0}, {}, "not supported"),
        ({"worker_kv_bytes_per_block": 1000}, {}, "8192 bytes in vLLM's host memory, but 2000 bytes"),
        ({"worker_kv_bytes_per_block": 5000}, {}, "8192 bytes in vLLM's host memory, but 10000 bytes"),
        ({"groups": ()}, {}, "not supported"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(change: dict[str, Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(StoreError) as caught:
        _form(_spec(**change), 8192, **more)
    assert words in str(caught.value)


# ---- another vLLM


def _fields(*names: str) -> Any:
    return SimpleNamespace(__dataclass_fields__=dict.fromkeys(names))


def _manager(*, without: str = "", renamed: str = "", abstract: frozenset[str] = frozenset(ABSTRACT_SIGNATURES)) -> Any:
    methods: dict[str, Any] = {}
    for name, parameters in {**ABSTRACT_SIGNATURES, **HOOK_SIGNATURES}.items():
        if name == without:
            continue
        told = [*parameters[:-1], "other"] if name == renamed else list(parameters)
        line = f"lambda self{''.join(', ' + one for one in told)}: None"
        methods[name] = eval(line)
    return SimpleNamespace(**{**methods, "__abstractmethods__": abstract})


_OTHERS: Final = {name: _fields(*members) for name, members in MEMBER_NAMES.items()}


def test_the_vllm_that_is_known_is_not_refused() -> None:
    assert find_differences(_manager(), _OTHERS) == []
    require_known_interface("0.32.0", _manager(), _OTHERS)


@pytest.mark.parametrize("name", [name for name, taken in {**ABSTRACT_SIGNATURES, **HOOK_SIGNATURES}.items() if taken])
def test_other_parameters_are_refused(name: str) -> None:
    with pytest.raises(StoreError, match=f"{name} takes"):
        require_known_interface("0.33.0", _manager(renamed=name), _OTHERS)


@pytest.mark.parametrize("name", [*ABSTRACT_SIGNATURES, "get_stats", "shutdown"])
def test_methods_that_went_are_refused(name: str) -> None:
    with pytest.raises(StoreError, match=f"{name} is not there"):
        require_known_interface("0.33.0", _manager(without=name), _OTHERS)


def test_methods_that_came_are_refused() -> None:
    with pytest.raises(StoreError, match=r"a tier must have cancel as well.*remove KVParamsTier") as caught:
        require_known_interface("0.33.0", _manager(abstract=frozenset({*ABSTRACT_SIGNATURES, "cancel"})), _OTHERS)
    assert "vLLM 0.33.0" in str(caught.value)


@pytest.mark.parametrize("name", list(MEMBER_NAMES))
def test_members_that_went_are_refused(name: str) -> None:
    for member in MEMBER_NAMES[name]:
        left = _fields(*(one for one in MEMBER_NAMES[name] if one != member))
        assert find_differences(_manager(), {**_OTHERS, name: left}) == [f"{name}.{member} is not there"]
    less = {other: kind for other, kind in _OTHERS.items() if other != name}
    assert len(find_differences(_manager(), less)) == len(MEMBER_NAMES[name])


# ---- questions


class _Later(MemoryStore):
    """Answers `exists` when it is told to."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.asked: list[tuple[list[str], Job[Results]]] = []

    def exists(self, keys: Any, deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        job: Job[Results] = Job(time.monotonic() + 3600, [Result(ResultCode.TIMEOUT)] * len(keys))
        self.asked.append((list(keys), job))
        return job


_KEYS: Final = [key(number) for number in range(4)]
_REQUESTS: Final = ["a", "b", "c"]
_HIT: Final = Result(ResultCode.OK, FORM.stored_bytes)
_ANSWERS: Final = [
    _HIT,
    Result(ResultCode.OK, FORM.stored_bytes - 1),
    Result(ResultCode.MISS),
    Result(ResultCode.UNAVAILABLE),
]


class AskingMachine(RuleBasedStateMachine):
    """Requests that ask, a store that answers late and in any order, loads that fail, resets."""

    def __init__(self) -> None:
        super().__init__()
        self.store = _Later()
        self.form = FORM
        self.asking = ChunkLookup(self.store, FORM, lookup_s=1.0)
        self.told: dict[tuple[str, bytes], bool] = {}
        self.said: dict[str, bool] = {}
        """By name: whether the store has ever said that it is there."""
        self.epochs = 0

    @rule(request=st.sampled_from(_REQUESTS), chunk=st.sampled_from(_KEYS))
    def ask(self, request: str, chunk: bytes) -> None:
        answer = self.asking.is_stored(chunk, request)
        before = self.told.get((request, chunk))
        assert before is None or answer == before, "a request is told one thing"
        if answer is not None:
            self.told[request, chunk] = answer
        assert not answer or self.said.get(self.form.name(chunk)), "yes, and the store has not said so"

    @rule()
    def end_of_step(self) -> None:
        self.asking.flush()

    @rule(which=st.integers(0, 5), answers=st.lists(st.sampled_from(_ANSWERS), min_size=4, max_size=4))
    def answer(self, which: int, answers: list[Result]) -> None:
        if not self.store.asked:
            return
        names, job = self.store.asked.pop(which % len(self.store.asked))
        for name, result in zip(names, answers, strict=False):
            self.said[name] = self.said.get(name, False) or result == _HIT
        job.finish(answers[: len(names)])

    @rule(chunks=st.sets(st.sampled_from(_KEYS)))
    def loads_fail(self, chunks: set[bytes]) -> None:
        self.asking.mark_missing(chunks)
        for request, chunk in self.told:
            if chunk in chunks:
                self.told[request, chunk] = False

    @rule(request=st.sampled_from(_REQUESTS))
    def ends(self, request: str) -> None:
        self.asking.forget(request)
        self.told = {asked: answer for asked, answer in self.told.items() if asked[0] != request}

    @rule()
    def resets(self) -> None:
        self.epochs += 1
        self.form = replace(FORM, epoch=str(self.epochs))
        self.asking.restart(self.form)
        self.told.clear()

    @invariant()
    def nothing_is_asked_twice_at_a_time(self) -> None:
        names = [name for asked, _ in self.store.asked for name in asked if name in self.form.names(_KEYS)]
        assert len(names) == len(set(names))

    def teardown(self) -> None:
        for request in _REQUESTS:
            self.asking.forget(request)
        for names, job in self.store.asked:
            job.finish([Result(ResultCode.MISS)] * len(names))
        self.asking.flush()
        self.asking.flush()
        assert self.asking.size == 0
        self.store.close()


AskingMachine.TestCase.settings = settings(stateful_step_count=40)
test_questions: Final = AskingMachine.TestCase


def _asked(asking: ChunkLookup, chunks: list[bytes], request: str = "a") -> list[bool | None]:
    for chunk in chunks:
        asking.is_stored(chunk, request)
    found: list[bool | None] = []

    def is_known() -> bool:
        asking.flush()
        found[:] = [asking.is_stored(chunk, request) for chunk in chunks]
        return None not in found

    wait_until(is_known, 20.0, pause_s=0.001)
    return found


@pytest.fixture
def store() -> Iterator[KVStore]:
    store = MemoryStore(8 << 20, unit_bytes=4096)
    yield store
    store.close()


@pytest.fixture
def moving(store: KVStore) -> Iterator[OffloadChunkPipeline]:
    moving = OffloadChunkPipeline(store, FORM)
    yield moving
    moving.close()


def _rows(count: int, seed: int | None = None) -> HostRows:
    """As vLLM's host memory: each row longer than what is in it."""
    width = SIZE + 100
    content = bytes(count * width) if seed is None else Random(seed).randbytes(count * width)
    return np.frombuffer(bytearray(content), np.uint8).reshape(count, width)


def test_what_is_saved_is_found_and_loaded(store: KVStore, moving: OffloadChunkPipeline) -> None:
    rows = _rows(5, 1)
    chunks = [(key(number, 2 * (number % 2)), number) for number in range(5)]
    keys = [one for one, _ in chunks]
    asking = ChunkLookup(store, FORM, lookup_s=1.0)
    assert _asked(asking, keys) == [False] * 5
    saved = moving.save(rows, chunks).result()
    assert (saved.done, saved.nbytes, saved.existing) == (tuple(keys), 5 * SIZE, 0)
    assert _asked(asking, keys, "b") == [True] * 5
    assert asking.is_stored(keys[0], "a") is False  # it was told so
    again = moving.save(rows, chunks).result()
    assert (again.done, again.nbytes, again.existing) == (tuple(keys), 0, 5)
    other = _rows(6)
    loaded = moving.load(other, [(one, 5 - number) for number, one in enumerate(keys)]).result()
    assert loaded.done == tuple(keys)
    for number in range(5):
        assert np.array_equal(other[5 - number, :SIZE], rows[number, :SIZE])
    assert not other[:, SIZE:].any()
    assert not other[0].any()


def test_forms_share_nothing(store: KVStore, moving: OffloadChunkPipeline) -> None:
    assert moving.save(_rows(1, 1), [(key(1), 0)]).result().done
    other = OffloadChunkPipeline(store, replace(FORM, revision="s"))
    found = other.load(_rows(1), [(key(1), 0)]).result()
    assert (found.done, found.gone) == ((), 1)
    moving.restart(replace(FORM, epoch="1"))
    assert moving.load(_rows(1), [(key(1), 0)]).result().gone == 1
    other.close()


def test_seals(store: KVStore) -> None:
    sealed = OffloadChunkPipeline(store, FORM, seals=PageAuthKeys([bytes(range(32))]))
    other = OffloadChunkPipeline(store, FORM, seals=PageAuthKeys([bytes(range(1, 33))]))
    plain = OffloadChunkPipeline(store, FORM)
    assert sealed.save(_rows(1, 1), [(key(1), 0)]).result().done
    for reader in (other, plain):
        rows = _rows(1)
        assert reader.load(rows, [(key(1), 0)]).result().refused == {"locked": 1}
        assert not rows.any()
    assert sealed.load(_rows(1), [(key(1), 0)]).result().done  # it was not theirs to delete
    for one in (sealed, other, plain):
        one.close()


_FAULTS: Final = [
    Fault("flip", 5),
    Fault("flip", 8 * HEADER_BYTES + 77),
    Fault("truncate", 100),
    Fault("truncate", HEADER_BYTES),
    Fault("truncate", FORM.stored_bytes - 1),
    Fault("drop"),
    Fault("reorder"),
    Fault("fail"),
    Fault("fail", code=ResultCode.FULL),
    Fault("fail", code=ResultCode.TIMEOUT),
    Fault("fail", code=ResultCode.CORRUPT),
]


def _judge(plan: dict[tuple[Operation, str], Fault]) -> Callable[[Operation, str], Fault | None]:
    return lambda operation, name: plan.get((operation, name))


@given(
    count=st.integers(1, 12),
    faults=st.dictionaries(
        st.tuples(st.sampled_from(["put", "get", "exists"]), st.integers(0, 11)), st.sampled_from(_FAULTS), max_size=8
    ),
    room=st.integers(1, 6),
)
def test_whatever_goes_wrong_only_good_chunks_arrive(
    count: int, faults: dict[tuple[Operation, int], Fault], room: int
) -> None:
    memory = MemoryStore(4 << 20, unit_bytes=4096)
    plan: dict[tuple[Operation, str], Fault] = {
        (operation, FORM.name(key(number))): fault for (operation, number), fault in faults.items()
    }
    faulty = FaultyStore(memory, _judge(plan))
    moving = OffloadChunkPipeline(faulty, FORM, arena_bytes=room * (FORM.stored_bytes + 64))
    rows, other = _rows(count, count), _rows(count)
    chunks = [(key(number), number) for number in range(count)]
    saved = moving.save(rows, chunks).result()
    loaded = moving.load(other, chunks).result()
    assert loaded.failures.get(NO_ROOM, 0) == 0
    for one, number in chunks:
        good = np.array_equal(other[number, :SIZE], rows[number, :SIZE])
        assert good == (one in loaded.done), faults
        assert good or not other[number].any()
        if not any(operation in ("put", "get", "exists") and at == number for operation, at in faults):
            assert one in saved.done
            assert one in loaded.done
    for moved in (saved, loaded):
        known = len(moved.done) + moved.gone + sum(moved.refused.values()) + sum(moved.failures.values())
        assert known == count
    moving.close()
    faulty.close()
    memory.close()


def test_without_verification_a_flipped_byte_is_believed(store: KVStore) -> None:
    faulty = FaultyStore(store, _judge({("get", FORM.name(key(1))): Fault("flip", 8 * HEADER_BYTES + 3)}))
    rows, other = _rows(1, 1), _rows(1)
    for check in (True, False):
        moving = OffloadChunkPipeline(faulty, FORM, verify=check)
        moving.save(rows, [(key(1), 0)]).result()
        loaded = moving.load(other, [(key(1), 0)]).result()
        if check:
            assert loaded.refused == {"flipped_payload": 1}
            assert not other.any()
        else:
            assert loaded.done == (key(1),)
            assert not np.array_equal(other[0, :SIZE], rows[0, :SIZE])
        moving.close()
    faulty.close()


def test_a_damaged_chunk_is_deleted(store: KVStore, moving: OffloadChunkPipeline) -> None:
    rows = _rows(1, 1)
    moving.save(rows, [(key(1), 0)]).result()
    name = FORM.name(key(1))
    buffer = memoryview(bytearray(FORM.stored_bytes))
    store.get([GetOp(name, (buffer,))]).result()
    store.delete([name]).result()
    buffer[HEADER_BYTES + 1] ^= 1
    store.put([PutOp(name, (buffer,))]).result()
    assert moving.load(_rows(1), [(key(1), 0)]).result().refused == {"flipped_payload": 1}
    assert store.exists([name]).result()[0].code is ResultCode.MISS
    assert moving.save(rows, [(key(1), 0)]).result().nbytes == SIZE
    assert moving.load(_rows(1), [(key(1), 0)]).result().done


@pytest.mark.parametrize("operation", ["get", "put"])
def test_a_store_that_is_stuck_keeps_our_memory_and_not_vllms(store: KVStore, operation: Operation) -> None:
    """When the job is done nothing is written to the rows any more, however late the store comes."""
    stuck: dict[tuple[Operation, str], Fault] = {}
    faulty = FaultyStore(store, _judge(stuck), threads=2)
    moving = OffloadChunkPipeline(faulty, FORM, deadline_s=2.0, arena_bytes=2 * (FORM.stored_bytes + 64))
    rows, other = _rows(2, 1), _rows(2)
    if operation == "get":
        assert len(moving.save(rows, [(key(0), 0), (key(1), 1)]).result().done) == 2
    stuck[operation, FORM.name(key(1))] = Fault("late")
    began = time.monotonic()
    job = moving.load(other, [(key(1), 1)]) if operation == "get" else moving.save(rows, [(key(1), 1)])
    assert job.result().done == ()
    assert time.monotonic() - began < 20
    other[:], rows[:] = 7, 7  # somebody else's now
    if operation == "get":
        assert moving.load(other, [(key(0), 0)]).result().done == (key(0),)  # others go on with the slots that are left
        other[:] = 7
    stuck.clear()
    faulty.gate.set()
    assert job.wait_settled(20)
    assert (other == 7).all()
    wait_until(lambda: moving.free_slots == 2)  # no slot is lost
    if operation == "put":  # what was stored late is what was there in time
        again = _rows(2)
        assert moving.load(again, [(key(1), 1)]).result().done == (key(1),)
        assert np.array_equal(again[1, :SIZE], _rows(2, 1)[1, :SIZE])
    moving.close()
    faulty.close()


def test_a_store_that_is_given_up_costs_nothing(store: KVStore) -> None:
    dead: dict[tuple[Operation, str], Fault] = {}
    faulty = FaultyStore(store, lambda operation, name: dead.get((operation, "")))
    guarded = GuardedStore(faulty)
    asking = ChunkLookup(guarded, FORM, lookup_s=1.0)
    dead["exists", ""] = Fault("fail")
    for number in range(4):
        assert _asked(asking, [key(number)]) == [False]
    assert asking.failed == 4
    assert guarded.statistics.opened == 1
    moving = OffloadChunkPipeline(guarded, FORM, deadline_s=60.0)
    began = time.monotonic()
    assert moving.load(_rows(1), [(key(0), 0)]).result().failures == {"unavailable": 1}
    assert moving.save(_rows(1), [(key(0), 0)]).result().failures == {"unavailable": 1}
    assert time.monotonic() - began < 30
    moving.close()
    guarded.close()


def test_self_test(store: KVStore) -> None:
    good = OffloadChunkPipeline(store, FORM)
    assert good.self_test()
    flipping = FaultyStore(store, lambda operation, _: Fault("flip", 9000) if operation == "get" else None)
    bad = OffloadChunkPipeline(flipping, FORM)
    with pytest.raises(StoreError, match="came back as flipped_payload"):
        bad.self_test()
    blind = OffloadChunkPipeline(flipping, FORM, verify=False)
    with pytest.raises(StoreError, match="changed between save and load"):
        blind.self_test()
    failing = FaultyStore(store, lambda operation, _: Fault("fail") if operation == "put" else None)
    down = OffloadChunkPipeline(failing, FORM)
    assert not down.self_test()
    for one in (good, bad, blind, down, flipping, failing):
        one.close()


def test_after_it_is_closed_nothing_is_touched(store: KVStore) -> None:
    moving = OffloadChunkPipeline(store, FORM)
    moving.save(_rows(1, 1), [(key(1), 0)]).result()
    moving.close()
    rows = _rows(1)
    assert moving.load(rows, [(key(1), 0)]).result().failures == {"unavailable": 1}
    assert not rows.any()


# ---- counters


def test_counters_say_each_chunk_once() -> None:
    tally = TierStats()
    tally.moved(ChunkTransferResult(done=(key(1),), nbytes=10, gone=1, refused={"torn": 1}), 5, load=True)
    tally.moved(ChunkTransferResult(done=(key(1), key(2)), nbytes=10, existing=1, failures={"full": 2}), 4, load=False)
    tally.add("resets", 0)
    taken = {(name, labels): number for name, labels, number in tally.take()}
    start = "vllm:kvparams_tier_"
    assert taken == {
        (start + "chunks_loaded", ()): 1,
        (start + "bytes_loaded", ()): 10,
        (start + "chunks_gone", ()): 1,
        (REFUSED[0], ("torn",)): 1,
        (FAILED[0], ("timeout",)): 2,
        (start + "chunks_saved", ()): 1,
        (start + "bytes_saved", ()): 10,
        (start + "chunks_existing", ()): 1,
        (FAILED[0], ("full",)): 2,
    }
    assert {name for name, labels in taken if not labels} <= set(COUNTERS)
    assert list(tally.take()) == []
