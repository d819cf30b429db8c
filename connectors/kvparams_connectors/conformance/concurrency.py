"""The tests of the level concurrency: several threads, deadlines, and closing."""

import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

from kvparams_connectors.conformance.helpers import (
    DEADLINE_S,
    ConformanceLevel,
    Opener,
    get_one,
    make_value,
    put_one,
    result_codes,
)
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode

__all__ = ["ConcurrencyLevel"]


class ConcurrencyLevel(ConformanceLevel):
    """Several threads, deadlines, and the end."""

    def test_several_threads_never_see_a_wrong_byte(self, opener: Opener) -> None:
        """Readers and writers of the same few keys, while there is room for half of them."""
        stores = [opener()]
        if stores[0].capabilities.shared:
            stores.append(opener())
        size = max(1, stores[0].capabilities.max_value_bytes // 8)
        contents = {f"key-{number}": bytes(make_value(number, size - number)) for number in range(16)}
        wrong: list[str] = []
        hits: list[str] = []

        def work(seed: int) -> None:
            random = Random(seed)
            store = stores[seed % len(stores)]
            target = memoryview(bytearray(size))
            for _ in range(60):
                key = random.choice(list(contents))
                action = random.random()
                if action < 0.05:
                    store.delete([key], DEADLINE_S).result()
                elif action < 0.5:
                    put_one(store, key, memoryview(contents[key]))
                else:
                    result = store.get([GetOp(key, (target,))], DEADLINE_S).result()[0]
                    if result.code is ResultCode.OK:
                        hits.append(key)
                        if bytes(target[: result.nbytes]) != contents[key]:
                            wrong.append(key)
                    elif result.code is not ResultCode.MISS:
                        wrong.append(f"{key}: {result}")

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, seed) for seed in range(4)]:
                done.result(timeout=60 * 3 * DEADLINE_S)  # a thread that raises fails the test
        assert wrong == []
        assert hits  # the control: something was compared at all

    def test_of_many_writers_of_one_value_all_are_told_that_it_is_there(self, opener: Opener) -> None:
        stores = [opener()]
        if stores[0].capabilities.shared:
            stores.append(opener())
        content = make_value("same", 500_000)
        for number in range(10):
            ops = [PutOp(f"key-{number}", (content,))]
            jobs = [stores[writer % len(stores)].put(ops, DEADLINE_S) for writer in range(4)]
            found = sorted(job.result()[0].code.name for job in jobs)
            if stores[0].capabilities.one_winner:
                assert found == ["EXISTS", "EXISTS", "EXISTS", "OK"]
            assert set(found) <= {"EXISTS", "OK"}
            assert "OK" in found
            assert get_one(stores[-1], f"key-{number}", 500_000)[1] == bytes(content)

    def test_a_deadline_that_has_passed_is_a_time_out_for_every_key(self, store: KVStore) -> None:
        job = store.put([PutOp("a", (make_value("a", 10),)), PutOp("b", (make_value("b", 10),))], 0.0)
        assert job.done()
        assert result_codes(job.result()) == [ResultCode.TIMEOUT, ResultCode.TIMEOUT]
        assert job.wait_settled(DEADLINE_S)
        assert put_one(store, "a", make_value("a", 10)).code in (ResultCode.OK, ResultCode.EXISTS)

    def test_a_closed_store_is_unavailable_at_once(self, store: KVStore) -> None:
        put_one(store, "key", make_value("key", 10))
        store.close()
        store.close()
        before = time.monotonic()
        assert put_one(store, "key", make_value("key", 10)).code is ResultCode.UNAVAILABLE
        assert get_one(store, "key", 10)[0].code is ResultCode.UNAVAILABLE
        assert result_codes(store.exists(["key"], DEADLINE_S).result()) == [ResultCode.UNAVAILABLE]
        assert result_codes(store.delete(["key"], DEADLINE_S).result()) == [ResultCode.UNAVAILABLE]
        assert time.monotonic() - before < DEADLINE_S

    def test_closing_waits_for_what_was_submitted(self, store: KVStore) -> None:
        jobs = [store.put([PutOp(f"key-{number}", (make_value(number, 100_000),))], DEADLINE_S) for number in range(20)]
        store.close()
        assert all(job.settled() for job in jobs)
        assert {result.code for job in jobs for result in job.result()} == {ResultCode.OK}
