"""The tests of the level faults: what a deadline, a close or a writer that goes away leave behind.

A fault may cost a value, never make a wrong one; and once a job is settled, its buffers belong to the caller again.
"""

import threading
from random import Random
from typing import Final

from kvparams_connectors.conformance.helpers import (
    DEADLINE_S,
    ConformanceLevel,
    Opener,
    get_one,
    make_value,
    put_one,
    result_codes,
)
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode, Results

__all__ = ["FaultsLevel"]

_ENDINGS: Final = {
    ResultCode.OK,
    ResultCode.EXISTS,
    ResultCode.MISS,
    ResultCode.TIMEOUT,
    ResultCode.FULL,
    ResultCode.UNAVAILABLE,
}


class FaultsLevel(ConformanceLevel):
    """Abandoned, cut off, overtaken: never a wrong byte."""

    def test_what_was_abandoned_is_whole_or_not_there(self, store: KVStore) -> None:
        """Puts and gets under deadlines that are often too short."""
        random = Random(2)
        size = max(1, min(200_000, store.capabilities.max_value_bytes // 16))
        contents = {f"key-{number}": bytes(make_value(number, size - number)) for number in range(6)}
        for step in range(60):
            key = random.choice(list(contents))
            deadline_s = random.choice([0.0, 0.0001, 0.001, 0.01, DEADLINE_S])
            if random.random() < 0.5:
                job = store.put([PutOp(key, (memoryview(contents[key]),))], deadline_s)
                assert job.result()[0].code in _ENDINGS, f"step {step}"
            else:
                target = memoryview(bytearray(size))
                job = store.get([GetOp(key, (target,))], deadline_s)
                result = job.result()[0]
                assert result.code in _ENDINGS, f"step {step}"
                if result.code is ResultCode.OK:
                    assert bytes(target[: result.nbytes]) == contents[key], f"step {step}"
            assert job.wait_settled(DEADLINE_S)
            if random.random() < 0.3:
                assert result_codes(store.delete([key], DEADLINE_S).result())[0] in (ResultCode.OK, ResultCode.MISS)
        for key, content in contents.items():
            result, found = get_one(store, key, size)
            assert (result.code, found) in [(ResultCode.OK, content), (ResultCode.MISS, b"")], key
            assert put_one(store, key, memoryview(content)).code in (ResultCode.OK, ResultCode.EXISTS)
            assert get_one(store, key, size)[1] == content

    def test_buffers_are_left_alone_once_the_job_is_settled(self, store: KVStore) -> None:
        put_one(store, "key", make_value("key", 50_000))
        targets = [memoryview(bytearray(50_000)) for _ in range(8)]
        for number, target in enumerate(targets):
            job = store.get([GetOp("key", (target,))], 0.0001 if number % 2 else DEADLINE_S)
            assert job.wait_settled(DEADLINE_S)
            target[:] = b"\xa5" * 50_000
        for number in range(8):  # time for whoever would still write
            put_one(store, f"other-{number}", make_value(number, 50_000))
            get_one(store, f"other-{number}", 50_000)
        assert [number for number, target in enumerate(targets) if set(target) != {0xA5}] == []

    def test_of_two_writers_with_different_bytes_one_wins_whole(self, opener: Opener) -> None:
        stores = [opener()]
        if stores[0].capabilities.shared:
            stores.append(opener())
        size = max(1, min(300_000, stores[0].capabilities.max_value_bytes // 16))
        for number in range(10):
            key = f"key-{number}"
            writings = [make_value(f"{key} {writer}", size) for writer in range(2)]
            jobs = [
                stores[writer % len(stores)].put([PutOp(key, (writing,))], DEADLINE_S)
                for writer, writing in enumerate(writings)
            ]
            found = get_one(stores[-1], key, size)  # a reader in between sees one of them, or nothing
            assert found[0].code in (ResultCode.OK, ResultCode.MISS)
            assert found[0].code is ResultCode.MISS or found[1] in [bytes(writing) for writing in writings]
            ends = [job.result()[0].code for job in jobs]
            if stores[0].capabilities.one_winner:
                assert sorted(code.name for code in ends) == ["EXISTS", "OK"]
                winners = [bytes(writings[ends.index(ResultCode.OK)])]
            else:
                assert set(ends) <= {ResultCode.OK, ResultCode.EXISTS}
                assert ResultCode.OK in ends
                winners = [bytes(writing) for writing in writings]
            last = [get_one(store, key, size)[1] for store in stores]
            assert last[0] in winners
            assert last == last[:1] * len(stores)

    def test_a_close_in_the_middle_ends_every_job(self, store: KVStore) -> None:
        content = make_value("key", max(1, min(100_000, store.capabilities.max_value_bytes // 16)))
        jobs: list[Job[Results]] = []
        begun = threading.Barrier(2)

        def work() -> None:
            begun.wait(DEADLINE_S)
            for number in range(200):
                jobs.append(store.put([PutOp(f"key-{number % 8}", (content,))], DEADLINE_S))

        thread = threading.Thread(target=work)
        thread.start()
        begun.wait(DEADLINE_S)
        store.close()
        thread.join(DEADLINE_S)
        assert len(jobs) == 200
        assert {job.result()[0].code for job in jobs} <= {ResultCode.OK, ResultCode.EXISTS, ResultCode.UNAVAILABLE}
        assert all(job.wait_settled(DEADLINE_S) for job in jobs)
