"""Tests a tiered store whose tiers fail at random against an oracle: no wrong byte, no lost result, no hang."""

import time
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvparams_connectors.conformance import Fault, FaultyStore
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import GetOp, PutOp, ResultCode, Results
from kvparams_connectors.stores.memory.store import MemoryStore
from kvparams_connectors.stores.tiered.staging import StagingArea
from kvparams_connectors.stores.tiered.store import TieredStore
from kvparams_connectors.stores.tiered.value_origins import ValueOrigins
from tests.support.waiting import wait_until

WAIT_S = 60.0
SHORT_S = 0.1
SLACK_S = 10.0
"""For a machine that has other things to do."""
TIERS = st.integers(0, 2)
OPERATIONS = st.sampled_from(["put", "get", "exists", "delete"])
CODES = st.sampled_from(
    [
        ResultCode.MISS,
        ResultCode.CORRUPT,
        ResultCode.UNAVAILABLE,
        ResultCode.TIMEOUT,
        ResultCode.TOO_LARGE,
        ResultCode.FULL,
        ResultCode.DENIED,
        ResultCode.INTERNAL,
    ]
)
SIZES = {"a": 0, "b": 100, "c": 5_000, "d": 65_536, "e": 70_000, "f": 200_000}
KEYS = st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=4, unique=True)


def content(key: str, life: int) -> bytes:
    return Random(f"{key} {life}").randbytes(SIZES[key])


def damaged(good: bytes) -> bytes:
    return bytes([good[0] ^ 1]) + good[1:]


class TieredMachine(RuleBasedStateMachine):
    """The oracle knows for each key in which life it is (a delete that everybody confirmed begins a new one, with other
    bytes), whether a value of this life was ever put, and whether it is there for sure; and whether a copy of this life
    was ever damaged, so that a get may give damaged bytes, which their reader discards."""

    write_back = False

    def __init__(self) -> None:
        super().__init__()
        self.faults: dict[tuple[int, str], Fault] = {}
        self.memories = [MemoryStore(2 << 20, unit_bytes=4096) for _ in range(3)]
        self.tiers = [
            FaultyStore(memory, lambda operation, _, number=number: self.faults.get((number, operation)), threads=2)
            for number, memory in enumerate(self.memories)
        ]
        self.store = TieredStore(self.tiers, write_back=self.write_back, staging_bytes=256 << 10)
        self.life = dict.fromkeys(SIZES, 0)
        self.put_once: set[str] = set()
        self.sure: set[str] = set()
        self.spoilt: set[str] = set()
        self.running: list[tuple[str, frozenset[str], Job[Results]]] = []

    def teardown(self) -> None:
        self.repair()
        self.get(sorted(SIZES))
        self.exists(sorted(SIZES))
        wait_until(lambda: self.store.idle)  # no staging memory is lost
        before = time.monotonic()
        self.store.close()
        assert time.monotonic() - before < SLACK_S
        for memory in self.memories:
            memory.close()

    # ---- the tiers

    @rule(tier=TIERS, operation=OPERATIONS, code=CODES)
    def fail(self, tier: int, operation: str, code: ResultCode) -> None:
        self.faults[tier, operation] = Fault("fail", code=code)

    @rule(tier=TIERS, operation=OPERATIONS)
    def hang(self, tier: int, operation: str) -> None:
        self.tiers[tier].gate.clear()
        self.faults[tier, operation] = Fault("late")

    @rule()
    def repair(self) -> None:
        """Everything works again, and what hung goes on."""
        self.faults.clear()
        for tier in self.tiers:
            tier.gate.set()
        for _, _, job in self.running:
            assert job.wait_settled(WAIT_S)
        self.running.clear()

    @precondition(lambda self: cast("TieredMachine", self).calm)
    @rule(tier=TIERS, key=st.sampled_from(sorted(SIZES)[1:]))
    def damage(self, tier: int, key: str) -> None:
        """One tier's copy is another one from now on."""
        wait_until(lambda: self.store.idle)
        if self.copies(key)[tier] is not None:
            memory = self.memories[tier]
            memory.delete([key]).result()
            op = PutOp(key, (memoryview(damaged(content(key, self.life[key]))),))
            assert memory.put([op]).result()[0].code is ResultCode.OK
            self.spoilt.add(key)

    # ---- the store

    @rule(keys=KEYS)
    def put(self, keys: list[str]) -> None:
        ops = [PutOp(key, (memoryview(content(key, self.life[key])),)) for key in keys]
        self.put_once |= set(keys)
        for key, code in zip(keys, self.end("put", keys, self.store.put(ops, self.deadline)), strict=True):
            if code in (ResultCode.OK, ResultCode.EXISTS) and not self.busy("delete", key):
                self.sure.add(key)

    @rule(keys=KEYS)
    def get(self, keys: list[str]) -> None:
        calm = self.calm
        targets = [memoryview(bytearray(SIZES[key] + 1)) for key in keys]
        ops = [GetOp(key, (target[:50], target[50:])) for key, target in zip(keys, targets, strict=True)]
        job = self.store.get(ops, self.deadline)
        refused: list[str] = []
        for key, code, target in zip(keys, self.end("get", keys, job), targets, strict=True):
            if code is ResultCode.OK:
                assert key in self.put_once, f"{key} was deleted and came back"
                found, wanted = bytes(target[: SIZES[key]]), content(key, self.life[key])
                if key in self.spoilt and found == damaged(wanted):
                    refused.append(key)
                else:
                    assert found == wanted, f"wrong bytes of {key}"
            elif calm:
                assert key not in self.sure, f"{key} is lost: {code}"
                assert code is ResultCode.MISS
        if refused:
            self.discard(refused, calm=calm)

    def discard(self, keys: list[str], *, calm: bool) -> None:
        """A get has given damaged bytes. If nothing fails, they go, and no good copy does."""
        self.sure -= set(keys)
        if not calm:
            self.end("delete", keys, self.store.discard(keys, self.deadline))
            return
        before = {key: self.copies(key) for key in keys}
        assert set(self.end("delete", keys, self.store.discard(keys, self.deadline))) <= {
            ResultCode.OK,
            ResultCode.MISS,
        }
        wait_until(lambda: self.store.idle)
        for key in keys:
            good = content(key, self.life[key])
            kept = [number for number, copy in enumerate(before[key]) if copy == good]
            left = self.copies(key)
            assert all(left[number] == good for number in kept), f"a good copy of {key} is lost"
            assert left.count(damaged(good)) < max(1, before[key].count(damaged(good))), f"{key} stays damaged"
            if kept:
                self.sure.add(key)

    @rule(keys=KEYS)
    def exists(self, keys: list[str]) -> None:
        calm = self.calm
        for key, code in zip(keys, self.end("exists", keys, self.store.exists(keys, self.deadline)), strict=True):
            if code is ResultCode.OK:
                assert key in self.put_once, f"{key} was deleted and came back"
            elif calm:
                assert key not in self.sure, f"{key} is lost: {code}"
                assert code is ResultCode.MISS

    @rule(keys=KEYS)
    def delete(self, keys: list[str]) -> None:
        # A put that has not settled may come after the delete.
        writing = {key for key in keys if self.busy("put", key)}
        self.sure -= set(keys)
        lying = any(fault.code is ResultCode.MISS for (_, called), fault in self.faults.items() if called == "delete")
        for key, code in zip(keys, self.end("delete", keys, self.store.delete(keys, self.deadline)), strict=True):
            if code in (ResultCode.OK, ResultCode.MISS) and key not in writing and not lying:
                self.life[key] += 1
                self.put_once.discard(key)
                self.spoilt.discard(key)

    @invariant()
    def is_bounded(self) -> None:
        assert len(self.running) <= 50

    # ---- the oracle

    @property
    def calm(self) -> bool:
        """Nothing fails, nothing hangs: then every answer must be the right one."""
        return not self.faults and not self.running

    @property
    def deadline(self) -> float:
        hanging = self.running or any(fault.kind == "late" for fault in self.faults.values())
        return SHORT_S if hanging else WAIT_S

    def copies(self, key: str) -> list[bytes | None]:
        """What each tier has."""
        found: list[bytes | None] = []
        for memory in self.memories:
            target = memoryview(bytearray(SIZES[key] + 1))
            [result] = memory.get([GetOp(key, (target,))]).result()
            found.append(bytes(target[: result.nbytes]) if result.code is ResultCode.OK else None)
        return found

    def busy(self, operation: str, key: str) -> bool:
        self.running = [entry for entry in self.running if not entry[2].settled()]
        return any(called == operation and key in keys for called, keys, _ in self.running)

    def end(self, operation: str, keys: Iterable[str], job: Job[Results]) -> list[ResultCode]:
        """The codes, in time; a job that still touches buffers is remembered."""
        wanted = list(keys)
        results = job.result()
        assert time.monotonic() < job.deadline + SLACK_S
        assert len(results) == len(wanted)
        for key, result in zip(wanted, results, strict=True):
            if operation != "delete" and result.code is ResultCode.OK:
                assert result.nbytes == SIZES[key]
        if not job.settled():
            self.running.append((operation, frozenset(wanted), job))
        return [result.code for result in results]


class WriteBackMachine(TieredMachine):
    write_back = True


BUDGET = settings(max_examples=6, stateful_step_count=25, deadline=None)

TestWriteThrough = TieredMachine.TestCase
TestWriteThrough.settings = BUDGET
TestWriteBack = WriteBackMachine.TestCase
TestWriteBack.settings = BUDGET


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [TieredMachine, WriteBackMachine])
def test_many_random_faults(
    machine: type[TieredMachine],
    effort: Callable[[int, int], int],
    record: Callable[[dict[str, object]], None],
) -> None:
    examples = effort(60, 800)
    run_state_machine_as_test(machine, settings=settings(BUDGET, max_examples=examples, stateful_step_count=50))
    record({"sequences": examples, "steps each, at most": 50})


# ---- controls: the machine has teeth


def ended(machine: TieredMachine) -> None:
    machine.repair()
    machine.store.close()
    for memory in machine.memories:
        memory.close()


def test_a_wrong_byte_is_seen() -> None:
    machine = TieredMachine()
    machine.put(["c"])
    machine.faults[0, "get"] = Fault("flip", at=7)
    with pytest.raises(AssertionError, match="wrong bytes of c"):
        machine.get(["a", "c"])
    ended(machine)


def test_a_lost_value_is_seen() -> None:
    machine = TieredMachine()
    machine.put(["c"])
    for memory in machine.memories:
        memory.delete(["c"]).result()
    with pytest.raises(AssertionError, match="c is lost"):
        machine.get(["c"])
    ended(machine)


@pytest.mark.parametrize("broken", [False, True], ids=["as-it-is", "everywhere"])
@pytest.mark.parametrize("tier", [0, 1])
def test_a_good_copy_that_goes_with_a_damaged_one_is_seen(
    monkeypatch: pytest.MonkeyPatch, tier: int, *, broken: bool
) -> None:
    if broken:
        monkeypatch.setattr(ValueOrigins, "tiers_of", lambda _self, _key: (0, 1, 2))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    machine = TieredMachine()
    machine.put(["b", "c"])
    for number in range(tier):
        machine.memories[number].delete(["c"]).result()
    machine.damage(tier, "c")
    if broken:
        with pytest.raises(AssertionError, match="a good copy of c is lost"):
            machine.get(["b", "c"])
    else:
        machine.get(["b", "c"])
        assert "c" in machine.sure
        machine.get(["c"])
    ended(machine)


def test_a_damaged_copy_that_stays_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ValueOrigins, "tiers_of", lambda _self, _key: (1,))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    machine = TieredMachine()
    machine.put(["c"])
    machine.memories[1].delete(["c"]).result()
    machine.damage(0, "c")
    with pytest.raises(AssertionError, match="c stays damaged"):
        machine.get(["c"])
    ended(machine)


@pytest.mark.parametrize("broken", [False, True], ids=["as-it-is", "without-waiting"])
def test_a_delete_that_does_not_wait_for_what_is_on_its_way_is_seen(
    monkeypatch: pytest.MonkeyPatch, *, broken: bool
) -> None:
    if broken:
        begin = StagingArea.begin_delete

        def nothing(self: StagingArea, _keys: Any, go: Any) -> Any:
            return begin(self, [], go)

        monkeypatch.setattr(StagingArea, "begin_delete", nothing)
    machine = WriteBackMachine()
    machine.hang(2, "put")
    machine.put(["c"])
    machine.delete(["c"])
    assert machine.life["c"] == broken
    machine.repair()
    wait_until(lambda: machine.store.idle)
    if broken:
        with pytest.raises(AssertionError, match="came back"):
            machine.get(["c"])
    else:
        machine.get(["c"])
    ended(machine)
