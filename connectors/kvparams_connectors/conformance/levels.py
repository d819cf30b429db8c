"""The tests of the levels bytes and limits, and all levels together.

A test puts what it needs itself and checks bytes, not only result codes.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import pytest

from kvparams_connectors.conformance.concurrency import ConcurrencyLevel
from kvparams_connectors.conformance.engine_order import EngineOrderLevel
from kvparams_connectors.conformance.faults_level import FaultsLevel
from kvparams_connectors.conformance.helpers import (
    DEADLINE_S,
    ConformanceLevel,
    Opener,
    check_lookup,
    get_one,
    make_value,
    put_one,
    result_codes,
)
from kvparams_connectors.conformance.integrity import IntegrityLevel
from kvparams_connectors.conformance.performance import PerformanceLevel
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode, Results

__all__ = ["BytesLevel", "LimitsLevel", "StoreConformance"]

_SIZES: Final = (0, 1, 255, 256, 4095, 4096, 4097, 65_535, 65_536, 65_537, 300_001)


class BytesLevel(ConformanceLevel):
    """A value comes out as it went in, under its own key, and every key of a batch has its own result."""

    @pytest.mark.parametrize("size", _SIZES)
    def test_a_value_comes_back_as_it_was_put(self, store: KVStore, size: int) -> None:
        wanted = make_value(size, size)
        assert put_one(store, "key", wanted) == Result(ResultCode.OK, size)
        assert get_one(store, "key", size) == (Result(ResultCode.OK, size), bytes(wanted))
        assert get_one(store, "key", size + 100) == (Result(ResultCode.OK, size), bytes(wanted))

    def test_a_value_is_put_from_and_read_into_several_buffers(self, store: KVStore) -> None:
        wanted = make_value("parts", 200_000)
        empty = memoryview(b"")
        assert put_one(store, "key", wanted[:7], empty, wanted[7:70_001], wanted[70_001:]) == Result(
            ResultCode.OK, 200_000
        )
        parts = [memoryview(bytearray(size)) for size in (100_000, 0, 1, 150_000)]
        assert store.get([GetOp("key", parts)], DEADLINE_S).result() == [Result(ResultCode.OK, 200_000)]
        assert b"".join(parts)[:200_000] == bytes(wanted)

    def test_nothing_is_written_beside_the_buffers(self, store: KVStore) -> None:
        wanted = make_value("canary", 70_000)
        put_one(store, "key", wanted)
        memory = bytearray(b"\xa5" * 90_000)
        whole = memoryview(memory)
        parts = (whole[1_000:41_000], whole[50_000:80_000])
        assert store.get([GetOp("key", parts)], DEADLINE_S).result() == [Result(ResultCode.OK, 70_000)]
        assert memory[1_000:41_000] + memory[50_000:80_000] == bytes(wanted)
        assert set(memory[:1_000] + memory[41_000:50_000] + memory[80_000:]) == {0xA5}

    def test_what_is_said_to_have_arrived_is_there(self, store: KVStore) -> None:
        """Checks that reported bytes have arrived.

        A store need not report them (`GetOp.on_complete`); if it does, then once, and the truth. The same holds for the
        progress of a value (`GetOp.on_progress`).
        """
        sizes = {"large": 300_000, "small": 10, "vast": min(5_000_000, store.capabilities.max_value_bytes // 4)}
        for key, size in sizes.items():
            assert put_one(store, key, make_value(key, size)).code is ResultCode.OK
        targets = {key: memoryview(bytearray(size + 100_000)) for key, size in sizes.items()}
        targets["missing"] = memoryview(bytearray(100))
        seen: dict[str, list[bytes]] = {key: [] for key in targets}
        came: dict[str, list[bytes]] = {key: [] for key in targets}

        def looking(key: str, told: dict[str, list[bytes]]) -> Callable[[int], None]:
            return lambda nbytes: told[key].append(bytes(targets[key][:nbytes]))

        ops = [GetOp(key, (targets[key],), looking(key, seen), looking(key, came)) for key in targets]
        for (key, target), result in zip(targets.items(), store.get(ops, DEADLINE_S).result(), strict=True):
            there = bytes(target[: result.nbytes])
            assert seen[key] in ([], [there] if result.code is ResultCode.OK else [])
            parts = came[key]
            assert not parts or parts[0] == b""
            last = max((at for at, part in enumerate(parts) if not part), default=0)  # where it began for good
            assert all(there.startswith(part) for part in parts[last:]) or result.code is not ResultCode.OK
            assert [len(part) for part in parts[last:]] == sorted(len(part) for part in parts[last:])

    def test_what_is_written_when_a_value_goes_is_stored_with_it(self, store: KVStore) -> None:
        """`PutOp.before_read`: called before the value is looked at, and once; `PutOp.on_idle`: only before that."""
        sizes = {"great": 300_000, "little": 10, "huge": min(5_000_000, store.capabilities.max_value_bytes // 4)}
        wanted = {key: make_value(key, size) for key, size in sizes.items()}
        sources = {key: memoryview(bytearray(size)) for key, size in sizes.items()}
        called: list[str] = []

        def finishing(key: str) -> Callable[[], None]:
            def finish() -> None:
                called.append(key)
                sources[key][:] = wanted[key]

            return finish

        late: list[str] = []

        def nearing(key: str) -> Callable[[], bool]:
            def near() -> bool:
                if key in called:
                    late.append(key)
                return True

            return near

        ops = [PutOp(key, (source[:7], source[7:]), finishing(key), nearing(key)) for key, source in sources.items()]
        assert store.put(ops, DEADLINE_S).result() == [Result(ResultCode.OK, size) for size in sizes.values()]
        assert sorted(called) == sorted(sizes)
        assert not late
        for key, size in sizes.items():
            result, found = get_one(store, key, size)
            assert result == Result(ResultCode.OK, size)
            same = found == bytes(wanted[key])  # a test that fails shall not print a value
            assert same, key

    def test_a_value_of_elements_larger_than_bytes_is_stored_as_bytes(self, store: KVStore) -> None:
        wanted = make_value("words", 80_000)
        assert put_one(store, "key", wanted.cast("Q")) == Result(ResultCode.OK, 80_000)
        target = memoryview(bytearray(80_000))
        assert store.get([GetOp("key", (target.cast("I"),))], DEADLINE_S).result() == [Result(ResultCode.OK, 80_000)]
        assert target == wanted

    def test_a_missing_key_is_a_miss_in_every_operation(self, store: KVStore) -> None:
        assert get_one(store, "nothing", 10)[0] == Result(ResultCode.MISS)
        assert store.exists(["nothing"], DEADLINE_S).result() == [Result(ResultCode.MISS)]
        assert store.delete(["nothing"], DEADLINE_S).result() == [Result(ResultCode.MISS)]

    def test_a_batch_has_one_result_per_key_in_its_order(self, store: KVStore) -> None:
        values = {f"key-{number}": make_value(number, 1_000 * number) for number in range(1, 9)}
        ops = [PutOp(key, (content,)) for key, content in values.items()]
        assert store.put(ops, DEADLINE_S).result() == [Result(ResultCode.OK, 1_000 * number) for number in range(1, 9)]
        wanted = ["key-3", "none-1", "key-8", "key-1", "none-2", "key-3"]
        targets = [memoryview(bytearray(8_000)) for _ in wanted]
        results = store.get([GetOp(*op) for op in zip(wanted, ([t] for t in targets), strict=True)], DEADLINE_S)
        for key, target, result in zip(wanted, targets, results.result(), strict=True):
            if key in values:
                assert result == Result(ResultCode.OK, values[key].nbytes)
                assert target[: result.nbytes] == values[key]
            else:
                assert result == Result(ResultCode.MISS)
        check_lookup(store, list(zip(wanted, (3_000, None, 8_000, 1_000, None, 3_000), strict=True)))

    def test_empty_batches_have_empty_results(self, store: KVStore) -> None:
        assert store.put([], DEADLINE_S).result() == []
        assert store.get([], DEADLINE_S).result() == []
        assert store.exists([], DEADLINE_S).result() == []
        assert store.delete([], DEADLINE_S).result() == []

    def test_the_first_value_of_a_key_stays(self, store: KVStore) -> None:
        first, second = make_value("first", 5_000), make_value("second", 5_000)
        results = [put_one(store, "key", first), put_one(store, "key", second)]
        assert result_codes(results) == [ResultCode.OK, ResultCode.EXISTS]
        assert get_one(store, "key", 5_000)[1] == bytes(first)
        twice = [PutOp("other", (first,)), PutOp("other", (second,))]
        assert sorted(code.name for code in result_codes(store.put(twice, DEADLINE_S).result())) == ["EXISTS", "OK"]
        assert get_one(store, "other", 5_000)[1] in (bytes(first), bytes(second))

    def test_a_deleted_key_is_gone_and_may_be_put_again(self, store: KVStore) -> None:
        put_one(store, "key", make_value("old", 3_000))
        put_one(store, "other", make_value("other", 3_000))
        assert result_codes(store.delete(["key", "nothing"], DEADLINE_S).result()) == [ResultCode.OK, ResultCode.MISS]
        assert get_one(store, "key", 3_000)[0].code is ResultCode.MISS
        assert put_one(store, "key", make_value("new", 2_000)) == Result(ResultCode.OK, 2_000)
        assert get_one(store, "key", 3_000) == (Result(ResultCode.OK, 2_000), bytes(make_value("new", 2_000)))
        assert get_one(store, "other", 3_000)[1] == bytes(make_value("other", 3_000))

    def test_the_source_may_change_once_the_job_is_settled(self, store: KVStore) -> None:
        source = make_value("source", 100_000)
        wanted = bytes(source)
        job = store.put([PutOp("key", (source,))], DEADLINE_S)
        assert job.wait_settled(DEADLINE_S)
        source[:] = bytes(100_000)
        assert get_one(store, "key", 100_000)[1] == wanted

    def test_jobs_are_awaited_as_well(self, store: KVStore) -> None:
        async def work() -> tuple[Results, Results]:
            put_results = await store.put([PutOp("key", (make_value("a", 10),))], DEADLINE_S)
            return put_results, await store.exists(["key"], DEADLINE_S)

        stored, found = asyncio.run(work())
        assert (stored, result_codes(found)) == ([Result(ResultCode.OK, 10)], [ResultCode.OK])

    def test_a_shared_store_is_seen_by_a_second_opener(self, opener: Opener) -> None:
        first = opener()
        if not first.capabilities.shared:
            return
        second = opener()
        put_one(first, "key", make_value("shared", 70_000))
        assert get_one(second, "key", 70_000)[1] == bytes(make_value("shared", 70_000))
        assert result_codes(second.delete(["key"], DEADLINE_S).result()) == [ResultCode.OK]
        if not first.capabilities.private_copies:
            assert get_one(first, "key", 70_000)[0].code is ResultCode.MISS

    def test_a_persistent_store_keeps_values_when_it_is_closed(self, opener: Opener) -> None:
        first = opener()
        if not first.capabilities.persistent:
            return
        put_one(first, "key", make_value("kept", 70_000))
        first.close()
        assert get_one(opener(), "key", 70_000)[1] == bytes(make_value("kept", 70_000))


class LimitsLevel(ConformanceLevel):
    """The store says what does not fit, and nothing else is hurt."""

    def test_the_longest_and_oddest_keys_work(self, store: KVStore) -> None:
        keys = ["k" * 128, "k" * 127, "A.b_c-9", ".", "-", "0", "..", "Key", "key"]
        for number, key in enumerate(keys):
            assert put_one(store, key, make_value(number, 100 + number)).code is ResultCode.OK
        for number, key in enumerate(keys):
            assert get_one(store, key, 200)[1] == bytes(make_value(number, 100 + number))

    @pytest.mark.parametrize("key", ["", "k" * 129, "a b", "a/b", "ä", "a\n", "a\0", "a:b"])
    def test_a_bad_key_is_invalid_and_the_rest_of_the_batch_is_not(self, store: KVStore, key: str) -> None:
        good = make_value("good", 10)
        results = store.put([PutOp(key, (good,)), PutOp("good", (good,))], DEADLINE_S).result()
        assert result_codes(results) == [ResultCode.INVALID, ResultCode.OK]
        target = memoryview(bytearray(10))
        results = store.get([GetOp("good", (target,)), GetOp(key, (target,))], DEADLINE_S).result()
        assert result_codes(results) == [ResultCode.OK, ResultCode.INVALID]
        assert result_codes(store.exists([key, "good"], DEADLINE_S).result()) == [ResultCode.INVALID, ResultCode.OK]
        assert result_codes(store.delete([key, "good"], DEADLINE_S).result()) == [ResultCode.INVALID, ResultCode.OK]

    def test_buffers_that_cannot_be_used_are_invalid(self, store: KVStore) -> None:
        gaps = memoryview(bytearray(20))[::2]
        assert put_one(store, "gaps", gaps).code is ResultCode.INVALID
        put_one(store, "key", make_value("key", 10))
        results = store.get([GetOp("key", (gaps,)), GetOp("key", (memoryview(bytes(10)),))], DEADLINE_S).result()
        assert result_codes(results) == [ResultCode.INVALID, ResultCode.INVALID]

    def test_buffers_that_are_too_small_are_told_the_size_and_left_alone(self, store: KVStore) -> None:
        put_one(store, "key", make_value("key", 5_000))
        target = memoryview(bytearray(b"\xa5" * 4_999))
        assert store.get([GetOp("key", (target,))], DEADLINE_S).result() == [Result(ResultCode.TOO_LARGE, 5_000)]
        assert set(target) == {0xA5}

    def test_a_value_over_the_limit_is_too_large_and_the_rest_of_the_batch_is_not(self, store: KVStore) -> None:
        limit = store.capabilities.max_value_bytes
        huge = memoryview(bytearray(limit + 1))
        ops = [
            PutOp("small", (make_value("small", 10),)),
            PutOp("huge", (huge,)),
            PutOp("other", (make_value("other", 10),)),
        ]
        assert result_codes(store.put(ops, DEADLINE_S).result()) == [ResultCode.OK, ResultCode.TOO_LARGE, ResultCode.OK]
        assert result_codes(store.exists(["small", "huge", "other"], DEADLINE_S).result()) == [
            ResultCode.OK,
            ResultCode.MISS,
            ResultCode.OK,
        ]

    def test_a_store_that_is_full_gives_up_what_was_not_used_for_longest(self, store: KVStore) -> None:
        """Eviction may be coarse, but the newest values are there, whole, and there is room for each of them."""
        size = max(1, store.capabilities.max_value_bytes // 10)
        for number in range(40):
            assert put_one(store, f"key-{number}", make_value(number, size)).code is ResultCode.OK
            assert get_one(store, "key-0", size)[1] in (b"", bytes(make_value(0, size)))
        found = [get_one(store, f"key-{number}", size) for number in range(40)]
        for number, (result, content) in enumerate(found):
            assert result.code in (ResultCode.OK, ResultCode.MISS)
            assert result.code is ResultCode.MISS or content == bytes(make_value(number, size))
        if not store.capabilities.evicts:
            assert result_codes([result for result, _ in found]) == [ResultCode.OK] * 40
            return
        if store.capabilities.exact_lru:
            assert result_codes([found[0][0], *(result for result, _ in found[36:])]) == [ResultCode.OK] * 5
        assert ResultCode.MISS in result_codes([result for result, _ in found])

    @pytest.mark.parametrize("use", ["exists", "get"])
    def test_of_a_sequence_of_pages_the_tail_is_evicted_before_the_head(self, store: KVStore, use: str) -> None:
        size = max(1, store.capabilities.max_value_bytes // 10)
        keys = [f"page-{number}" for number in range(6)]
        store.put([PutOp(key, (make_value(key, size),)) for key in keys], DEADLINE_S).result()
        if use == "exists":
            store.exists(keys, DEADLINE_S).result()
        else:
            store.get([GetOp(key, (memoryview(bytearray(size)),)) for key in keys], DEADLINE_S).result()
        put_one(store, "pressure", make_value("pressure", size * 6))
        present = [code is ResultCode.OK for code in result_codes(store.exists(keys, DEADLINE_S).result())]
        assert all(present) is not store.capabilities.evicts
        if store.capabilities.exact_lru:
            assert present == sorted(present, reverse=True)
            assert present[0]


class StoreConformance(
    BytesLevel, LimitsLevel, IntegrityLevel, ConcurrencyLevel, FaultsLevel, EngineOrderLevel, PerformanceLevel
):
    """Runs all levels."""
