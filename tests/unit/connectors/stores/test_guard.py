"""Tests that a failing store costs its deadline a few times and then nothing, and that damaged values are skipped."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.routing.breaker import BreakerLimits, BreakerState
from kvparams_connectors.conformance import Fault, FaultyStore, Floors, Opener, StoreConformance
from kvparams_connectors.deadline_timer import DeadlineTimer
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import BlockingStore, Capabilities, GetOp, KVStore, PutOp, Result, ResultCode, Results
from kvparams_connectors.stores.guard.health import InFlightOperation, StoreHealth
from kvparams_connectors.stores.guard.quarantine import Quarantine
from kvparams_connectors.stores.guard.store import GuardedStore, GuardLimits, open_guarded
from kvparams_connectors.stores.guard.transfer_rate import TransferRate
from kvparams_connectors.stores.memory.store import MemoryStore
from tests.support.waiting import wait_until

WAIT_S = 20.0
SIZE = 8 << 20
QUICK = BreakerLimits(consecutive=3, window=20, failures=10, open_s=0.05, longest_s=0.2)
LIMITS = GuardLimits(breaker=QUICK, fair_s=0.01, probe_s=0.1)


class TestGuardedStore(StoreConformance):
    at_least = Floors(put=0.003, get=0.02)

    @pytest.fixture
    def opener(self) -> Iterator[Opener]:
        opened: list[KVStore] = []

        def opener() -> KVStore:
            opened.append(GuardedStore(MemoryStore(SIZE, unit_bytes=4096)))
            return opened[-1]

        yield opener
        for store in opened:
            store.close()


class Broken:
    """A memory store that can be made to fail, behind a guard."""

    def __init__(self, limits: GuardLimits = LIMITS) -> None:
        self.fault: Fault | None = None
        self.asked: list[str] = []
        self.memory = MemoryStore(1 << 20, unit_bytes=4096)
        self.faulty = FaultyStore(self.memory, self.judge, threads=2)
        self.store = GuardedStore(self.faulty, limits, name="broken")

    def judge(self, operation: str, key: str) -> Fault | None:
        self.asked.append(f"{operation} {key}")
        return self.fault

    def get(self, key: str, deadline_s: float = WAIT_S) -> Result:
        return self.store.get([GetOp(key, (memoryview(bytearray(4096)),))], deadline_s).result()[0]

    def put(self, key: str, content: bytes = b"content") -> Result:
        return self.store.put([PutOp(key, (memoryview(content),))], WAIT_S).result()[0]

    def wait_for(self, *states: BreakerState) -> None:
        wait_until(lambda: self.store.statistics.state in states)


@pytest.fixture
def broken() -> Iterator[Broken]:
    one = Broken()
    yield one
    one.faulty.gate.set()
    one.store.close()
    one.memory.close()


def test_a_hanging_store_costs_its_deadline_three_times_and_then_nothing(broken: Broken) -> None:
    assert broken.put("key").code is ResultCode.OK
    broken.fault = Fault("late")
    for _ in range(3):
        before = time.monotonic()
        assert broken.get("key", 0.1).code is ResultCode.TIMEOUT
        assert 0.1 <= time.monotonic() - before < 2
    broken.wait_for(BreakerState.OPEN, BreakerState.HALF_OPEN)
    before = time.monotonic()
    for _ in range(200):
        assert broken.get("key").code is ResultCode.UNAVAILABLE
    assert time.monotonic() - before < 1
    assert broken.store.statistics.refused == 200
    assert broken.store.statistics.in_flight == 3  # the store has not let go of their buffers


def test_without_a_guard_every_operation_costs_the_deadline(broken: Broken) -> None:
    """The control."""
    broken.fault = Fault("late")
    before = time.monotonic()
    for _ in range(6):
        assert broken.faulty.exists(["key"], 0.1).result()[0].code is ResultCode.TIMEOUT
    assert time.monotonic() - before >= 0.6


def test_a_time_out_gives_no_buffer_back_early(broken: Broken) -> None:
    broken.put("key")
    broken.fault = Fault("late")
    job = broken.store.get([GetOp("key", (memoryview(bytearray(4096)),))], 0.05)
    assert job.result()[0].code is ResultCode.TIMEOUT
    assert not job.settled()
    broken.faulty.gate.set()
    assert job.wait_settled(WAIT_S)


def test_a_store_that_is_back_is_noticed_without_any_operation(broken: Broken) -> None:
    broken.put("key")
    broken.fault = Fault("fail", code=ResultCode.UNAVAILABLE)
    for _ in range(3):
        assert broken.get("key").code is ResultCode.UNAVAILABLE
    assert broken.store.statistics.opened >= 1
    broken.asked.clear()
    wait_until(lambda: broken.store.statistics.probes >= 2)  # it is asked again and again
    assert set(broken.asked) == {"exists kvparams-probe"}
    broken.fault = None
    broken.wait_for(BreakerState.HALF_OPEN)
    wait_until(lambda: broken.get("key").code is ResultCode.OK)
    broken.wait_for(BreakerState.CLOSED)
    assert broken.get("key").code is ResultCode.OK


def test_one_operation_is_tried_when_only_the_probe_goes_well(broken: Broken) -> None:
    """A store may answer lookups and nothing else."""
    broken.put("key")
    failing = Fault("fail", code=ResultCode.UNAVAILABLE)
    half = FaultyStore(broken.memory, lambda operation, _: failing if operation == "get" else None)
    store = GuardedStore(half, LIMITS)
    target = memoryview(bytearray(4096))

    def failures() -> int:
        assert store.get([GetOp("key", (target,))], WAIT_S).result()[0].code is ResultCode.UNAVAILABLE
        return store.statistics.failed

    wait_until(lambda: failures() == 3)
    wait_until(lambda: failures() == 4)  # after a good probe
    assert store.statistics.opened == 2
    assert store.statistics.state is BreakerState.OPEN  # one was enough this time
    store.close()


def test_failures_of_keys_are_no_failures_of_the_store(broken: Broken) -> None:
    """The control: misses, full, refused and damaged values never open the breaker."""
    for code in (
        ResultCode.MISS,
        ResultCode.FULL,
        ResultCode.DENIED,
        ResultCode.CORRUPT,
        ResultCode.TOO_LARGE,
        ResultCode.INVALID,
    ):
        broken.fault = Fault("fail", code=code)
        for number in range(12):
            broken.get(f"{code.value}-{number}")
    assert broken.store.statistics.state is BreakerState.CLOSED
    assert broken.store.statistics.failed == 0


def test_a_deadline_that_was_too_short_is_not_the_stores_fault(broken: Broken) -> None:
    for _ in range(20):
        broken.get("key", 0.0)
    assert broken.store.statistics.state is BreakerState.CLOSED
    assert broken.get("key").code is ResultCode.MISS


def test_only_so_much_is_in_flight() -> None:
    broken = Broken(GuardLimits(breaker=QUICK, in_flight=4))
    broken.fault = Fault("late")
    jobs = [broken.store.exists(["key"], WAIT_S) for _ in range(10)]
    assert [job.result()[0].code for job in jobs[4:]] == [ResultCode.UNAVAILABLE] * 6
    assert broken.store.statistics.in_flight == 4
    broken.faulty.gate.set()
    assert [job.result()[0].code for job in jobs[:4]] == [ResultCode.MISS] * 4
    wait_until(lambda: broken.store.statistics.in_flight == 0)
    broken.store.close()
    broken.memory.close()


def test_no_operation_gets_more_than_the_guards_deadline() -> None:
    broken = Broken(GuardLimits(deadline_s=0.05))
    broken.fault = Fault("late")
    before = time.monotonic()
    assert broken.get("key", WAIT_S).code is ResultCode.TIMEOUT
    assert time.monotonic() - before < WAIT_S / 2
    broken.faulty.gate.set()
    broken.store.close()
    broken.memory.close()


class Raising(BlockingStore):
    """A store that breaks the contract: it raises where it should answer."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(persistent=False, shared=False, max_value_bytes=1 << 20)

    def put_blocking(self, ops: Sequence[PutOp], deadline: float) -> Results:
        raise NotImplementedError

    def get_blocking(self, ops: Sequence[GetOp], deadline: float) -> Results:
        raise NotImplementedError

    def exists_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        raise NotImplementedError

    def delete_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        raise NotImplementedError

    def release(self) -> None:
        """Nothing is held."""

    def exists(self, keys: Sequence[str], deadline_s: float = 0.0) -> Job[Results]:
        raise RuntimeError("broken")


def test_a_store_that_raises_is_a_store_that_fails() -> None:
    store = GuardedStore(Raising("raising"), LIMITS)
    for _ in range(3):
        assert store.exists(["a", "b"], WAIT_S).result() == [Result(ResultCode.INTERNAL)] * 2
    assert store.exists(["a", "b"], WAIT_S).result() == [Result(ResultCode.UNAVAILABLE)] * 2
    wait_until(lambda: store.statistics.probes >= 2)  # the background survives it as well
    store.close()


# ---- quarantine


def test_a_damaged_value_is_a_miss_until_it_is_stored_anew(broken: Broken) -> None:
    broken.put("bad", b"damaged")
    broken.put("good")
    assert broken.get("bad").code is ResultCode.OK  # the control
    broken.store.quarantine(["bad"])
    assert broken.get("bad").code is ResultCode.MISS
    found = broken.store.exists(["good", "bad", "good"], WAIT_S).result()
    assert found == [Result(ResultCode.OK, 7), Result(ResultCode.MISS), Result(ResultCode.OK, 7)]
    broken.asked.clear()
    broken.get("bad")
    assert broken.asked == []  # it is not even asked for
    assert broken.put("bad").code is ResultCode.EXISTS  # the damaged one is still there
    assert broken.get("bad").code is ResultCode.MISS
    assert broken.store.delete(["bad"], WAIT_S).result()[0].code is ResultCode.OK
    assert broken.put("bad", b"whole").code is ResultCode.OK
    assert broken.get("bad") == Result(ResultCode.OK, 5)


def test_who_hears_that_a_put_has_ended_finds_what_it_has_put(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the guard takes to note it: it does so first."""
    noted = GuardedStore._settled  # pyright: ignore[reportPrivateUsage]
    begins, may_go_on = threading.Event(), threading.Event()

    def settled(self: GuardedStore, flight: InFlightOperation, results: Results | None) -> None:
        begins.set()
        assert may_go_on.wait(WAIT_S)
        noted(self, flight, results)

    broken.store.quarantine(["bad"])
    monkeypatch.setattr(GuardedStore, "_settled", settled)
    job = broken.store.put([PutOp("bad", (memoryview(b"content"),))], WAIT_S)
    assert begins.wait(WAIT_S)
    assert not job.done()
    may_go_on.set()
    assert job.result()[0].code is ResultCode.OK
    assert broken.get("bad") == Result(ResultCode.OK, 7)


def test_what_the_store_itself_calls_damaged_goes_into_quarantine(broken: Broken) -> None:
    broken.fault = Fault("fail", code=ResultCode.CORRUPT)
    assert broken.get("bad").code is ResultCode.CORRUPT
    assert broken.get("bad").code is ResultCode.MISS
    assert broken.store.statistics.corrupt == 1
    assert broken.store.statistics.quarantined == 1


def test_a_quarantine_is_bounded_in_number_and_time() -> None:
    held = Quarantine(3, 10.0)
    held.add(["a", "b", "c", "d"], 0.0)
    assert [held.holds(key, 1.0) for key in "abcd"] == [False, True, True, True]
    held.add(["b"], 5.0)
    assert [held.holds(key, 11.0) for key in "abcd"] == [False, True, False, False]
    held.lift("b")
    assert not held.holds("b", 11.0)
    assert len(held) == 0


# ---- rates


@given(st.floats(1e-5, 1e-2), st.floats(1e8, 1e10))
def test_latency_and_bandwidth_are_told_apart(latency: float, bandwidth: float) -> None:
    rate = TransferRate()
    for number in range(100):
        nbytes = (1 + number % 7) << 20
        rate.record(nbytes, latency + nbytes / bandwidth)
    for nbytes in (1 << 18, 3 << 20, 32 << 20):
        expected = latency + nbytes / bandwidth
        assert rate.expected_s(nbytes) == pytest.approx(expected, rel=0.05)


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0, 100)), min_size=1, max_size=50))
def test_an_expectation_is_never_negative_and_grows_with_the_bytes(seen: list[tuple[int, float]]) -> None:
    rate = TransferRate()
    assert rate.expected_s(1) is None
    assert rate.bytes_per_s is None
    for nbytes, seconds in seen:
        rate.record(nbytes, seconds)
    few, many = rate.expected_s(1000), rate.expected_s(1_000_000)
    assert few is not None
    assert many is not None
    assert 0 <= few <= many


def test_a_store_that_became_slow_is_expected_to_be_slow(broken: Broken) -> None:
    rate = TransferRate()
    for _ in range(1000):
        rate.record(1 << 20, 0.001)
    for _ in range(100):
        rate.record(1 << 20, 0.1)
    assert rate.expected_s(1 << 20) == pytest.approx(0.1, rel=0.1)
    assert broken.store.statistics.get_bytes_per_s is None
    broken.put("key", bytes(4096))
    broken.get("key")
    found = broken.store.statistics
    assert found.get_bytes_per_s is not None
    assert found.get_bytes_per_s > 4096 / WAIT_S
    assert found.put_bytes_per_s is not None


@pytest.mark.parametrize(("scheme", "guarded"), [("file", True), ("memory", False), ("tiered", False)])
def test_an_engine_opens_what_can_fail_with_a_guard(scheme: str, guarded: bool, tmp_path: Path) -> None:
    file = f"file://{tmp_path}/kv?size=8MiB"
    tiers = f"tiered:?l1={quote('memory:?size=1MiB', safe='')}&l2={quote(file, safe='')}"
    store = open_guarded({"file": file, "memory": "memory:?size=1MiB", "tiered": tiers}[scheme])
    assert isinstance(store, GuardedStore) is guarded
    store.close()


# ---- decisions alone


def test_a_time_out_is_counted_once_and_what_began_before_says_nothing() -> None:
    health = StoreHealth(
        GuardLimits(breaker=BreakerLimits(consecutive=2, window=4, failures=4, open_s=1.0, longest_s=4.0))
    )
    flights = [health.admit("get", ["a"], 1, 1.0, 0.0) for _ in range(3)]
    assert health.next_time() == 1.0
    assert health.expire_deadlines(1.0)
    assert health.admit("get", ["a"], 1, 1.0, 1.0) is None
    assert not health.begin_probe(1.5)
    assert health.begin_probe(2.0)
    assert health.admit("get", ["a"], 1, 1.0, 2.0) is None  # the probe is the trial
    for flight in flights:
        assert flight is not None
        assert health.operation_settled(flight, [Result(ResultCode.OK, 1)], 2.1) is None
    health.record_probe(2.2, good=False)
    assert health.next_time() == pytest.approx(4.2)  # twice as long
    assert health.begin_probe(4.2)
    health.record_probe(4.3, good=True)
    trial = health.admit("get", ["a"], 1, 1.0, 4.4)
    assert trial is not None
    assert health.admit("get", ["a"], 1, 1.0, 4.4) is None  # one at a time
    assert health.operation_settled(trial, [Result(ResultCode.OK, 1)], 4.5) is False
    assert health.statistics().timed_out == 3
    assert health.statistics().state is BreakerState.CLOSED


def test_limits_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 0"):
        GuardLimits(in_flight=0)
    with pytest.raises(ValueError, match="more than 0"):
        GuardLimits(deadline_s=0.0)


def test_an_alarm_rings_at_the_earliest_time_and_outlives_what_it_calls() -> None:
    rung: list[float] = []
    done = threading.Event()

    def ring(now: float) -> float | None:
        rung.append(now)
        if len(rung) == 1:
            return now + 0.01
        if len(rung) == 2:
            raise RuntimeError("broken")
        done.set()
        return None

    alarm = DeadlineTimer("test", ring)
    start = time.monotonic()
    alarm.schedule(start + WAIT_S)
    alarm.schedule(start + 0.01)
    assert done.wait(WAIT_S)
    assert rung[0] >= start + 0.01
    assert rung[1] >= rung[0] + 0.01
    alarm.close()
    alarm.schedule(0.0)
    assert len(rung) == 3
