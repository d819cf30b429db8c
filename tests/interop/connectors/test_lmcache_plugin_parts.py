"""Tests the parts of the LMCache plugin that need no LMCache: chunk names, settings, and transfers under faults."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.page_auth import PageAuthKeys
from kvparams.pages import HEADER_BYTES
from kvparams_connectors.conformance import Fault, FaultyStore
from kvparams_connectors.conformance.faults import Operation
from kvparams_connectors.engines.lmcache.chunk_keys import LMCacheChunk, LMCacheChunkLayout
from kvparams_connectors.engines.lmcache.chunk_pipeline import ChunkBuffer, LMCacheChunkPipeline
from kvparams_connectors.engines.lmcache.settings import PluginSettings
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode, is_valid_key
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.stores.memory.store import MemoryStore

FORM: Final = LMCacheChunkLayout("KV_2LTD", (("bfloat16", 2, 4, 64),), 1024, 16)
OTHERS: Final = [
    replace(FORM, order="KV_MLA_FMT"),
    replace(FORM, groups=(("float16", 2, 4, 64),)),
    replace(FORM, groups=(("bfloat16", 2, 2, 128),)),
    replace(FORM, groups=(("bfloat16", 2, 2, 64), ("bfloat16", 2, 2, 64))),
    replace(FORM, chunk_tokens=8),
    replace(FORM, revision="2"),
]


@dataclass
class Memory:
    """As LMCache counts its memory."""

    count: int = 1

    def ref_count_up(self) -> None:
        self.count += 1

    def ref_count_down(self) -> None:
        self.count -= 1


def chunk(number: int, form: LMCacheChunkLayout = FORM) -> LMCacheChunk:
    return LMCacheChunk(form, f"model/name@1@0@{number:x}@bfloat16", 0)


def cargo(number: int, tokens: int = 16, *, empty: bool = False, form: LMCacheChunkLayout = FORM) -> ChunkBuffer:
    content = bytes(tokens * 1024) if empty else Random(number).randbytes(tokens * 1024)
    return ChunkBuffer(chunk(number, form), memoryview(bytearray(content)), Memory())


@pytest.fixture
def store() -> Iterator[KVStore]:
    store = MemoryStore(8 << 20, unit_bytes=4096)
    yield store
    store.close()


# ---- names


@pytest.mark.parametrize("other", OTHERS)
def test_whatever_changes_the_bytes_changes_the_key(other: LMCacheChunkLayout) -> None:
    assert chunk(1, other).key != chunk(1).key
    assert chunk(1, other).identity(16).namespace != chunk(1).identity(16).namespace


def test_fields_do_not_run_into_each_other() -> None:
    assert replace(FORM, order="A", revision="B").digest != replace(FORM, order="AB", revision="").digest
    assert LMCacheChunkLayout("A", FORM.groups, 11, 1).digest != LMCacheChunkLayout("A", FORM.groups, 1, 11).digest


@given(st.text(max_size=300), st.text(max_size=300))
def test_every_name_gets_a_key_that_every_store_takes_and_its_own(one: str, other: str) -> None:
    names = [LMCacheChunk(FORM, name.encode("utf-8", "replace").decode(), 0) for name in (one, other)]
    assert all(is_valid_key(name.key) for name in names)
    assert (names[0].key == names[1].key) is (names[0].name == names[1].name)


@given(st.integers(-10, 20_000))
def test_a_size_is_so_many_tokens_or_none(nbytes: int) -> None:
    tokens = FORM.tokens(nbytes)
    assert (tokens is not None) is (nbytes % 1024 == 0 and 0 < nbytes <= 16 * 1024)
    assert tokens is None or tokens * 1024 == nbytes
    assert chunk(0).fits_size(nbytes + HEADER_BYTES) is (tokens is not None)


# ---- settings

START: Final = "remote_storage_plugin.kvparams."


def test_settings_stand_in_lmcaches_own_configuration() -> None:
    given = {f"{START}store": "memory:", f"{START}deadline_ms": 200, f"{START}module_path": "x", "other": 1}
    assert PluginSettings.of(given) == PluginSettings(store="memory:", deadline_ms=200)
    second = {"remote_storage_plugin.kvparams.b.store": "file:///x", f"{START}store": "memory:"}
    assert PluginSettings.of(second, "kvparams.b").store == "file:///x"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "store: must be the store's URL"),
        ({f"{START}store": 5}, "store: must be the store's URL"),
        (
            {f"{START}store": "memory:", f"{START}deadlin_ms": 5},
            "deadlin_ms: is not known here; did you mean deadline_ms",
        ),
        ({f"{START}store": "memory:", f"{START}deadline_ms": 0}, "must be a whole number"),
        ({f"{START}store": "memory:", f"{START}deadline_ms": True}, "must be a whole number"),
        ({f"{START}store": "memory:", f"{START}revision": 5}, "revision: must be text"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(StoreError, match=words):
        PluginSettings.of(settings)


def test_a_name_with_a_dot_takes_none_of_its_neighbours_settings() -> None:
    both: dict[str, object] = {f"{START}store": "memory:", f"{START}b.store": "file:///x"}
    assert PluginSettings.of(both).store == "memory:"


# ---- traffic


def put(traffic: LMCacheChunkPipeline, *cargos: ChunkBuffer) -> list[ResultCode]:
    return asyncio.run(traffic.put(cargos))


def get(traffic: LMCacheChunkPipeline, *cargos: ChunkBuffer) -> list[int | None]:
    return asyncio.run(traffic.get(cargos))


@pytest.mark.parametrize("seals", [None, PageAuthKeys([b"k" * 32], "hmac-sha256")], ids=["plain", "authenticated"])
def test_chunks_come_back_as_they_were_the_last_one_shorter(store: KVStore, seals: PageAuthKeys | None) -> None:
    traffic = LMCacheChunkPipeline(store, seals=seals)
    source = [cargo(0), cargo(1), cargo(2, tokens=5)]
    assert put(traffic, *source) == [ResultCode.OK] * 3
    assert put(traffic, *source) == [ResultCode.EXISTS] * 3
    assert traffic.lookup([chunk(number) for number in range(4)]).result() == 3
    target = [cargo(number, empty=True) for number in range(4)]
    assert get(traffic, *target) == [16, 16, 5, None]
    for one, other in zip(source, target[:3], strict=True):
        assert other.memory[: one.memory.nbytes] == one.memory
    assert [one.owner for one in (*source, *target)] == [Memory(1)] * 7
    assert traffic.refused == 0


def test_a_chunk_of_a_size_that_it_cannot_have_is_not_stored_and_the_others_are(store: KVStore) -> None:
    traffic = LMCacheChunkPipeline(store)
    odd = ChunkBuffer(chunk(1), memoryview(bytearray(100)), Memory())
    assert put(traffic, cargo(0), odd, cargo(2)) == [ResultCode.OK, ResultCode.INVALID, ResultCode.OK]


@pytest.mark.parametrize("at", [0, 7, 64, 255, 256, 1000, 256 + 16 * 1024 - 1])
def test_a_flipped_byte_is_a_miss_and_the_chunk_goes(store: KVStore, at: int) -> None:
    traffic = LMCacheChunkPipeline(store)
    put(traffic, cargo(0), cargo(1))
    damage(store, chunk(0).key, at)
    target = cargo(0, empty=True)
    assert get(traffic, target, cargo(1, empty=True)) == [None, 16]
    assert traffic.refused == 1
    # Of another version: perhaps good for others, so it stays. Anything else is deleted.
    assert store.exists([chunk(0).key]).result()[0].code is (ResultCode.OK if at in (4, 5) else ResultCode.MISS)


def test_the_control_without_verification_would_not_notice(store: KVStore) -> None:
    """What the store gives back after a flip is of the right size and says OK."""
    put(LMCacheChunkPipeline(store), cargo(0))
    damage(store, chunk(0).key, 1000)
    target = memoryview(bytearray(HEADER_BYTES + 16 * 1024))
    assert store.get([GetOp(chunk(0).key, (target,))]).result()[0].code is ResultCode.OK
    assert target[HEADER_BYTES:] != cargo(0).memory


@pytest.mark.parametrize("size", [0, 100, 256, 256 + 1024 + 1, 256 + 15 * 1024, 256 + 17 * 1024])
def test_a_value_of_another_length_is_a_miss(store: KVStore, size: int) -> None:
    traffic = LMCacheChunkPipeline(store)
    put(traffic, cargo(0))
    replace_value(store, chunk(0).key, lambda value: (value + bytes(4096))[:size])
    possible = size in (256 + 15 * 1024,)
    assert traffic.lookup([chunk(0)]).result() == possible
    assert get(traffic, cargo(0, empty=True)) == [None]


def test_a_chunk_under_the_key_of_another_is_a_miss(store: KVStore) -> None:
    traffic = LMCacheChunkPipeline(store)
    put(traffic, cargo(0), cargo(1))
    replace_value(store, chunk(0).key, lambda _: value_of(store, chunk(1).key))
    assert get(traffic, cargo(0, empty=True), cargo(1, empty=True)) == [None, 16]


def test_whoever_has_no_key_or_another_one_uses_nothing(store: KVStore) -> None:
    key = PageAuthKeys([b"k" * 32], "hmac-sha256")
    put(LMCacheChunkPipeline(store, seals=key), cargo(0))
    put(LMCacheChunkPipeline(store), cargo(1))
    assert get(LMCacheChunkPipeline(store), cargo(0, empty=True)) == [None]
    assert get(LMCacheChunkPipeline(store, seals=PageAuthKeys([b"j" * 32], "hmac-sha256")), cargo(0, empty=True)) == [
        None
    ]
    assert get(LMCacheChunkPipeline(store, seals=key), cargo(0, empty=True), cargo(1, empty=True)) == [16, None]


def test_memory_is_kept_until_the_store_lets_go_of_it(store: KVStore) -> None:
    late: list[Operation] = ["put", "get"]
    faulty = FaultyStore(store, lambda operation, key: Fault("late") if operation in late else None)
    traffic = LMCacheChunkPipeline(faulty, deadline_s=0.2)
    source, target = cargo(0), cargo(1, empty=True)
    assert put(traffic, source) == [ResultCode.TIMEOUT]
    assert get(traffic, target) == [None]
    assert (source.owner, target.owner) == (Memory(2), Memory(2))
    faulty.gate.set()
    faulty.close()  # waits until what was submitted has ended
    assert (source.owner, target.owner) == (Memory(1), Memory(1))


def test_memory_is_kept_when_lmcache_cancels_a_get(store: KVStore) -> None:
    put(LMCacheChunkPipeline(store), cargo(0))
    faulty = FaultyStore(store, lambda operation, key: Fault("late") if operation == "get" else None)
    traffic = LMCacheChunkPipeline(faulty)
    target = cargo(0, empty=True)

    async def cancelled() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(traffic.get([target]), 0.1)

    asyncio.run(cancelled())
    assert target.owner == Memory(2)
    faulty.gate.set()
    faulty.close()
    assert target.owner == Memory(1)
    again = LMCacheChunkPipeline(store)
    assert get(again, cargo(0, empty=True)) == [16]


def test_more_chunks_than_there_are_headers_for_are_not_stored_and_nothing_is_lost(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvparams_connectors.engines.lmcache.chunk_pipeline._HEADERS", 2)
    traffic = LMCacheChunkPipeline(store)
    assert put(traffic, cargo(0), cargo(1), cargo(2)) == [ResultCode.UNAVAILABLE] * 3  # one portion
    assert put(traffic, cargo(0), cargo(1)) == [ResultCode.OK] * 2
    assert get(traffic, *(cargo(number, empty=True) for number in range(3))) == [None] * 3
    assert get(traffic, cargo(0, empty=True), cargo(1, empty=True)) == [16, 16]


def test_a_chunk_whose_memory_is_gone_keeps_no_header(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvparams_connectors.engines.lmcache.chunk_pipeline._HEADERS", 2)
    traffic = LMCacheChunkPipeline(store)
    gone = cargo(0)
    gone.memory.release()
    for _ in range(3):
        with pytest.raises(ValueError, match="released"):
            put(traffic, cargo(1), gone)
    assert put(traffic, cargo(0), cargo(1)) == [ResultCode.OK] * 2


def test_large_batches_go_in_portions(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvparams_connectors.engines.lmcache.chunk_pipeline.PORTION_BYTES", 40_000)
    late = threading.Event()

    def judge(operation: Operation, key: str) -> Fault | None:
        """The third portion comes too late: chunks 4 and 5."""
        return Fault("late") if late.is_set() and key == chunk(4).key else None

    faulty = FaultyStore(store, judge, threads=8)
    traffic = LMCacheChunkPipeline(faulty, deadline_s=0.5)
    assert put(traffic, *map(cargo, range(7))) == [ResultCode.OK] * 7
    late.set()
    assert get(traffic, *(cargo(number, empty=True) for number in range(7))) == [16, 16, 16, 16, None, None, 16]
    faulty.gate.set()
    faulty.close()


def value_of(store: KVStore, key: str) -> bytes:
    size = store.exists([key]).result()[0].nbytes
    buffer = memoryview(bytearray(size))
    assert store.get([GetOp(key, (buffer,))]).result()[0].code is ResultCode.OK
    return bytes(buffer)


def replace_value(store: KVStore, key: str, change: Callable[[bytes], bytes]) -> None:
    value = change(value_of(store, key))
    store.delete([key]).result()
    assert store.put([PutOp(key, (memoryview(value),))]).result()[0].code is ResultCode.OK


def damage(store: KVStore, key: str, at: int) -> None:
    replace_value(store, key, lambda value: value[:at] + bytes([value[at] ^ 4]) + value[at + 1 :])


def test_the_key_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("00" * 32)
    path.chmod(0o600)
    settings = PluginSettings.of({f"{START}store": "memory:", f"{START}seal_keys": str(path)})
    assert settings.read_seals() is not None
    assert PluginSettings.of({f"{START}store": "memory:"}).read_seals() is None
