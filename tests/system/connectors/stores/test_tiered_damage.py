"""Tests that a damaged value is deleted from the tiers that have those bytes, and from no other."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvparams.params import PROTOCOL_VERSION, Endpoint, KVTransferParams, Transfer
from kvparams_connectors.conformance import Fault, FaultyStore
from kvparams_connectors.conformance.faults import Operation
from kvparams_connectors.conformance.toy_engine import PAGE_BYTES, block_table, make_tokens, save_sequence, toy_engine
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode, Results, open_store
from kvparams_connectors.stores.guard.store import GuardedStore, open_guarded
from kvparams_connectors.stores.memory.store import MemoryStore
from kvparams_connectors.stores.tiered.store import TieredStore
from kvparams_connectors.stores.tiered.value_origins import ValueOrigins
from kvparams_connectors.transfer.reports import LoadReport
from tests.support.waiting import wait_until

WAIT_S = 20.0
LARGE = 2 * PAGE_BYTES


def read(store: KVStore, key: str) -> bytes | None:
    """The value there; None if there is none."""
    target = memoryview(bytearray(LARGE))
    result = store.get([GetOp(key, (target,))], WAIT_S).result()[0]
    assert result.code in (ResultCode.OK, ResultCode.MISS)
    return bytes(target[: result.nbytes]) if result.code is ResultCode.OK else None


def write(store: KVStore, key: str, content: bytes) -> None:
    store.delete([key], WAIT_S).result()
    assert store.put([PutOp(key, (memoryview(content),))], WAIT_S).result()[0].code is ResultCode.OK


def damaged(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


class Remembering(TieredStore):
    """What it was asked to discard can be waited for."""

    def __init__(self, tiers: Sequence[KVStore]) -> None:
        super().__init__(tiers)
        self.jobs: list[Job[Results]] = []

    def discard(self, keys: Sequence[str], deadline_s: float = WAIT_S) -> Job[Results]:
        self.jobs.append(super().discard(keys, deadline_s))
        return self.jobs[-1]

    def calm(self) -> None:
        assert all(job.wait_settled(WAIT_S) for job in self.jobs)
        wait_until(lambda: self.idle)


class Stack:
    """Three tiers that can fail, over memories in which a sequence of 20 tokens, 3 pages, is stored everywhere."""

    def __init__(self) -> None:
        self.faults: dict[tuple[int, str], Fault] = {}
        self.memories = [MemoryStore(4 << 20, unit_bytes=4096) for _ in range(3)]
        self.tiers = [self._tier(number, memory) for number, memory in enumerate(self.memories)]
        self.store = Remembering(self.tiers)
        self.plan, _ = save_sequence(self.store, 20)
        self.key = self.plan.keys[1]
        good = read(self.memories[2], self.key)
        assert good is not None
        self.good = good
        self.bad = damaged(good)

    def _tier(self, number: int, memory: KVStore) -> FaultyStore:
        def judge(operation: Operation, key: str) -> Fault | None:
            return self.faults.get((number, operation)) if key == self.key else None

        self.key = ""
        return FaultyStore(memory, judge)

    def load(self) -> LoadReport:
        with toy_engine(self.store) as engine:
            report = engine.connector.load(self.plan, block_table(2), 0, 20).result()
        self.store.calm()
        return report

    def copies(self) -> list[bytes | None]:
        """What each tier has."""
        self.store.calm()
        return [read(memory, self.key) for memory in self.memories]

    def discard(self) -> list[Result]:
        return self.store.discard([self.key], WAIT_S).result()

    def close(self) -> None:
        for tier in self.tiers:
            tier.gate.set()
        self.store.close()
        for memory in self.memories:
            memory.close()


@pytest.fixture
def stack() -> Iterator[Stack]:
    one = Stack()
    yield one
    one.close()


@pytest.mark.parametrize("everywhere", [False, True], ids=["as-it-is", "control-in-every-tier"])
@pytest.mark.parametrize("tier", [0, 1])
def test_the_next_tier_answers_for_a_page_that_was_damaged(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, tier: int, *, everywhere: bool
) -> None:
    if everywhere:
        monkeypatch.setattr(ValueOrigins, "tiers_of", lambda _self, _key: (0, 1, 2))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    for number in range(tier):
        stack.memories[number].delete([stack.key], WAIT_S).result()
    write(stack.memories[tier], stack.key, stack.bad)
    report = stack.load()
    assert (report.end_token, [page.key for page in report.refused]) == (8, [stack.key])
    kept = None if everywhere else stack.good
    assert stack.copies() == [None] * (tier + 1) + [kept] * (2 - tier)  # what was promoted of it has gone too
    assert stack.load().end_token == (8 if everywhere else 20)


def test_the_last_copy_goes_and_can_be_stored_anew(stack: Stack) -> None:
    for memory in stack.memories:
        write(memory, stack.key, stack.bad)
    assert [stack.load().end_token for _ in range(4)] == [8] * 4  # three damaged copies, and then none
    assert stack.copies() == [None] * 3
    with toy_engine(stack.store, seed=1) as engine:
        assert engine.connector.save(stack.plan, block_table(1), 0, 20).result().saved == 1
    assert stack.load().end_token == 20


def test_a_value_that_is_too_long_goes_from_the_tier_that_has_it(stack: Stack) -> None:
    write(stack.memories[0], stack.key, bytes(LARGE))
    assert stack.load().end_token == 20  # the next tier has it
    write(stack.memories[0], stack.key, bytes(LARGE))
    stack.faults |= {(number, "get"): Fault("fail", code=ResultCode.UNAVAILABLE) for number in (1, 2)}
    report = stack.load()
    assert [page.reason for page in report.refused] == ["torn"]
    assert stack.copies() == [None, stack.good, stack.good]


def test_a_damaged_copy_that_is_on_its_way_goes_when_it_has_come(stack: Stack) -> None:
    """It is being promoted while its reader finds out; the good copy in the last tier stays."""
    stack.memories[0].delete([stack.key], WAIT_S).result()
    write(stack.memories[1], stack.key, stack.bad)
    stack.faults[0, "put"] = Fault("late")
    assert read(stack.store, stack.key) == stack.bad
    job = stack.store.discard([stack.key], WAIT_S)
    assert not job.done()
    stack.tiers[0].gate.set()
    assert job.result() == [Result(ResultCode.OK)]
    assert stack.copies() == [None, None, stack.good]


def test_a_good_copy_in_a_tier_that_did_not_answer_is_not_taken_for_the_damaged_one(stack: Stack) -> None:
    """What is promoted there finds it, and changes nothing."""
    write(stack.memories[1], stack.key, stack.bad)
    stack.faults[0, "get"] = Fault("fail", code=ResultCode.UNAVAILABLE)
    assert read(stack.store, stack.key) == stack.bad
    stack.store.calm()
    assert stack.discard() == [Result(ResultCode.OK)]
    assert stack.copies() == [stack.good, None, stack.good]


def test_a_get_that_came_between_counts_and_not_the_promotion_before_it(stack: Stack) -> None:
    stack.memories[0].delete([stack.key], WAIT_S).result()
    assert read(stack.store, stack.key) == stack.good  # from the second tier, and into the first
    stack.store.calm()
    write(stack.memories[0], stack.key, stack.bad)
    assert read(stack.store, stack.key) == stack.bad
    assert stack.discard() == [Result(ResultCode.OK)]
    assert stack.copies() == [None, stack.good, stack.good]


def test_where_nobody_knows_it_came_from_it_goes_everywhere(stack: Stack) -> None:
    assert stack.store.discard([stack.plan.keys[0], "nothing", "not a key"], WAIT_S).result() == [
        Result(ResultCode.OK),
        Result(ResultCode.MISS),
        Result(ResultCode.INVALID),
    ]
    assert [read(memory, stack.plan.keys[0]) for memory in stack.memories] == [None] * 3


def test_a_tier_that_cannot_discard_says_so_and_the_good_copies_stay(stack: Stack) -> None:
    write(stack.memories[0], stack.key, stack.bad)
    assert read(stack.store, stack.key) == stack.bad
    stack.faults[0, "delete"] = Fault("fail", code=ResultCode.DENIED)
    assert stack.discard() == [Result(ResultCode.DENIED)]
    stack.faults[0, "delete"] = Fault("late")
    assert stack.store.discard([stack.key], 0.05).result() == [Result(ResultCode.TIMEOUT)]
    stack.tiers[0].gate.set()
    stack.store.close()
    assert stack.discard() == [Result(ResultCode.UNAVAILABLE)]
    assert stack.copies()[1:] == [stack.good] * 2


def test_a_tier_that_damages_what_it_reads_is_passed_over(opened: list[KVStore]) -> None:
    """Deleting does not help there: behind its guard the key is in quarantine, and the next tier is asked."""
    memories = [MemoryStore(4 << 20, unit_bytes=4096) for _ in range(2)]
    flip = Fault("flip", at=8 * (PAGE_BYTES - 1))
    first = FaultyStore(memories[0], lambda operation, _: {"get": flip, "delete": Fault("drop")}.get(operation))
    guarded = GuardedStore(first)
    store = Remembering([guarded, memories[1]])
    opened += [store, first, *memories]
    plan, _ = save_sequence(store, 8)
    with toy_engine(store) as engine:
        for end in (0, 8, 8):
            assert engine.connector.load(plan, block_table(2), 0, 8).result().end_token == end
            store.calm()
    assert guarded.statistics.quarantined == 1
    assert read(memories[1], plan.keys[0]) is not None


def test_a_damaged_value_is_not_given_again_while_its_deletion_has_to_wait(opened: list[KVStore]) -> None:
    memories = [MemoryStore(1 << 20, unit_bytes=4096) for _ in range(2)]
    slow = FaultyStore(memories[0], lambda operation, _: Fault("late") if operation == "put" else None, threads=2)
    store = TieredStore([slow, GuardedStore(memories[1])])
    write(memories[1], "key", b"value")
    assert read(store, "key") == b"value"  # it is being promoted
    job = store.discard(["key"], WAIT_S)
    assert not job.done()
    assert read(store, "key") is None
    slow.gate.set()
    assert job.result() == [Result(ResultCode.OK)]
    assert [read(memory, "key") for memory in memories] == [None, None]
    opened += [store, slow, *memories]


def test_a_guard_has_what_it_guards_discard(opened: list[KVStore]) -> None:
    """A tiered store behind a guard, or a tier of another one, loses one copy; one that was given up is not asked."""
    memories = [MemoryStore(1 << 20, unit_bytes=4096) for _ in range(2)]
    tiered = TieredStore(memories)
    hanging = FaultyStore(tiered, lambda operation, _: Fault("late") if operation == "exists" else None)
    guarded, given_up = GuardedStore(tiered), GuardedStore(hanging)
    write(guarded, "key", b"value")
    assert read(guarded, "key") == b"value"
    assert guarded.discard(["key"], WAIT_S).result() == [Result(ResultCode.OK)]
    assert [read(memory, "key") for memory in memories] == [None, b"value"]
    assert guarded.statistics.quarantined == 1
    first = MemoryStore(1 << 20, unit_bytes=4096)
    outer = TieredStore([first, guarded], promote=False)
    write(outer, "other", b"value")
    first.delete(["other"], WAIT_S).result()
    assert read(outer, "other") == b"value"
    assert outer.discard(["other"], WAIT_S).result() == [Result(ResultCode.OK)]
    assert [read(memory, "other") for memory in memories] == [None, b"value"]
    for _ in range(3):
        given_up.exists(["key"], 0.06).result()
    assert given_up.discard(["key"], WAIT_S).result() == [Result(ResultCode.UNAVAILABLE)]
    hanging.gate.set()
    opened += [given_up, outer, *memories]


def test_a_peers_damaged_pages_cost_the_store_that_all_share_nothing(opened: list[KVStore], tmp_path: Path) -> None:
    """A prefill engine serves a bad page; the decode engine refuses it once, and then has it from the shared store."""
    shared = f"file://{tmp_path}/shared?size=4MiB"
    prefill = open_store("peer://127.0.0.1?size=4MiB&lease=0")
    store = Remembering([open_guarded("peer://127.0.0.1:0?size=4MiB&lease=0"), open_guarded(shared)])
    other = open_store(shared)
    opened += [store, prefill, other]
    plan, _ = save_sequence(prefill, 20)
    save_sequence(other, 20)
    good = read(other, plan.keys[1])
    assert good is not None
    write(prefill, plan.keys[1], damaged(good))
    producer = Endpoint(id="p", incarnation="i", address=prefill.address)
    told = KVTransferParams(
        version=PROTOCOL_VERSION,
        request_id="r",
        transfer=Transfer(id="t", attempt=1),
        phase="decode",
        mode="store",
        producer=producer,
    )
    with toy_engine(store) as engine:
        for end in (8, 20):
            report = engine.connector.load(engine.connector.plan(make_tokens(20), told), block_table(2), 0, 20).result()
            assert report.end_token == end
            store.calm()
    assert read(other, plan.keys[1]) == good


class TestOrigins:
    def of(self, origins: ValueOrigins, keys: Sequence[str]) -> list[tuple[int, ...]]:
        return [origins.tiers_of(key) for key in keys]

    def test_the_oldest_are_forgotten(self) -> None:
        origins = ValueOrigins(3, most=2)
        origins.record_source(0, ["a", "b"])
        origins.record_source(1, ["a"])
        origins.record_source(2, ["c"])
        assert self.of(origins, "abc") == [(1,), (0, 1, 2), (2,)]

    def test_only_copies_of_what_was_given_last_count(self) -> None:
        origins = ValueOrigins(3)
        origins.record_source(2, ["a"])
        origins.record_copy(0, 2, ["a", "b"])
        origins.record_copy(0, 2, ["a"])
        origins.record_copy(1, 1, ["a"])
        assert self.of(origins, "ab") == [(2, 0), (0, 1, 2)]
        origins.record_source(0, ["a"])
        origins.record_copy(1, 2, ["a"])
        assert self.of(origins, "a") == [(0,)]
