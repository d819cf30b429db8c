"""Tests the Mooncake store against a real master and owners: the conformance suite, its settings, its restrictions."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.processes import free_port
from kvparams_connectors.advice import advice_from_store as advice_of_store
from kvparams_connectors.arena import Arena, Slot
from kvparams_connectors.cli.store_diagnosis import examine_store
from kvparams_connectors.conformance import Floors, Opener, StoreConformance
from kvparams_connectors.conformance.toy_engine import PAGE_BYTES, block_table, save_sequence, toy_engine
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode, open_store
from kvparams_connectors.store_url import StoreError, StoreURL
from kvparams_connectors.stores.mooncake.advice import ClusterFacts, advice_from_facts, rdma_devices
from kvparams_connectors.stores.mooncake.client import MooncakeClient
from kvparams_connectors.stores.mooncake.library import ReplicaDescriptors
from kvparams_connectors.stores.mooncake.registered_memory import (
    RegisteredMemory,
    RegisteredRegions,
    leading_ranges,
    memory_regions,
)
from kvparams_connectors.stores.mooncake.stall_breaker import StallBreaker
from kvparams_connectors.stores.mooncake.status_codes import MooncakeStatus, result_code
from kvparams_connectors.stores.mooncake.store import MooncakeSettings, MooncakeStore
from kvparams_connectors.stores.mooncake.writer import EMPTY
from tests.support.connectors.mooncake_cluster import Cluster
from tests.support.connectors.steps import codes
from tests.support.waiting import wait_until

DEADLINE_S = 20.0
NAMES = count()
THERE = Result(ResultCode.OK, has_size=False)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all tests of this file: each has a prefix of its own, so it is empty for each."""
    evicting = ("--default_kv_lease_ttl=50", "--eviction_high_watermark_ratio=0.8", "--eviction_ratio=0.2")
    with Cluster(tmp_path_factory.mktemp("mooncake"), "32MiB", options=evicting) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def clients(cluster: Cluster) -> Iterator[list[MooncakeClient]]:
    """Two, for all tests of this file: the client library takes most of a second to close one, and stops everything."""
    settings = MooncakeSettings.of(StoreURL.parse(cluster.url()))
    clients = [MooncakeClient(settings), MooncakeClient(settings)]
    yield clients
    for client in clients:
        assert client.close(10.0)


@pytest.fixture
def opener(cluster: Cluster, clients: list[MooncakeClient]) -> Iterator[Opener]:
    """Stores of one test, by turns with the one and the other client."""
    prefix = f"test-{os.getpid()}-{next(NAMES)}:"
    opened: list[MooncakeStore] = []

    def open_one() -> KVStore:
        opened.append(cluster.open(clients[len(opened) % 2], prefix=prefix, max_value_bytes=4 << 20))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(opener: Opener) -> KVStore:
    return opener()


def content(seed: int, size: int) -> memoryview:
    return memoryview(bytearray((seed * 31 + number * 7) % 251 for number in range(256)) * (size // 256 + 1))[:size]


class TestMooncakeStore(StoreConformance):
    at_least = Floors(put=0.002, get=0.0015)

    @pytest.fixture
    def opener(self, opener: Opener) -> Opener:  # pyright: ignore[reportIncompatibleMethodOverride]
        return opener

    def test_a_store_that_is_full_gives_up_what_was_not_used_for_longest(self, store: KVStore) -> None:
        """Mooncake evicts without order among values that were not used: each has room, and none is wrong."""
        size = 2 << 20
        target = memoryview(bytearray(size))
        for number in range(40):
            assert codes(store.put([PutOp(f"key-{number}", (content(number, size),))], DEADLINE_S).result()) == [
                ResultCode.OK
            ]
        found: list[ResultCode] = []
        for number in range(40):
            [result] = store.get([GetOp(f"key-{number}", (target,))], DEADLINE_S).result()
            found.append(result.code)
            assert result.code is ResultCode.MISS or (result.code is ResultCode.OK and target == content(number, size))
        assert set(found) == {ResultCode.OK, ResultCode.MISS}

    @pytest.mark.parametrize("use", ["exists", "get"])
    def test_of_a_sequence_of_pages_the_tail_is_evicted_before_the_head(self, store: KVStore, use: str) -> None:
        """Mooncake promises no order, only that what is leased stays; what stays is whole."""
        size = 4 << 20
        keys = [f"page-{number}" for number in range(10)]
        target = memoryview(bytearray(size))
        for number, key in enumerate(keys):
            assert codes(store.put([PutOp(key, (content(number, size),))], DEADLINE_S).result()) == [ResultCode.OK]
            if use == "exists":  # it may be gone already: an eviction that had begun takes what has no lease yet
                assert set(codes(store.exists([key], DEADLINE_S).result())) <= {ResultCode.OK, ResultCode.MISS}
            else:
                assert set(codes(store.get([GetOp(key, (target,))], DEADLINE_S).result())) <= {
                    ResultCode.OK,
                    ResultCode.MISS,
                }
        results = [store.get([GetOp(key, (target,))], DEADLINE_S).result()[0] for key in keys]
        assert {result.code for result in results} == {ResultCode.OK, ResultCode.MISS}


# ---- bytes: registered memory, staging, and what stands for nothing


def leased(arena: Arena, seed: int, nbytes: int) -> memoryview:
    slot = arena.lease()
    assert slot is not None
    slot.view[:nbytes] = content(seed, nbytes)
    return slot.view[:nbytes]


def test_values_in_a_registered_arena_are_not_copied_and_others_are(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opener()
    assert isinstance(store, MooncakeStore)
    arena = Arena(4 << 20, 300_000)
    source, target = leased(arena, 1, 300_000), leased(arena, 2, 300_000)
    elsewhere = memoryview(bytearray(300_000))
    leases: list[int] = []
    staging = store._memory.staging  # pyright: ignore[reportPrivateUsage]
    lease = staging.lease

    def counted(timeout_s: float) -> Slot | None:
        leases.append(1)
        return lease(timeout_s)

    monkeypatch.setattr(staging, "lease", counted)

    def moved(put: memoryview, get: memoryview, key: str) -> int:
        leases.clear()
        assert codes(store.put([PutOp(key, (put[:7], put[7:]))], DEADLINE_S).result()) == [ResultCode.OK]
        assert store.get([GetOp(key, (get[:1000], get[1000:]))], DEADLINE_S).result() == [
            Result(ResultCode.OK, 300_000)
        ]
        assert get == content(1, 300_000)
        return len(leases)

    assert moved(source, target, "before") == 2  # the control: it was not registered
    store.register(arena)
    store.register(arena)
    target[:] = bytes(300_000)
    assert moved(source, target, "both") == 0
    assert moved(source, elsewhere, "one") == 1
    elsewhere[:] = content(1, 300_000)
    assert moved(elsewhere, target, "other") == 1


def test_a_value_larger_than_the_staging_area_goes_through_it_in_parts(
    cluster: Cluster, clients: list[MooncakeClient]
) -> None:
    store = cluster.open(clients[0], prefix="parts:", buffer_bytes=64 << 10, threads=2)
    sizes = [32_768, 32_769, 1_000_000, 5, 65_536]
    ops = [PutOp(f"{size}", (content(size, size)[:3], content(size, size)[3:])) for size in sizes]
    assert store.put(ops, DEADLINE_S).result() == [Result(ResultCode.OK, size) for size in sizes]
    targets = [memoryview(bytearray(size + 9)) for size in sizes]
    gets = [GetOp(f"{size}", (target[:4000], target[4000:])) for size, target in zip(sizes, targets, strict=True)]
    assert store.get(gets, DEADLINE_S).result() == [Result(ResultCode.OK, size) for size in sizes]
    for size, target in zip(sizes, targets, strict=True):
        assert target[:size] == content(size, size)
    store.close()


def test_a_value_of_no_bytes_is_kept_although_mooncake_takes_none(store: KVStore) -> None:
    nothing, short = memoryview(b""), content(1, len(EMPTY))
    ops = [PutOp("empty", (nothing,)), PutOp("none", ()), PutOp("short", (short,)), PutOp("mark", (memoryview(EMPTY),))]
    assert codes(store.put(ops, DEADLINE_S).result()) == [
        ResultCode.OK,
        ResultCode.OK,
        ResultCode.OK,
        ResultCode.INVALID,
    ]
    found = store.exists(["empty", "none", "short", "mark"], DEADLINE_S).result()
    assert found == [THERE, THERE, THERE, Result(ResultCode.MISS)]
    target = memoryview(bytearray(40))
    gets = [GetOp("empty", ()), GetOp("none", (nothing,)), GetOp("short", (target[:31],)), GetOp("short", (target,))]
    gets[1] = GetOp("none", (memoryview(bytearray(0)),))
    results = store.get(gets, DEADLINE_S).result()
    assert results == [
        Result(ResultCode.OK, 0),
        Result(ResultCode.OK, 0),
        Result(ResultCode.TOO_LARGE, 32),
        Result(ResultCode.OK, 32),
    ]
    assert target[:32] == short
    assert store.put([PutOp("empty", (short,))], DEADLINE_S).result() == [Result(ResultCode.EXISTS)]


def test_whoever_checks_the_bytes_spares_the_master_two_questions(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opener()
    assert isinstance(store, MooncakeStore)
    sizes = {"large": 300_000, "small": 5, "short": len(EMPTY), "empty": 0}
    puts = [PutOp(key, (content(size, size),)) for key, size in sizes.items()]
    assert codes(store.put(puts, DEADLINE_S).result()) == [ResultCode.OK] * 4
    arena = Arena(4 << 20, 400_000)
    store.register(arena)
    slots = arena.lease_many(10, 10)
    elsewhere = memoryview(bytearray(400_000))
    asked: list[Sequence[str]] = []
    copies = MooncakeClient.copies

    def counted(client: MooncakeClient, keys: Sequence[str], deadline: float) -> dict[str, ReplicaDescriptors]:
        asked.append(keys)
        return copies(client, keys, deadline)

    monkeypatch.setattr(MooncakeClient, "copies", counted)

    def read(*ops: GetOp) -> tuple[list[Result], int]:
        asked.clear()
        return store.get(ops, DEADLINE_S).result(), len(asked)

    first, second, third, *_ = [slot.view for slot in slots]
    good = [Result(ResultCode.OK, 300_000), Result(ResultCode.OK, 5)]
    assert read(GetOp("large", (first,)), GetOp("small", (second,))) == (good, 2)  # the control
    first[:300_000] = bytes(300_000)
    assert read(GetOp("large", (first,), caller_verifies=True), GetOp("small", (second,), caller_verifies=True)) == (
        good,
        0,
    )
    assert (first[:300_000], second[:5]) == (content(300_000, 300_000), content(5, 5))
    assert read(GetOp("none", (first,), caller_verifies=True)) == ([Result(ResultCode.MISS)], 0)
    # What only the careful way can tell: a value without bytes, and buffers that are too small.
    assert read(GetOp("empty", (third,), caller_verifies=True))[0] == [Result(ResultCode.OK, 0)]
    assert read(GetOp("short", (third,), caller_verifies=True))[0] == [Result(ResultCode.OK, 32)]
    assert third[:32] == content(32, 32)
    assert read(GetOp("large", (first[:299_999],), caller_verifies=True))[0] == [Result(ResultCode.TOO_LARGE, 300_000)]
    # And what goes another way in any case.
    assert read(GetOp("large", (elsewhere,), caller_verifies=True)) == ([Result(ResultCode.OK, 300_000)], 2)
    parts = (second[:1000], third)
    assert read(GetOp("large", parts, caller_verifies=True), GetOp("small", (first,), caller_verifies=True)) == (
        good,
        2,
    )
    assert b"".join(parts)[:300_000] == content(300_000, 300_000)


@pytest.mark.parametrize("there", [0, 1, 150, 299, 300])
def test_a_lookup_of_many_keys_is_one_question_about_presence(
    store: KVStore, there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(store, MooncakeStore)
    client = store._client  # pyright: ignore[reportPrivateUsage]
    asked: list[int] = []
    exists = client.exists

    def counted(keys: Sequence[str], deadline: float) -> list[int]:
        asked.append(len(keys))
        return exists(keys, deadline)

    monkeypatch.setattr(client, "exists", counted)
    monkeypatch.setattr(client, "copies", None)  # nobody asks where they lie, which would tell how large they are
    keys = [f"key-{number}" for number in range(300)]
    puts = [PutOp(key, (content(1, 1 + number),)) for number, key in enumerate(keys[:there])]
    assert codes(store.put(puts, DEADLINE_S).result()) == [ResultCode.OK] * there
    asked.clear()
    wanted = [THERE] * there + [Result(ResultCode.MISS)] * (300 - there)
    assert store.exists(keys, DEADLINE_S).result() == wanted
    wanted.reverse()
    assert store.exists(keys[::-1], DEADLINE_S).result() == wanted
    assert asked == [300, 300]


@pytest.mark.slow
@pytest.mark.alone
def test_the_fastest_of_200_lookups_of_a_thousand_pages_takes_less_than_three_milliseconds(
    store: KVStore, record: Callable[[dict[str, object]], None]
) -> None:
    """A busy machine only adds to it, so the fastest counts here; `benchmarks/mooncake_bench.py` has the median."""
    keys = [f"{number:064x}" for number in range(1000)]
    store.put([PutOp(key, (content(1, 100),)) for key in keys], DEADLINE_S).result()
    times: list[float] = []
    for _ in range(200):
        start = time.perf_counter()
        found = store.exists(keys, DEADLINE_S).result()
        times.append(1000 * (time.perf_counter() - start))
        assert found == [THERE] * 1000
    record({"lookup_of_1000_ms": round(sorted(times)[100], 2), "at_best_ms": round(min(times), 2)})
    assert min(times) < 3.0, f"median {sorted(times)[100]}"


def test_a_page_that_is_cut_short_is_found_and_refused_when_it_is_read(store: KVStore) -> None:
    """A lookup says only that it is there. By others' hands: our own puts are whole or not there."""
    plan, _ = save_sequence(store, 20)
    page = memoryview(bytearray(PAGE_BYTES))
    assert store.get([GetOp(plan.keys[1], (page,))]).result() == [Result(ResultCode.OK, PAGE_BYTES)]
    store.delete([plan.keys[1]]).result()
    store.put([PutOp(plan.keys[1], (page[:-1],))]).result()
    with toy_engine(store) as engine:
        assert engine.connector.lookup(plan).result().tokens == 20
        report = engine.connector.load(plan, block_table(2), 0, 20).result()
        assert (report.end_token, [one.reason for one in report.refused]) == (8, ["torn"])
        assert engine.connector.lookup(plan).result().tokens == 8
        assert engine.connector.save(plan, block_table(1), 0, 20).result().saved == 1


# ---- what the doctor is told


def settings_of(text: str = "") -> MooncakeSettings:
    return MooncakeSettings.of(StoreURL.parse(f"mooncake://10.0.0.1:50051?{text}"))


GOOD = ClusterFacts(0.0004, ResultCode.OK, [("10.0.0.2:15000", 4096, 64)], None)


@pytest.mark.parametrize(
    ("facts", "text", "environment", "words"),
    [
        (GOOD, "", {}, None),
        (replace(GOOD, question_s=0.05), "", {}, "answers in 50.0 ms"),
        (replace(GOOD, lease_s=0.5), "", {}, "leases a value for only 0.5 s"),
        (GOOD, "replicas=2", {}, "there are no more owners"),
        (replace(GOOD, copies=GOOD.copies * 2), "replicas=2", {}, None),
        (replace(GOOD, devices=("mlx5_0", "mlx5_1")), "", {}, "RDMA devices: mlx5_0, mlx5_1"),
        (replace(GOOD, devices=("mlx5_0",)), "protocol=rdma", {}, None),
        (GOOD, "protocol=rdma", {"MC_FORCE_TCP": "1"}, "MC_FORCE_TCP is set"),
        (GOOD, "metadata=http://10.0.0.1:8080/metadata", {}, "metadata names another service"),
        (GOOD, "segment=1GiB", {}, "lost when it ends"),
        (GOOD, "", {"MC_STORE_MEMCPY": "0"}, None),
        (replace(GOOD, copies=[("127.0.0.1:15000", 4096, 64)]), "", {}, "works only on its own machine"),
    ],
)
def test_settings_that_will_hurt_are_warned_of(
    facts: ClusterFacts, text: str, environment: dict[str, str], words: str | None
) -> None:
    said = [advice for advice in advice_from_facts(facts, settings_of(text), environment) if advice.level != "ok"]
    assert all(advice.level == "warning" and advice.action for advice in said)
    assert len(said) == (words is not None)
    assert words is None or words in said[0].finding


def test_a_segment_of_our_own_that_is_read_by_way_of_the_network_is_warned_of() -> None:
    said = advice_from_facts(GOOD, settings_of("segment=1GiB"), {"MC_STORE_MEMCPY": "off"})
    assert "MC_STORE_MEMCPY is off" in said[-1].finding


@pytest.mark.parametrize(
    ("code", "words"), [(ResultCode.FULL, "no room"), (ResultCode.UNAVAILABLE, "could not be put")]
)
def test_a_cluster_that_takes_nothing_is_an_error(code: ResultCode, words: str) -> None:
    *_, last = advice_from_facts(ClusterFacts(0.001, code, [], None), settings_of(), {})
    assert (last.level, words in last.finding, bool(last.action)) == ("error", True, True)


def test_rdma_devices_are_those_that_linux_knows(tmp_path: Path) -> None:
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    assert rdma_devices(tmp_path) == ("mlx5_0", "mlx5_1")
    assert rdma_devices(tmp_path / "none") == ()


def test_what_a_cluster_does_to_a_value_is_seen_and_nothing_is_left(
    cluster: Cluster, clients: list[MooncakeClient]
) -> None:
    store = cluster.open(clients[0], prefix="doctor:", replicas=2)
    before = clients[0].exists(["doctor:key"], time.monotonic() + DEADLINE_S)
    found = advice_of_store(store)
    bad = [advice.finding for advice in found if advice.level != "ok"]
    assert len(bad) == 2
    assert "there are no more owners" in bad[0]
    assert "leases a value for only 0." in bad[1]  # this master's lease is 50 ms
    assert before == [0]
    store.close()


@pytest.mark.slow
def test_the_doctor_knows_a_cluster_that_is_good_and_one_without_owners(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        [*_, last] = list(examine_store(cluster.url()))
        assert (last.level, "no room" in last.finding) == ("error", True)
        cluster.add_owner("64MiB")
        said = list(examine_store(cluster.url()))
        assert [advice.finding for advice in said if advice.level != "ok"] == []


# ---- who wrote it


def test_a_value_that_another_client_is_writing_is_waited_for_but_not_for_long(
    cluster: Cluster, clients: list[MooncakeClient], opener: Opener
) -> None:
    first = opener()
    assert isinstance(first, MooncakeStore)
    name = first._settings.prefix + "key"  # pyright: ignore[reportPrivateUsage]
    op = PutOp("key", (content(1, 5000),))
    soon = time.monotonic() + DEADLINE_S
    assert clients[1].put_start([name], [5000], soon) == [0]
    before = time.monotonic()
    assert first.put([op], DEADLINE_S).result() == [Result(ResultCode.TIMEOUT)]
    assert 0.9 < time.monotonic() - before < 3.0
    assert first.exists(["key"], DEADLINE_S).result() == [Result(ResultCode.MISS)]
    assert first.delete(["key"], DEADLINE_S).result() == [Result(ResultCode.MISS)]
    job = first.put([op], DEADLINE_S)
    assert clients[1].put_revoke([name], soon) == [0]
    assert job.result() == [Result(ResultCode.OK, 5000)]
    assert clients[1].put_start([name], [5000], soon) == [MooncakeStatus.EXISTS]


def test_a_put_that_was_started_and_not_ended_by_ourselves_does_not_stand_in_the_way(
    clients: list[MooncakeClient], opener: Opener
) -> None:
    store = opener()
    assert isinstance(store, MooncakeStore)
    name = store._settings.prefix + "key"  # pyright: ignore[reportPrivateUsage]
    soon = time.monotonic() + DEADLINE_S
    assert clients[0].put_start([name], [5000], soon) == [0]
    assert clients[0].put_start([name], [5000], soon) == [MooncakeStatus.INVALID]  # the control
    assert store.put([PutOp("key", (content(1, 5000),))], DEADLINE_S).result() == [Result(ResultCode.OK, 5000)]


def test_what_took_so_long_that_its_place_may_be_given_away_is_not_made_visible(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opener()
    monkeypatch.setattr("kvparams_connectors.stores.mooncake.writer._OURS_S", -1.0)
    op = PutOp("key", (content(1, 5000),))
    assert codes(store.put([op], DEADLINE_S).result()) == [ResultCode.TIMEOUT]
    assert codes(store.exists(["key"], DEADLINE_S).result()) == [ResultCode.MISS]
    monkeypatch.undo()
    assert codes(store.put([op], DEADLINE_S).result()) == [ResultCode.OK]


def test_a_value_that_is_removed_and_put_again_while_it_is_read_is_a_miss(
    opener: Opener, clients: list[MooncakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = opener(), opener()
    target = memoryview(bytearray(400_000))
    assert codes(store.put([PutOp("key", (content(1, 400_000),))], DEADLINE_S).result()) == [ResultCode.OK]
    read = MooncakeClient.get_ranges

    def interrupted(client: MooncakeClient, *arguments: object) -> list[int]:
        assert codes(other.delete(["key"], DEADLINE_S).result()) == [ResultCode.OK]
        ops = [PutOp(key, (content(number, 400_000),)) for number, key in enumerate(("other", "key"))]
        assert codes(other.put(ops, DEADLINE_S).result()) == [ResultCode.OK, ResultCode.OK]
        return read(client, *arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(MooncakeClient, "get_ranges", interrupted)
    assert store.get([GetOp("key", (target,))], DEADLINE_S).result() == [Result(ResultCode.MISS)]
    monkeypatch.undo()
    assert store.get([GetOp("key", (target,))], DEADLINE_S).result() == [Result(ResultCode.OK, 400_000)]


def test_part_of_a_value_that_was_not_written_is_never_visible(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the library itself makes visible whatever was started."""
    store = opener()
    assert isinstance(store, MooncakeStore)
    write = MooncakeClient.put_ranges

    def failing(client: MooncakeClient, keys: list[str], *arguments: object) -> list[int]:
        answers = write(client, keys, *arguments)  # pyright: ignore[reportArgumentType]
        return [
            int(MooncakeStatus.TRANSFER_FAILED) if key.endswith("bad") else answer
            for key, answer in zip(keys, answers, strict=True)
        ]

    monkeypatch.setattr(MooncakeClient, "put_ranges", failing)
    ops = [PutOp("bad", (content(1, 5000),)), PutOp("good", (content(2, 5000),))]
    assert codes(store.put(ops, DEADLINE_S).result()) == [ResultCode.UNAVAILABLE, ResultCode.OK]
    assert codes(store.exists(["bad", "good"], DEADLINE_S).result()) == [ResultCode.MISS, ResultCode.OK]
    monkeypatch.undo()
    assert codes(store.put(ops, DEADLINE_S).result()) == [ResultCode.OK, ResultCode.EXISTS]
    client, soon = store._client, time.monotonic() + DEADLINE_S  # pyright: ignore[reportPrivateUsage]
    name = store._settings.prefix + "control"  # pyright: ignore[reportPrivateUsage]
    assert client.put_start([name], [5000], soon) == [0]
    assert client.put_end([name], soon) == [0]
    assert codes(store.exists(["control"], DEADLINE_S).result()) == [ResultCode.OK]


# ---- settings


@pytest.mark.parametrize(
    "url",
    [
        "mooncake:",
        "mooncake://host",
        "mooncake://host:0",
        "mooncake://host:port",
        "mooncake://host:123456",
        "mooncake://user@host:1",
        "mooncake://host:1/path",
        "mooncake://host:1?ttl=3",
        "mooncake://host:1?protocol=udp",
        "mooncake://host:1?local=a:1",
        "mooncake://host:1?segment=1MiB",
        "mooncake://host:1?buffer=8MiB",
        "mooncake://host:1?replicas=0",
        "mooncake://host:1?soft_pin=4",
        "mooncake://host:1?prefix=a%20b",
        "mooncake://host:1?threads=2",
        "mooncake://host:1?connect_ms=500",
        "mooncake://host:1?devices=;",
    ],
)
def test_what_cannot_be_is_refused_with_words(url: str) -> None:
    with pytest.raises(StoreError, match="mooncake store: "):
        open_store(url)


def test_every_setting_arrives() -> None:
    text = "mooncake://h:1?local=l&protocol=rdma&devices=a,b&metadata=etcd&segment=16MiB&replicas=3&prefix=p"
    settings = MooncakeSettings.of(StoreURL.parse(text))
    sizes = {"segment_bytes": 16 << 20}
    assert settings == MooncakeSettings("h", 1, "l", "rdma", "a,b", "etcd", **sizes, replicas=3, prefix="p")
    assert MooncakeSettings.of(StoreURL.parse("mooncake://h:1?segment=0")) == MooncakeSettings("h", 1)


def test_a_master_that_is_not_there_is_said_at_once() -> None:
    before = time.monotonic()
    with pytest.raises(StoreError, match="no master answers at"):
        open_store(f"mooncake://127.0.0.1:{free_port()}")
    assert time.monotonic() - before < 2.0


def test_more_replicas_than_owners_do_no_harm(cluster: Cluster, clients: list[MooncakeClient]) -> None:
    store = open_store(cluster.url(replicas=2, prefix="pinned:"))
    assert codes(store.put([PutOp("key", (content(1, 5000),))], DEADLINE_S).result()) == [ResultCode.OK]
    store.close()
    other = cluster.open(clients[0], prefix="pinned:")
    assert other.exists(["key"], DEADLINE_S).result() == [THERE]
    other.close()


# ---- pure parts


def test_a_number_that_nobody_knows_is_a_failure() -> None:
    assert result_code(-12345) is ResultCode.UNAVAILABLE
    assert result_code(MooncakeStatus.NOT_FOUND) is ResultCode.MISS
    assert result_code(17) is ResultCode.OK


@given(
    st.lists(st.tuples(st.sampled_from(["begin", "end", "lost", "probe", "ask"]), st.floats(0.0, 3.0))),
)
def test_nothing_is_let_through_while_a_call_is_overdue(steps: list[tuple[str, float]]) -> None:
    """Against a plain model: overdue calls, and whether a probe has succeeded since the last trip."""
    stalls, now = StallBreaker(1.0), 0.0
    running: dict[int, float] = {}
    tripped = False
    for what, length in steps:
        now += length
        if what == "begin":
            call = stalls.begin(now, now + length)
            assert call is not None
            running[call] = now + max(1.0, length)
        elif what in ("end", "lost") and running:
            call = min(running)
            del running[call]
            stalls.end(call, lost=what == "lost")
            tripped |= what == "lost"
        overdue = any(due <= now for due in running.values())
        if what == "probe":
            tripped &= overdue
            assert stalls.recover(now) is not tripped
        else:
            tripped |= overdue
            assert stalls.is_open(now) is tripped
    assert stalls.finish(0.0) is not running
    assert stalls.is_open(now)
    assert stalls.begin(now, now) is None


@given(st.lists(st.integers(0, 50), max_size=6), st.integers(0, 200))
def test_the_first_bytes_of_pieces(sizes: list[int], nbytes: int) -> None:
    whole = memoryview(bytearray(sum(sizes)))
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    pieces = memory_regions([whole[start : start + size] for start, size in zip(starts, sizes, strict=True)])
    addresses, lengths = leading_ranges(pieces, nbytes)
    assert sum(lengths) == min(nbytes, sum(sizes))
    assert all(length > 0 for length in lengths)
    if addresses:
        ends = [address + length for address, length in zip(addresses, lengths, strict=True)]
        assert addresses[1:] == ends[:-1]


def test_overlapping_memory_is_registered_once_or_not_at_all() -> None:
    registered: list[int] = []

    def register(address: int, nbytes: int) -> int:
        registered.append(address)
        return 0

    def unregister(address: int) -> int:
        registered.remove(address)
        return 0

    memory = RegisteredMemory(register, unregister, 8192, 2)
    arena = Arena(64_000, 1000)
    assert memory.add(arena)
    assert memory.add(arena)
    assert len(registered) == 2
    [piece] = memory_regions([arena.memory[64:]])
    assert memory.regions.covers([piece])
    with pytest.raises(ValueError, match="overlap"):
        RegisteredRegions(memory_regions([arena.memory])).with_one_more(piece)
    memory.release()
    assert registered == []
    with pytest.raises(MemoryError):
        RegisteredMemory(lambda address, nbytes: -1, unregister, 8192, 2)


# ---- what would end the process, in a process of its own


def child(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_calls_before_set_up_and_after_close_do_not_end_the_process(cluster: Cluster) -> None:
    done = child(
        """
        import sys
        from kvparams_connectors.arena import Arena, Slot
        from kvparams_connectors.store_url import StoreError
        from kvparams_connectors.store import *
        url = sys.argv[1]
        try:
            open_store("mooncake://127.0.0.1:1")
        except StoreError:
            pass
        store = open_store(url)
        buffer = memoryview(bytearray(10))
        for round in range(2):
            found = store.put([PutOp("key", (buffer,))]).result() + store.get([GetOp("key", (buffer,))]).result()
            found += store.exists(["key"]).result() + store.delete(["key"]).result()
            print([result.code.name for result in found])
            store.close()
            store.register(Arena(1 << 20, 4096))
        """,
        cluster.url(prefix="child:"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "['OK', 'OK', 'OK', 'OK']",
        "['UNAVAILABLE', 'UNAVAILABLE', 'UNAVAILABLE', 'UNAVAILABLE']",
    ]
    # The control: what we are guarded against.
    bare = "from mooncake.store import MooncakeDistributedStore as S; S().register_buffer(4096, 4096)"
    assert child(bare).returncode == -signal.SIGSEGV


def test_the_process_keeps_its_signals(cluster: Cluster) -> None:
    code = """
        import os, signal, sys, threading
        from kvparams_connectors.store import open_store
        got = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: got.set())
        store = open_store(sys.argv[1])
        os.kill(os.getpid(), signal.SIGTERM)
        print(got.wait(5.0))
        """
    done = child(code, cluster.url())
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]


def test_an_owner_says_what_is_wrong_and_ends_when_it_is_told_to(cluster: Cluster, tmp_path: Path) -> None:
    module = "kvparams_connectors.stores.mooncake.owner"
    command = [sys.executable, "-m", module, "--master", f"127.0.0.1:{free_port()}", "--size", "16MiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "no master answers" in done.stderr
    with Cluster(tmp_path, "16MiB") as own:
        assert own.owners[0].end(signal.SIGTERM) == 0


# ---- full


def test_full_is_said_soon_and_is_over_when_there_is_room(tmp_path: Path) -> None:
    """What was looked up is leased for ten seconds: until then nothing may be evicted for something new."""
    with Cluster(tmp_path, "16MiB") as cluster:
        store = cluster.open()
        keys = [f"key-{number}" for number in range(20)]
        found: list[ResultCode] = []
        leased: list[str] = []
        for number, key in enumerate(keys):
            before = time.monotonic()
            found += codes(store.put([PutOp(key, (content(number, 1 << 20),))], DEADLINE_S).result())
            assert time.monotonic() - before < 3.0
            if codes(store.exists([key], DEADLINE_S).result()) == [ResultCode.OK]:
                leased.append(key)
        assert set(found) == {ResultCode.OK, ResultCode.FULL}
        assert leased[0] == keys[0]
        assert set(codes(store.exists(leased, DEADLINE_S).result())) == {ResultCode.OK}
        assert codes(store.delete([keys[0]], DEADLINE_S).result()) == [ResultCode.OK]  # although it is leased
        assert codes(store.put([PutOp("new", (content(1, 1 << 20),))], DEADLINE_S).result()) == [ResultCode.OK]
        wait_until(lambda: codes(store.put([PutOp("more", (content(1, 3 << 20),))]).result()) == [ResultCode.FULL], 1.0)
        store.close()
