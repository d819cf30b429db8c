"""Tests several stores as one: every key comes from the first tier that has it, and tiers fail independently."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from urllib.parse import quote

import pytest

from kvparams_connectors.arena import Arena
from kvparams_connectors.conformance import Fault, FaultyStore, Floors, Opener, StoreConformance
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode, Results, open_store
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.stores.file.store import FileStore
from kvparams_connectors.stores.guard.store import GuardedStore
from kvparams_connectors.stores.memory.store import MemoryStore
from kvparams_connectors.stores.tiered.staging import StagingArea
from kvparams_connectors.stores.tiered.store import TieredStore
from tests.support.waiting import wait_until

WAIT_S = 20.0
SIZE = 8 << 20
VALUE = 10_000


class Tiers(StoreConformance):
    """The conformance suite, over memory and a file."""

    at_least = Floors(put=0.002, get=0.005)

    first_bytes = SIZE
    write_back = False
    promote = True

    @pytest.fixture
    def opener(self, tmp_path: Path) -> Iterator[Opener]:
        opened: list[KVStore] = []

        def opener() -> KVStore:
            first = MemoryStore(self.first_bytes, unit_bytes=4096)
            last = FileStore(tmp_path / "store", SIZE, unit_bytes=4096)
            tiers = [first, last]
            opened.append(TieredStore(tiers, write_back=self.write_back, promote=self.promote, staging_bytes=SIZE))
            return opened[-1]

        yield opener
        for store in opened:
            store.close()


class TestWriteThrough(Tiers):
    pass


@pytest.mark.slow
class TestSmallFirstTier(Tiers):
    first_bytes = 1 << 20


@pytest.mark.slow
class TestWriteBack(Tiers):
    write_back = True


@pytest.mark.slow
class TestWriteBackSmallFirstTier(Tiers):
    first_bytes = 1 << 20
    write_back = True


def content(key: str) -> bytes:
    return Random(key).randbytes(VALUE)


def put(store: KVStore, *keys: str, deadline_s: float = WAIT_S) -> list[ResultCode]:
    ops = [PutOp(key, (memoryview(content(key)),)) for key in keys]
    return [result.code for result in store.put(ops, deadline_s).result()]


def get(store: KVStore, *keys: str, deadline_s: float = WAIT_S) -> list[ResultCode]:
    """Codes; what is OK is right."""
    targets = [memoryview(bytearray(VALUE + 5)) for _ in keys]
    ops = [GetOp(key, (target[:100], target[100:])) for key, target in zip(keys, targets, strict=True)]
    results = store.get(ops, deadline_s).result()
    for key, target, result in zip(keys, targets, results, strict=True):
        assert result.code is not ResultCode.OK or bytes(target[: result.nbytes]) == content(key)
    return [result.code for result in results]


def delete(store: KVStore, *keys: str) -> list[ResultCode]:
    return [result.code for result in store.delete(keys, WAIT_S).result()]


def exists(store: KVStore, *keys: str, deadline_s: float = WAIT_S) -> Results:
    return store.exists(keys, deadline_s).result()


class Stack:
    """Three memory stores that can fail, as one."""

    def __init__(self, **settings: bool | int) -> None:
        self.faults: dict[tuple[int, str], Fault] = {}
        self.asked: list[tuple[int, str, tuple[str, ...]]] = []
        self.memories = [MemoryStore(4 << 20, unit_bytes=4096) for _ in range(3)]
        self.tiers = [Watched(self, number, memory) for number, memory in enumerate(self.memories)]
        self.store = TieredStore(self.tiers, **{"staging_bytes": SIZE, **settings})  # pyright: ignore[reportArgumentType]

    def fault(self, tier: int, operation: str, fault: Fault) -> None:
        self.faults[tier, operation] = fault

    def calls(self, operation: str) -> list[tuple[int, tuple[str, ...]]]:
        return [(tier, keys) for tier, called, keys in self.asked if called == operation]

    def settle(self) -> None:
        wait_until(lambda: self.store.idle)

    def close(self) -> None:
        for tier in self.tiers:
            tier.gate.set()
        self.store.close()
        for memory in self.memories:
            memory.close()


class Watched(FaultyStore):
    def __init__(self, stack: Stack, number: int, inner: KVStore) -> None:
        super().__init__(inner, lambda operation, _: stack.faults.get((number, operation)))
        self._stack = stack
        self._number = number

    def get_blocking(self, ops: Sequence[GetOp], deadline: float) -> Results:
        self._stack.asked.append((self._number, "get", tuple(op.key for op in ops)))
        return super().get_blocking(ops, deadline)

    def exists_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        self._stack.asked.append((self._number, "exists", tuple(keys)))
        return super().exists_blocking(keys, deadline)

    def delete_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        results = super().delete_blocking(keys, deadline)
        self._stack.asked.append((self._number, "delete", tuple(keys)))
        return results


@pytest.fixture
def stack() -> Iterator[Stack]:
    one = Stack()
    yield one
    one.close()


# ---- get


def test_one_batch_is_composed_from_all_tiers_and_each_is_asked_for_what_is_missing(stack: Stack) -> None:
    for memory, key in zip(stack.memories, "abc", strict=True):
        put(memory, key)
    assert get(stack.store, "c", "a", "nothing", "b") == [ResultCode.OK, ResultCode.OK, ResultCode.MISS, ResultCode.OK]
    assert stack.calls("get") == [(0, ("c", "a", "nothing", "b")), (1, ("c", "nothing", "b")), (2, ("c", "nothing"))]
    assert stack.store.statistics.found == (1, 1, 1)
    assert stack.store.statistics.missed == 1


def test_what_a_slower_tier_gave_is_promoted_into_all_faster_ones(stack: Stack) -> None:
    put(stack.memories[2], "c")
    assert get(stack.store, "c") == [ResultCode.OK]
    stack.settle()
    for memory in stack.memories:
        assert get(memory, "c") == [ResultCode.OK]
    stack.asked.clear()
    assert get(stack.store, "c") == [ResultCode.OK]
    assert stack.calls("get") == [(0, ("c",))]
    assert stack.store.statistics.promoted == 2


def test_nothing_is_promoted_if_that_is_not_wanted() -> None:
    stack = Stack(promote=False)
    put(stack.memories[2], "c")
    assert get(stack.store, "c") == [ResultCode.OK]
    stack.settle()
    assert get(stack.memories[0], "c") == [ResultCode.MISS]
    stack.close()


def test_a_promotion_carries_the_value_and_not_what_the_caller_does_with_its_buffer_afterwards(stack: Stack) -> None:
    put(stack.memories[1], "key")
    stack.fault(0, "put", Fault("late"))
    target = memoryview(bytearray(VALUE))
    job = stack.store.get([GetOp("key", (target,))], WAIT_S)
    assert job.result()[0].code is ResultCode.OK
    assert job.settled()  # it has not waited for the promotion, which is stuck
    target[:] = bytes(VALUE)
    assert not stack.store.idle
    stack.tiers[0].gate.set()
    stack.settle()
    assert get(stack.memories[0], "key") == [ResultCode.OK]


def test_promotion_is_bounded_and_never_in_the_way() -> None:
    stack = Stack(staging_bytes=128 << 10)  # two units: two values
    keys = [f"key-{number}" for number in range(6)]
    put(stack.memories[2], *keys)
    stack.fault(0, "put", Fault("late"))
    before = time.monotonic()
    assert get(stack.store, *keys) == [ResultCode.OK] * 6
    assert time.monotonic() - before < WAIT_S / 2
    assert stack.store.statistics.not_promoted == 4
    stack.tiers[0].gate.set()
    stack.settle()
    assert stack.store.statistics.promoted == 4  # two values, two tiers
    stack.close()


@pytest.mark.parametrize(
    "code", [ResultCode.CORRUPT, ResultCode.TOO_LARGE, ResultCode.UNAVAILABLE, ResultCode.TIMEOUT, ResultCode.DENIED]
)
def test_the_trouble_of_one_tier_falls_through_to_the_next(stack: Stack, code: ResultCode) -> None:
    put(stack.store, "key")
    stack.fault(0, "get", Fault("fail", code=code))
    assert get(stack.store, "key") == [ResultCode.OK]


@pytest.mark.parametrize(
    ("said", "truth"),
    [
        ((ResultCode.UNAVAILABLE, ResultCode.MISS, ResultCode.MISS), ResultCode.UNAVAILABLE),
        ((ResultCode.MISS, ResultCode.CORRUPT, ResultCode.MISS), ResultCode.CORRUPT),
        ((ResultCode.CORRUPT, ResultCode.MISS, ResultCode.TIMEOUT), ResultCode.TIMEOUT),
        ((ResultCode.MISS, ResultCode.TOO_LARGE, ResultCode.UNAVAILABLE), ResultCode.TOO_LARGE),
        ((ResultCode.MISS, ResultCode.MISS, ResultCode.MISS), ResultCode.MISS),
    ],
)
def test_the_best_truth_is_told(stack: Stack, said: tuple[ResultCode, ...], truth: ResultCode) -> None:
    for number, code in enumerate(said):
        stack.fault(number, "get", Fault("fail", code=code))
    assert get(stack.store, "key") == [truth]


def test_a_damaged_copy_makes_room_for_a_good_one(stack: Stack) -> None:
    put(stack.store, "key")
    stack.fault(0, "get", Fault("fail", code=ResultCode.CORRUPT))
    assert get(stack.store, "key") == [ResultCode.OK]
    wait_until(lambda: exists(stack.memories[0], "key")[0].code is ResultCode.MISS)
    stack.faults.clear()
    assert get(stack.store, "key") == [ResultCode.OK]
    stack.settle()
    assert get(stack.memories[0], "key") == [ResultCode.OK]


def test_a_tier_that_hangs_costs_the_deadline_and_not_the_other_tiers_results(stack: Stack) -> None:
    put(stack.memories[0], "a")
    put(stack.memories[2], "c")
    stack.fault(1, "get", Fault("late"))
    before = time.monotonic()
    target = memoryview(bytearray(VALUE))
    job = stack.store.get([GetOp("a", (memoryview(bytearray(VALUE)),)), GetOp("c", (target,))], 0.2)
    assert [result.code for result in job.result()] == [ResultCode.OK, ResultCode.TIMEOUT]
    assert time.monotonic() - before < WAIT_S / 2
    assert not job.settled()  # the buffer is still in use
    target[:] = b"\xa5" * VALUE
    stack.tiers[1].gate.set()
    assert job.wait_settled(WAIT_S)
    assert [result.code for result in job.result()] == [ResultCode.OK, ResultCode.TIMEOUT]


# ---- exists


def test_exists_is_a_union_and_asks_the_other_tiers_at_once_for_what_is_missing(stack: Stack) -> None:
    put(stack.memories[0], "a")
    put(stack.memories[2], "c")
    stack.fault(1, "exists", Fault("late"))
    job = stack.store.exists(["a", "c"], WAIT_S)
    assert job.result() == [Result(ResultCode.OK, VALUE)] * 2  # the second tier hangs, and nobody needs it
    asked = {(0, ("a", "c")), (1, ("c",)), (2, ("c",))}
    wait_until(lambda: asked <= set(stack.calls("exists")))  # the hanging one may write it down after the answer


def test_exists_without_need_asks_the_first_tier_alone(stack: Stack) -> None:
    put(stack.store, "a", "b")
    assert exists(stack.store, "b", "a") == [Result(ResultCode.OK, VALUE)] * 2
    stack.store.close()
    assert stack.calls("exists") == [(0, ("b", "a"))]


def test_exists_does_not_wait_for_a_first_tier_that_hangs(stack: Stack) -> None:
    put(stack.memories[1], "b")
    stack.fault(0, "exists", Fault("late"))
    before = time.monotonic()
    assert exists(stack.store, "b", "x", deadline_s=1.0) == [Result(ResultCode.OK, VALUE), Result(ResultCode.TIMEOUT)]
    assert time.monotonic() - before < WAIT_S / 2
    assert exists(stack.store, "b", deadline_s=WAIT_S / 10) == [Result(ResultCode.OK, VALUE)]


def test_that_a_key_is_nowhere_is_said_only_if_every_tier_says_so(stack: Stack) -> None:
    assert exists(stack.store, "key") == [Result(ResultCode.MISS)]
    stack.fault(1, "exists", Fault("fail", code=ResultCode.UNAVAILABLE))
    assert exists(stack.store, "key") == [Result(ResultCode.UNAVAILABLE)]


def test_a_slower_tier_hears_of_the_head_of_a_sequence_too(stack: Stack) -> None:
    """Or it would evict the pages first that are asked for most."""
    put(stack.memories[2], "head", "tail")
    put(stack.memories[0], "head")
    assert get(stack.store, "head", "tail") == [ResultCode.OK] * 2
    wait_until(lambda: (2, ("head", "tail")) in stack.calls("exists"))


# ---- put


def test_write_through_puts_into_all_and_the_last_decides(stack: Stack) -> None:
    assert put(stack.store, "key") == [ResultCode.OK]
    assert [get(memory, "key") for memory in stack.memories] == [[ResultCode.OK]] * 3
    stack.fault(0, "put", Fault("fail", code=ResultCode.FULL))
    stack.fault(1, "put", Fault("fail", code=ResultCode.UNAVAILABLE))
    assert put(stack.store, "other") == [ResultCode.OK]
    stack.faults.clear()
    stack.fault(2, "put", Fault("fail", code=ResultCode.UNAVAILABLE))
    assert put(stack.store, "third") == [ResultCode.UNAVAILABLE]


def test_write_through_tells_at_the_deadline_what_the_last_tier_said(stack: Stack) -> None:
    stack.fault(0, "put", Fault("late"))
    job = stack.store.put([PutOp("key", (memoryview(content("key")),))], 0.2)
    assert job.result() == [Result(ResultCode.OK, VALUE)]
    assert not job.settled()  # the first tier still reads the buffer


def test_write_back_answers_after_the_first_tier_and_the_others_follow() -> None:
    stack = Stack(write_back=True)
    stack.fault(1, "put", Fault("late"))
    stack.fault(2, "put", Fault("late"))
    source = memoryview(bytearray(content("key")))
    job = stack.store.put([PutOp("key", (source,))], WAIT_S)
    assert job.result() == [Result(ResultCode.OK, VALUE)]
    assert job.settled()
    source[:] = bytes(VALUE)  # it is the caller's again
    assert exists(stack.memories[2], "key") == [Result(ResultCode.MISS)]
    for tier in stack.tiers:
        tier.gate.set()
    stack.settle()
    assert [get(memory, "key") for memory in stack.memories] == [[ResultCode.OK]] * 3
    assert stack.store.statistics.written_back == 2
    stack.close()


def test_write_back_goes_on_without_the_first_tier() -> None:
    stack = Stack(write_back=True)
    stack.fault(0, "put", Fault("fail", code=ResultCode.FULL))
    assert put(stack.store, "key") == [ResultCode.OK]
    assert get(stack.memories[2], "key") == [ResultCode.OK]
    stack.fault(2, "put", Fault("fail", code=ResultCode.UNAVAILABLE))
    assert put(stack.store, "other") == [ResultCode.UNAVAILABLE]
    stack.close()


def test_whoever_writes_back_faster_than_the_tiers_can_take_it_waits_for_them() -> None:
    stack = Stack(write_back=True, staging_bytes=64 << 10)  # one value
    stack.fault(2, "put", Fault("late"))
    assert put(stack.store, "first") == [ResultCode.OK]
    before = time.monotonic()
    assert put(stack.store, "second", deadline_s=0.3) == [ResultCode.OK]  # the first tier has it
    assert time.monotonic() - before >= 0.3
    wait_until(lambda: time.monotonic() - before > 0.5)  # the deadline of the last tier begins a little later
    stack.tiers[2].gate.set()
    stack.settle()
    wait_until(lambda: stack.store.statistics.not_written_back == 1)
    assert get(stack.memories[1], "first", "second") == [ResultCode.OK] * 2
    assert get(stack.memories[2], "first", "second") == [ResultCode.OK, ResultCode.MISS]
    stack.close()


def test_what_the_first_tier_has_taken_too_late_to_go_on_is_counted() -> None:
    stack = Stack(write_back=True, staging_bytes=64 << 10)  # one value
    stack.fault(2, "put", Fault("late"))
    assert put(stack.store, "first") == [ResultCode.OK]
    stack.fault(0, "put", Fault("late"))
    assert put(stack.store, "second", deadline_s=0.05) == [ResultCode.TIMEOUT]
    assert stack.store.statistics.not_written_back == 0
    stack.tiers[0].gate.set()
    wait_until(lambda: stack.store.statistics.not_written_back == 2)
    stack.close()


def test_closing_flushes_what_is_being_written_back(tmp_path: Path) -> None:
    keys = [f"key-{number}" for number in range(50)]
    last = FileStore(tmp_path / "store", SIZE, unit_bytes=4096)
    store = TieredStore([MemoryStore(SIZE, unit_bytes=4096), last], write_back=True)
    for key in keys:
        assert put(store, key) == [ResultCode.OK]
    store.close()
    again = FileStore(tmp_path / "store")
    assert get(again, *keys) == [ResultCode.OK] * 50
    again.close()


def test_closing_gives_up_on_a_stuck_tier_in_time(caplog: pytest.LogCaptureFixture) -> None:
    stack = Stack(write_back=True)
    stack.fault(1, "put", Fault("late"))
    put(stack.store, "key")
    before = time.monotonic()
    thread = threading.Thread(target=stack.store.close)
    thread.start()
    wait_until(lambda: get(stack.store, "key") == [ResultCode.UNAVAILABLE])  # closed at once for everybody else
    stack.tiers[1].gate.set()
    thread.join(WAIT_S)
    assert time.monotonic() - before < WAIT_S
    assert "stuck" not in caplog.text
    stack.close()


def test_who_was_first_in_the_last_tier_has_written_the_value(stack: Stack) -> None:
    """Two engines may compute the same page with other last bits: no faster tier keeps what lost."""
    stack.memories[2].put([PutOp("key", (memoryview(b"theirs"),))], WAIT_S).result()
    assert put(stack.store, "key", "new") == [ResultCode.EXISTS, ResultCode.OK]
    assert exists(stack.memories[0], "key", "new") == [Result(ResultCode.MISS), Result(ResultCode.OK, VALUE)]
    target = memoryview(bytearray(VALUE))
    assert stack.store.get([GetOp("key", (target,))], WAIT_S).result() == [Result(ResultCode.OK, 6)]
    assert target[:6] == b"theirs"


# ---- delete


def test_delete_is_everywhere(stack: Stack) -> None:
    put(stack.store, "key")
    put(stack.memories[1], "middle")
    assert delete(stack.store, "key", "middle", "nothing") == [ResultCode.OK, ResultCode.OK, ResultCode.MISS]
    assert [exists(memory, "key", "middle") for memory in stack.memories] == [[Result(ResultCode.MISS)] * 2] * 3
    put(stack.store, "key")
    stack.fault(1, "delete", Fault("fail", code=ResultCode.UNAVAILABLE))
    assert delete(stack.store, "key") == [ResultCode.UNAVAILABLE]  # it may be there


@pytest.mark.parametrize("write_back", [False, True], ids=["promotion", "write-back"])
def test_a_value_on_its_way_does_not_outlive_its_delete(*, write_back: bool) -> None:
    stack = Stack(write_back=write_back)
    slow = 2 if write_back else 0
    stack.fault(slow, "put", Fault("late"))
    if write_back:
        put(stack.store, "key")
    else:
        put(stack.memories[2], "key")
        assert get(stack.store, "key") == [ResultCode.OK]
    job = stack.store.delete(["key"], WAIT_S)
    assert not job.done()
    stack.tiers[slow].gate.set()
    assert job.result()[0].code is ResultCode.OK
    assert [exists(memory, "key") for memory in stack.memories] == [[Result(ResultCode.MISS)]] * 3
    stack.close()


@pytest.mark.parametrize("careless", [False, True], ids=["as-it-is", "without-looking"])
def test_what_was_read_before_a_delete_is_not_carried_anywhere_after_it(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, *, careless: bool
) -> None:
    if careless:  # the control
        take = StagingArea.stage
        monkeypatch.setattr(StagingArea, "stage", lambda self, ops, _: take(self, ops, None))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    put(stack.memories[1], "key")
    stack.fault(1, "get", Fault("late"))
    reading = stack.store.get([GetOp("key", (memoryview(bytearray(VALUE)),))], WAIT_S)
    wait_until(lambda: (1, ("key",)) in stack.calls("get"))
    deleting = stack.store.delete(["key"], WAIT_S)  # the first tier deletes now, the second behind the get
    wait_until(lambda: (0, ("key",)) in stack.calls("delete"))
    stack.tiers[1].gate.set()
    assert reading.result()[0].code is ResultCode.OK
    assert deleting.result()[0].code is ResultCode.OK
    stack.settle()
    assert exists(stack.store, "key") == [Result(ResultCode.OK, VALUE) if careless else Result(ResultCode.MISS)]


# ---- the rest


def test_quarantine_reaches_the_tiers() -> None:
    guarded = GuardedStore(MemoryStore(SIZE))
    store = TieredStore([MemoryStore(SIZE), guarded], promote=False)
    put(guarded, "key")
    assert get(store, "key") == [ResultCode.OK]
    store.quarantine(["key"])
    assert get(store, "key") == [ResultCode.MISS]
    store.register(Arena(1 << 16, 1 << 12))
    store.close()


def test_a_dead_tier_behind_its_guard_costs_nothing_any_more() -> None:
    hanging = FaultyStore(MemoryStore(SIZE), lambda _operation, _key: Fault("late"))
    store = TieredStore([MemoryStore(SIZE), GuardedStore(hanging)])
    for number in range(3):
        exists(store, f"key-{number}", deadline_s=0.1)
    before = time.monotonic()
    for number in range(100):
        assert exists(store, f"key-{number}") == [Result(ResultCode.UNAVAILABLE)]
    assert time.monotonic() - before < WAIT_S / 4
    hanging.gate.set()
    store.close()


def test_capabilities_are_the_last_tiers(tmp_path: Path) -> None:
    file = FileStore(tmp_path / "store", SIZE)
    store = TieredStore([MemoryStore(1 << 20), file])
    assert store.capabilities.max_value_bytes == file.capabilities.max_value_bytes
    assert store.capabilities.persistent
    assert store.capabilities.shared
    assert store.capabilities.private_copies
    assert put(store, "small") == [ResultCode.OK]
    store.close()


@pytest.mark.parametrize("layer", ["bare", "guarded", "tiered"])
def test_a_buffer_that_was_released_is_invalid_and_the_rest_of_the_batch_is_not(layer: str) -> None:
    store: KVStore = MemoryStore(SIZE)
    if layer == "guarded":
        store = GuardedStore(store)
    elif layer == "tiered":
        store = TieredStore([store, MemoryStore(SIZE)])
    released = memoryview(bytearray(10))
    released.release()
    ops = [PutOp("a", (released,)), PutOp("b", (memoryview(b"b"),))]
    assert [result.code for result in store.put(ops, WAIT_S).result()] == [ResultCode.INVALID, ResultCode.OK]
    reading = [GetOp("b", (released,)), GetOp("b", (memoryview(bytearray(1)),))]
    assert [result.code for result in store.get(reading, WAIT_S).result()] == [ResultCode.INVALID, ResultCode.OK]
    before = time.monotonic()
    store.close()
    assert time.monotonic() - before < WAIT_S / 4


# ---- URLs


def url(**settings: str) -> str:
    return "tiered:?" + "&".join(f"{name}={quote(text, safe='')}" for name, text in settings.items())


def test_a_tiered_store_is_opened_by_url(tmp_path: Path) -> None:
    file = f"file://{tmp_path}/a%20store?size=1MiB"
    store = open_store(url(l1="memory:?size=1MiB", l2=file, write="back"))
    assert put(store, "key") == [ResultCode.OK]
    assert get(store, "key") == [ResultCode.OK]
    store.close()
    again = open_store(url(l1="memory:?size=64KiB", l2=file))
    assert get(again, "key") == [ResultCode.OK]
    again.close()


def test_the_example_in_the_documentation_is_a_url() -> None:
    with pytest.raises(StoreError, match=r"l3.*same"):
        open_store("tiered:?l1=memory%3A%3Fsize%3D1MiB&l2=file%3A%2F%2F%2Fdev%2Fshm%2Fx&l3=memory%3A")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "no tier"),
        ({"l1": "memory:"}, "l1, l2 and so on|has l1"),
        ({"l1": "memory:", "l3": "file:///tmp/x"}, "has l1, l3"),
        ({"l2": "memory:", "l3": "file:///tmp/x"}, "has l2, l3"),
        ({"l1": "memory:?size=1MiB", "l2": "memory:?size=2MiB"}, "same"),
        ({"l1": "memory:", "l2": "tiered:?l1=memory%3A"}, "itself a tiered store"),
        ({"l1": "memory:", "l2": "file:///tmp/x", "write": "around"}, "through, back"),
        ({"l1": "memory:", "l2": "file:///tmp/x", "promote": "no"}, "promote: is not known here"),
        ({"l1": "memory:", "l2": "file:///tmp/x", "l5": "file:///tmp/y"}, "l5: is not known here"),
        ({"l1": "memory:?sise=1MiB", "l2": "file:///tmp/x"}, "sise: is not known here; did you mean size"),
        ({"l1": "memory:?size=1MiB", "l2": "file:///nowhere/at/all"}, "nowhere"),
    ],
)
def test_a_url_that_cannot_be_meant_is_refused_in_words(settings: dict[str, str], words: str) -> None:
    before = threading.active_count()
    with pytest.raises(StoreError, match=words):
        open_store(url(**settings))
    assert threading.active_count() == before  # what was opened is closed again


def test_a_place_is_refused() -> None:
    with pytest.raises(StoreError, match="host or path"):
        open_store("tiered://host?l1=memory%3A&l2=file%3A%2F%2F%2Ftmp%2Fx")


def test_tiers_are_two_to_four_and_not_the_same() -> None:
    memory = MemoryStore(1 << 20)
    for tiers in ([memory], [memory, memory], [memory] * 5):
        with pytest.raises(StoreError):
            TieredStore(tiers)
    memory.close()
