"""Tests that a faulty store fails exactly the tests that it should, and that page headers catch every wrong byte."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import monotonic

import pytest

from kvparams.page_auth import PageAuthKeys, TenantPageAuthKeys
from kvparams.pages import HEADER_BYTES, PageIdentity, seal, verify
from kvparams_connectors.conformance import Fault, FaultyStore, Operation
from kvparams_connectors.conformance.helpers import ConformancePrompt, make_sealed_page
from kvparams_connectors.store import GetOp, PutOp, ResultCode
from kvparams_connectors.stores.memory.store import MemoryStore
from tests.support.connectors.faulty_stores import STORES

ROOT = Path(__file__).parents[3]

SUITE = """
from collections.abc import Iterator
from pathlib import Path
import pytest
from faulty_stores import STORES
from kvparams_connectors.conformance import Opener, StoreConformance
from kvparams_connectors.store import KVStore

def suite_of(name: str) -> type:
    class TestFaulty(StoreConformance):
        @pytest.fixture
        def opener(self, tmp_path: Path) -> Iterator[Opener]:
            opened: list[KVStore] = []
            def open_one() -> KVStore:
                opened.append(STORES[name](tmp_path))
                return opened[-1]
            yield open_one
            for store in opened:
                store.close()
    return TestFaulty

for number, name in enumerate(STORES):
    if name in NAMES:
        globals()[f"Test{number}"] = suite_of(name)
"""

SIZES = {
    "test_a_batch_has_one_result_per_key_in_its_order",
    "test_a_shorter_value_under_the_same_key_has_nothing_of_the_longer_one",
    "test_many_random_operations_agree_with_a_dictionary",
}
GOING = {
    "test_a_checksum_that_is_reported_is_that_of_the_bytes_that_were_written",
    "test_what_is_written_when_a_value_goes_is_stored_with_it",
}
LACKING = {"test_a_page_that_lacks_its_checksums_is_stored_with_them"}
SHORTENED = (
    SIZES
    | GOING
    | LACKING
    | {
        "test_a_decode_engine_reads_what_a_prefill_engine_is_still_saving",
        "test_a_page_that_is_released_while_it_is_read_is_whole_or_missing",
        "test_a_store_that_is_full_gives_up_what_was_not_used_for_longest",
        "test_a_value_comes_back_as_it_was_put",
        "test_a_value_is_put_from_and_read_into_several_buffers",
        "test_a_value_may_look_like_anything",
        "test_a_value_of_elements_larger_than_bytes_is_stored_as_bytes",
        "test_nothing_is_written_beside_the_buffers",
        "test_of_many_writers_of_one_value_all_are_told_that_it_is_there",
        "test_of_two_writers_with_different_bytes_one_wins_whole",
        "test_pages_come_back_as_they_were_sealed_in_any_order",
        "test_several_threads_never_see_a_wrong_byte",
        "test_slots_of_an_arena_are_used_again_as_soon_as_a_save_is_settled",
        "test_the_first_value_of_a_key_stays",
        "test_the_source_may_change_once_the_job_is_settled",
        "test_two_engines_that_save_the_same_prompt_do_not_mix",
        "test_what_was_abandoned_is_whole_or_not_there",
    }
)
CHANGED = SHORTENED | {
    "test_a_deleted_key_is_gone_and_may_be_put_again",
    "test_a_prompt_that_is_saved_again_moves_nothing",
    "test_keys_that_differ_in_one_character_have_values_of_their_own",
    "test_nothing_is_written_beside_the_buffers_of_a_batch_that_partly_fails",
    "test_the_longest_and_oddest_keys_work",
}
EVICTION = {
    "test_a_store_that_is_full_gives_up_what_was_not_used_for_longest",
    "test_of_a_sequence_of_pages_the_tail_is_evicted_before_the_head",
    "test_a_value_over_the_limit_is_too_large_and_the_rest_of_the_batch_is_not",
}
FAILING: dict[str, set[str]] = {
    "good": set(),
    "flips what is read": CHANGED,
    "flips what is stored": CHANGED,
    "reads nothing": CHANGED,
    "reads too little": SHORTENED,
    "stores too little": SHORTENED
    | {
        "test_a_value_over_the_limit_is_too_large_and_the_rest_of_the_batch_is_not",
        "test_buffers_that_are_too_small_are_told_the_size_and_left_alone",
        "test_nothing_is_written_beside_the_buffers_of_a_batch_that_partly_fails",
        "test_of_a_sequence_of_pages_the_tail_is_evicted_before_the_head",
    },
    "stores nothing": CHANGED
    | EVICTION
    | {
        "test_a_bad_key_is_invalid_and_the_rest_of_the_batch_is_not",
        "test_a_thousand_pages_are_looked_up_at_once",
        "test_buffers_that_are_too_small_are_told_the_size_and_left_alone",
        "test_jobs_are_awaited_as_well",
        "test_the_store_is_as_fast_as_it_says",
    },
    "mixes up a batch": LACKING
    | {
        "test_a_batch_has_one_result_per_key_in_its_order",
        "test_a_checksum_that_is_reported_is_that_of_the_bytes_that_were_written",
        "test_a_decode_engine_reads_what_a_prefill_engine_is_still_saving",
        "test_nothing_is_written_beside_the_buffers_of_a_batch_that_partly_fails",
        "test_of_a_sequence_of_pages_the_tail_is_evicted_before_the_head",
        "test_pages_come_back_as_they_were_sealed_in_any_order",
    },
    "stores what is not finished": GOING | LACKING,
    "completes pages wrongly": LACKING,
    "has values finished twice": GOING,
    "announces what is not there": {"test_what_is_said_to_have_arrived_is_there"},
    "announces parts that are not there": {"test_what_is_said_to_have_arrived_is_there"},
    "announces and then fails": {"test_what_is_said_to_have_arrived_is_there"},
    "announces and then changes": {"test_what_is_said_to_have_arrived_is_there"},
    "deletes nothing": {
        "test_a_deleted_key_is_gone_and_may_be_put_again",
        "test_a_page_that_is_released_while_it_is_read_is_whole_or_missing",
        "test_a_shorter_value_under_the_same_key_has_nothing_of_the_longer_one",
        "test_many_random_operations_agree_with_a_dictionary",
    },
    "finds nothing": SIZES
    | {
        "test_a_bad_key_is_invalid_and_the_rest_of_the_batch_is_not",
        "test_a_decode_engine_reads_what_a_prefill_engine_is_still_saving",
        "test_a_thousand_pages_are_looked_up_at_once",
        "test_a_value_over_the_limit_is_too_large_and_the_rest_of_the_batch_is_not",
        "test_jobs_are_awaited_as_well",
        "test_of_a_sequence_of_pages_the_tail_is_evicted_before_the_head",
    },
    "tells wrong sizes": SIZES | {"test_a_thousand_pages_are_looked_up_at_once"},
    "tells no sizes": SIZES | {"test_a_thousand_pages_are_looked_up_at_once"},
    "tells no sizes and says so": set(),
    "fails to read one key": {
        "test_a_batch_has_one_result_per_key_in_its_order",
        "test_a_store_that_is_full_gives_up_what_was_not_used_for_longest",
        "test_many_random_operations_agree_with_a_dictionary",
        "test_of_many_writers_of_one_value_all_are_told_that_it_is_there",
        "test_of_two_writers_with_different_bytes_one_wins_whole",
        "test_several_threads_never_see_a_wrong_byte",
        "test_what_was_abandoned_is_whole_or_not_there",
    },
    "writes after it has settled": {
        "test_a_decode_engine_reads_what_a_prefill_engine_is_still_saving",
        "test_a_page_that_is_released_while_it_is_read_is_whole_or_missing",
        "test_buffers_are_left_alone_once_the_job_is_settled",
        "test_several_threads_never_see_a_wrong_byte",
        "test_the_store_is_as_fast_as_it_says",
    },
    "keeps the last value": {
        "test_a_prompt_that_is_saved_again_moves_nothing",
        "test_many_random_operations_agree_with_a_dictionary",
        "test_of_many_writers_of_one_value_all_are_told_that_it_is_there",
        "test_of_two_writers_with_different_bytes_one_wins_whole",
        "test_the_first_value_of_a_key_stays",
        "test_two_engines_that_save_the_same_prompt_do_not_mix",
    },
    "writes beside the value": {"test_buffers_that_are_too_small_are_told_the_size_and_left_alone"},
    "fails a batch for one key": {
        "test_a_batch_has_one_result_per_key_in_its_order",
        "test_a_deleted_key_is_gone_and_may_be_put_again",
        "test_a_missing_key_is_a_miss_in_every_operation",
        "test_a_store_that_is_full_gives_up_what_was_not_used_for_longest",
        "test_nothing_is_written_beside_the_buffers_of_a_batch_that_partly_fails",
        "test_several_threads_never_see_a_wrong_byte",
        "test_what_was_abandoned_is_whole_or_not_there",
    },
    "does not evict": EVICTION
    | {
        "test_of_many_writers_of_one_value_all_are_told_that_it_is_there",
        "test_of_two_writers_with_different_bytes_one_wins_whole",
        "test_the_store_is_as_fast_as_it_says",
        "test_what_was_abandoned_is_whole_or_not_there",
    },
    "answers when it is closed": {
        "test_a_closed_store_is_unavailable_at_once",
        "test_closing_waits_for_what_was_submitted",
    },
}
BY_CHANCE = {
    "test_a_decode_engine_reads_what_a_prefill_engine_is_still_saving",
    "test_a_page_that_is_released_while_it_is_read_is_whole_or_missing",
    "test_of_two_writers_with_different_bytes_one_wins_whole",
    "test_several_threads_never_see_a_wrong_byte",
    "test_what_was_abandoned_is_whole_or_not_there",
}
"""Threads meet as they happen to: where they stand above they may fail, elsewhere they must not."""

QUICK = ["mixes up a batch", "writes after it has settled"]


def failing(folder: Path, names: list[str]) -> dict[str, set[str]]:
    """The tests that fail for each of these stores, run as a stranger would run them."""
    (folder / "test_faulty.py").write_text(SUITE.replace("NAMES", repr(names)))
    pytest_run = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "kvparams_connectors.conformance",
    ]
    done = subprocess.run(
        [*pytest_run, "--tb=no", "-rfE", "test_faulty.py"],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT / "tests" / "support" / "connectors"), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert not re.search(r"^ERROR ", done.stdout, re.MULTILINE), done.stdout
    numbers = {str(number): name for number, name in enumerate(STORES)}
    found: dict[str, set[str]] = {name: set() for name in names}
    for number, test in re.findall(r"^FAILED test_faulty\.py::Test(\d+)::(\w+)", done.stdout, re.MULTILINE):
        found[numbers[number]].add(test)
    return found


def check(found: dict[str, set[str]]) -> None:
    for name, tests in found.items():
        assert tests <= FAILING[name], f"{name}: fails without a reason: {sorted(tests - FAILING[name])}"
        missed = FAILING[name] - tests - BY_CHANCE
        assert not missed, f"{name}: does not fail: {sorted(missed)}"
        assert bool(tests) == bool(FAILING[name]), name


def test_there_is_a_line_for_every_faulty_store() -> None:
    assert FAILING.keys() == STORES.keys()


def test_faulty_stores_fail_exactly_the_tests_that_they_should(tmp_path: Path) -> None:
    check(failing(tmp_path, QUICK))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in STORES if name not in QUICK])
def test_a_faulty_store_fails_exactly_the_tests_that_it_should(tmp_path: Path, name: str) -> None:
    """One at a time: what failed is kept with its memory until its process ends."""
    check(failing(tmp_path, [name]))


class Storm:
    """A caller that saves, looks up, loads and deletes pages, and a store in which much goes wrong."""

    def __init__(self, seed: int, keys: TenantPageAuthKeys | None) -> None:
        self.random = Random(seed)
        self.faults: Counter[str] = Counter()
        """What went wrong, by operation and kind."""
        self.refused: Counter[str] = Counter()
        self.loaded = 0
        self.wrong: list[str] = []
        """Pages that were believed and had a wrong byte."""
        self.stopped = 0
        """Pages with a wrong byte that were refused: the control, without which the rest would prove nothing."""
        self.keys = keys
        prompt = ConformancePrompt(16 * 48 + 7, dim=4, seed=seed)
        self.names = prompt.keys
        self.identities: dict[str, PageIdentity] = dict(zip(prompt.keys, prompt.identities, strict=True))
        self.pages = {key: bytes(make_sealed_page(identity)) for key, identity in self.identities.items()}
        self.sealed: dict[str, memoryview] = {}
        for key, identity in self.identities.items():
            self.sealed[key] = memoryview(bytearray(self.pages[key]))
            if keys is not None:
                seal(self.sealed[key], identity, keys)
        slot_bytes = max(identity.stored_bytes for identity in prompt.identities)
        self.slots = [memoryview(bytearray(slot_bytes + 64)) for _ in range(16)]
        self.inner = MemoryStore(64 * 4096, unit_bytes=4096)
        self.store = FaultyStore(self.inner, self.judge)
        self.held = False
        """Whether operations begin late."""

    def judge(self, operation: Operation, _: str) -> Fault | None:
        if not self.held and self.random.random() < 0.4:
            return None
        fault = Fault("late") if self.held else self.fault(operation)
        self.faults[f"{operation} {fault.kind}"] += 1
        return fault

    def fault(self, operation: Operation) -> Fault:
        random = self.random
        if random.random() < 0.0005:
            return Fault("delay", seconds=0.0005)
        code = random.choice([ResultCode.MISS, ResultCode.UNAVAILABLE, ResultCode.CORRUPT, ResultCode.TIMEOUT])
        if operation == "put":
            kinds = ["flip", "truncate", "drop", "fail"]
        elif operation == "get":
            kinds = ["flip", "flip", "truncate", "swap", "reorder", "drop", "fail"]
        else:
            kinds = ["drop", "fail"]
        kind = random.choice(kinds)
        if kind == "flip":
            return Fault("flip", at=random.randrange(8 * (HEADER_BYTES + 600)))
        if kind == "truncate":
            return Fault("truncate", at=random.randrange(HEADER_BYTES + 600))
        if kind == "swap":
            return Fault("swap", key=random.choice(self.names))
        if kind == "reorder":
            return Fault("reorder")
        return Fault("drop") if kind == "drop" else Fault("fail", code=code)

    def step(self) -> None:
        """One batch."""
        keys = self.random.sample(self.names, self.random.randint(1, 16))
        action = self.random.choice(["put", "put", "get", "get", "get", "exists", "delete"])
        if action == "put":
            self.store.put([PutOp(key, (self.sealed[key],)) for key in keys]).result()
        elif action == "get":
            self.load(keys)
        elif action == "exists":
            self.store.exists(keys).result()
        else:
            self.store.delete(keys).result()

    def load(self, keys: list[str]) -> None:
        """Into slots that still hold what was read before, as an engine's arena does."""
        slots = self.slots[: len(keys)]
        ops = [GetOp(key, (slot[: self.identities[key].stored_bytes],)) for key, slot in zip(keys, slots, strict=True)]
        if self.random.random() < 0.01:
            self.late(ops)
            return
        for key, slot, result in zip(keys, slots, self.store.get(ops).result(), strict=True):
            if result.code is not ResultCode.OK:
                continue
            page = slot[: result.nbytes]
            refusal = verify(page, self.identities[key], self.keys)
            same = page == self.sealed[key]
            if refusal is not None:
                self.refused[refusal.reason] += 1
                self.stopped += not same
            elif same:
                self.loaded += 1
            else:
                self.wrong.append(key)

    def late(self, ops: list[GetOp]) -> None:
        """The wait ends and the work goes on; the slots are not touched until it is settled."""
        self.held = True
        self.store.gate.clear()
        job = self.store.get(ops, 0.002)
        assert {result.code for result in job.result()} == {ResultCode.TIMEOUT}
        self.held = False
        self.store.gate.set()
        assert job.wait_settled(20)

    def close(self) -> None:
        self.store.close()
        self.inner.close()


@pytest.mark.parametrize("sealed", [False, True], ids=["checksum", "tag"])
def test_a_few_thousand_random_faults_and_not_one_wrong_byte(sealed: bool) -> None:
    storm = Storm(1, PageAuthKeys([bytes(range(32))]).for_tenant("t") if sealed else None)
    while storm.faults.total() < 3_000:
        storm.step()
    storm.close()
    assert storm.wrong == []
    assert storm.stopped > 100
    assert storm.loaded > 100


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_million_random_faults_and_not_one_wrong_byte(
    effort: Callable[[int, int], int], record: Callable[[dict[str, object]], None]
) -> None:
    """Spec-mandated, 1.0#11.2: through the wrapper, by every kind of fault; half of the time the pages have tags."""
    wanted = effort(30_000, 1_000_000)
    faults: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    loaded = stopped = seed = 0
    start = monotonic()
    while faults.total() < wanted:
        seed += 1
        storm = Storm(seed, PageAuthKeys([bytes(range(32))]).for_tenant("t") if seed % 2 else None)
        while storm.faults.total() < 10_000:
            storm.step()
        storm.close()
        assert storm.wrong == [], f"seed {seed}"
        faults += storm.faults
        refused += storm.refused
        loaded += storm.loaded
        stopped += storm.stopped
    assert min(stopped, loaded) > wanted // 100
    assert {"torn", "prefix", "flipped_header", "flipped_payload"} <= refused.keys()
    record(
        {
            "faults": faults.total(),
            "kinds": dict(sorted(faults.items())),
            "loaded": loaded,
            "wrong_bytes_refused": stopped,
            "refused": dict(sorted(refused.items())),
            "wrong_bytes_loaded": 0,
            "seconds": round(monotonic() - start, 1),
        }
    )
