"""Tests that a page that is verified as it arrives is judged by its final bytes."""

from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.keys import KVShard
from kvparams.pages import HEADER_BYTES, PageIdentity, PageRefusal, seal, verify
from kvparams_connectors.conformance.toy_engine import WAIT_S
from kvparams_connectors.store import GetOp, PutOp, Result, ResultCode
from kvparams_connectors.stores.memory.store import MemoryStore
from kvparams_connectors.stores.progress import progress_step_bytes
from kvparams_connectors.transfer.incremental_verifier import IncrementalVerifier

PAYLOAD = 3000
PAGE = HEADER_BYTES + PAYLOAD
IDENTITY = PageIdentity(b"n" * 32, b"c" * 32, 8, KVShard(0, 1, 0, 1), PAYLOAD)


def good_page() -> bytes:
    page = bytearray(bytes(HEADER_BYTES) + Random(1).randbytes(PAYLOAD))
    seal(memoryview(page), IDENTITY)
    return bytes(page)


GOOD = good_page()
SOURCES = st.sampled_from([GOOD, GOOD[:-1] + bytes([GOOD[-1] ^ 1]), GOOD[:300] + bytes(PAGE - 300), bytes(PAGE)])
ATTEMPTS = st.lists(st.tuples(SOURCES, st.lists(st.integers(1, PAGE), max_size=6), st.booleans()), max_size=4)


def arrival_in(slot: memoryview) -> IncrementalVerifier:
    def judge(nbytes: int, payload_checksum: int | None) -> PageRefusal | None:
        return verify(slot[:nbytes], IDENTITY, payload_checksum=payload_checksum)

    return IncrementalVerifier(slot, judge)


def bring(slot: memoryview, source: bytes, steps: list[int], coming: Callable[[int], None] | None) -> None:
    """Fill the slot up to each step, in order, and say so."""
    done = 0
    if coming is not None:
        coming(0)
    for end in sorted(set(steps)):
        slot[done:end] = source[done:end]
        done = end
        if coming is not None:
            coming(end)


@given(ATTEMPTS, SOURCES, st.lists(st.integers(1, PAGE), max_size=8), st.booleans(), st.integers(0, PAGE))
def test_the_verdict_is_about_what_lies_there_in_the_end(
    before: list[tuple[bytes, list[int], bool]], last: bytes, steps: list[int], told: bool, nbytes: int
) -> None:
    """However often a store began, how far it came, and whether it said so."""
    slot = memoryview(bytearray(PAGE))
    arrival = arrival_in(slot)
    for source, to, said in before:
        bring(slot, source, to, arrival.on_progress)
        if said:
            arrival.on_complete(max(to, default=0))
    if told:
        bring(slot, last, [step for step in steps if step <= nbytes], arrival.on_progress)
    elif before:
        arrival.on_progress(0)  # a store that says so once says so whenever it begins
    slot[:nbytes] = last[:nbytes]
    arrival.on_complete(nbytes)
    assert arrival.verified is not None
    size, refusal = arrival.verified
    assert (size, refusal) == (nbytes, verify(slot[:nbytes], IDENTITY))
    assert (refusal is None) == (last == GOOD and nbytes == PAGE)


def test_more_than_what_has_arrived_was_said_to_come() -> None:
    slot = memoryview(bytearray(PAGE))
    arrival = arrival_in(slot)
    bring(slot, GOOD, [PAGE], arrival.on_progress)
    arrival.on_complete(PAGE - 1)
    assert arrival.verified is not None
    assert arrival.verified[1] is not None


def test_a_store_that_begins_again_takes_its_word_back() -> None:
    slot = memoryview(bytearray(PAGE))
    arrival = arrival_in(slot)
    bring(slot, GOOD, [1000, PAGE], arrival.on_progress)
    arrival.on_complete(PAGE)
    assert arrival.verified == (PAGE, None)
    arrival.on_progress(0)
    assert arrival.verified is None


def test_bytes_that_change_after_they_were_said_to_stay_are_believed() -> None:
    """The control: the checksum is of the bytes that came, so a store must not touch them again."""
    slot = memoryview(bytearray(PAGE))
    arrival = arrival_in(slot)
    bring(slot, GOOD, [2000], arrival.on_progress)
    slot[1000] ^= 1
    slot[2000:] = GOOD[2000:]
    arrival.on_complete(PAGE)
    assert arrival.verified == (PAGE, None)


@given(st.integers(0, 40 << 20))
def test_steps_are_about_a_quarter_of_a_mebibyte_and_equal(nbytes: int) -> None:
    step = progress_step_bytes(nbytes, 256 << 10)
    assert step >= 1
    assert step * (nbytes // step) <= nbytes <= step * max(1, -(-nbytes // step))
    assert nbytes < (512 << 10) or (256 << 10) <= step < (512 << 10)
    assert nbytes >= (512 << 10) or step >= nbytes
    assert nbytes % step in (0, *range(step - 160, step))


@pytest.mark.parametrize("unit", [4096, 64 << 10])
def test_a_large_value_comes_in_steps_whatever_its_buffers_are(unit: int) -> None:
    store = MemoryStore(12 << 20, unit_bytes=unit)
    content = Random(2).randbytes(5_000_000)
    assert store.put([PutOp("key", (memoryview(content),))], WAIT_S).result() == [Result(ResultCode.OK, len(content))]
    memory = memoryview(bytearray(6_000_000))
    steps: list[tuple[int, bool]] = []

    def coming(nbytes: int) -> None:
        steps.append((nbytes, bytes(memory[:nbytes]) == content[:nbytes]))

    op = GetOp("key", (memory[:3], memory[3:2_500_000], memory[2_500_000:]), lambda _: None, coming)
    assert store.get([op], WAIT_S).result() == [Result(ResultCode.OK, len(content))]
    sizes = [nbytes for nbytes, _ in steps]
    assert sizes[0] == 0
    assert sizes[-1] == len(content)
    assert sizes == sorted(set(sizes))
    assert max(after - before for before, after in pairwise(sizes)) < 2 << 20
    assert all(there for _, there in steps)
    store.close()


@pytest.mark.parametrize("nbytes", [0, 100, 50_000, 1 << 20])
def test_values_of_a_batch_are_announced_while_they_are_in_the_caches(nbytes: int) -> None:
    """Each whole before the next begins, however small, and each is said to be there once."""
    store = MemoryStore(12 << 20)
    contents = [Random(number).randbytes(nbytes) for number in range(9)]
    puts = [PutOp(f"key-{number}", (memoryview(content),)) for number, content in enumerate(contents)]
    assert store.put(puts, WAIT_S).result() == [Result(ResultCode.OK, nbytes)] * 9
    targets = [memoryview(bytearray(nbytes + 1)) for _ in contents]
    told: list[tuple[int, int]] = []
    arrived: list[tuple[int, int]] = []
    gets = [
        GetOp(
            f"key-{number}",
            (target,),
            lambda size, number=number: arrived.append((number, size)),
            lambda size, number=number: told.append((number, size)),
        )
        for number, target in enumerate(targets)
    ]
    assert store.get(gets, WAIT_S).result() == [Result(ResultCode.OK, nbytes)] * 9
    assert [target[:nbytes] for target in targets] == contents
    assert told == sorted(told)
    assert {max(size for one, size in told if one == number) for number in range(9)} == {nbytes}
    assert arrived == [(number, nbytes) for number in range(9)]
    store.close()


def _raises(*_: object) -> None:
    raise ValueError("operation forbidden on released memoryview object")


def test_a_caller_that_has_released_what_it_looks_at_harms_nobody_else_in_its_batch() -> None:
    """Its own operation is invalid, and the room of its value is free again: the store's next values need all of it."""
    store, nbytes = MemoryStore(2 << 20, unit_bytes=4096), 1 << 20
    content = memoryview(Random(1).randbytes(nbytes))
    puts = [PutOp("bad", (content,), _raises), PutOp("good", (content,))]
    assert [result.code for result in store.put(puts, WAIT_S).result()] == [ResultCode.INVALID, ResultCode.OK]
    targets = [memoryview(bytearray(nbytes)) for _ in range(2)]
    gets = [GetOp("good", (targets[0],), on_progress=_raises), GetOp("good", (targets[1],))]
    assert [result.code for result in store.get(gets, WAIT_S).result()] == [ResultCode.INVALID, ResultCode.OK]
    assert targets[1] == content
    assert store.delete(["good"], WAIT_S).result()[0].code is ResultCode.OK
    whole = memoryview(bytearray(2 << 20))
    assert store.put([PutOp("whole", (whole,))], WAIT_S).result()[0].code is ResultCode.OK
    store.close()
