"""Tests that the model of adapter slots is a least recently used cache that keeps what is in use."""

import time
from collections import Counter, OrderedDict
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.routing.adapter_slots import DEFAULT_SLOTS, MAX_SLOTS, AdapterSlots

NAMES = st.sampled_from("abcdefgh")
STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "end", "loaded", "forget"]), NAMES)
    | st.tuples(st.just("correct"), st.tuples(st.integers(1, 5), st.frozensets(NAMES, max_size=6))),
    max_size=60,
)


def take(slots: AdapterSlots, kind: str, what: object) -> None:
    if kind == "begin":
        slots.begin(str(what))
    elif kind == "end":
        slots.end(str(what))
    elif kind == "loaded":
        slots.record_loaded([str(what)])
    elif kind == "forget":
        slots.forget([str(what)])
    else:
        slots.correct(*cast("tuple[int, frozenset[str]]", what))


@given(capacity=st.integers(1, 5), steps=STEPS)
def test_never_more_than_its_capacity_and_what_runs_goes_last(capacity: int, steps: list[tuple[str, object]]) -> None:
    slots, runs = AdapterSlots(capacity), Counter[str]()
    for kind, what in steps:
        before = set(slots.loaded)
        take(slots, kind, what)
        if kind == "begin":
            runs[str(what)] += 1
            assert str(what) in slots
        elif kind == "end":
            runs[str(what)] = max(0, runs[str(what)] - 1)
        assert len(slots.loaded) <= slots.capacity
        assert len(set(slots.loaded)) == len(slots.loaded)
        evicted = before - set(slots.loaded) - ({str(what)} if kind == "forget" else set())
        if any(runs[each] for each in evicted):  # then all others are needed, too, or the newest
            assert sum(not runs[each] for each in slots.loaded) <= 1


class Reference:
    """The same model without any index: it looks at all adapters each time."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.loaded, self.running = capacity, list[str](), Counter[str]()

    def use(self, adapter: str) -> None:
        self.loaded = [*(each for each in self.loaded if each != adapter), adapter]
        self.evict()

    def evict(self) -> None:
        while len(self.loaded) > self.capacity:
            idle = [each for each in self.loaded[:-1] if not self.running[each]]
            self.loaded.remove((idle or self.loaded)[0])

    def take(self, kind: str, what: object) -> None:
        if kind == "begin":
            self.running[str(what)] += 1
            self.use(str(what))
        elif kind == "end" and self.running[str(what)]:
            self.running[str(what)] -= 1
            if not self.running[str(what)] and what in self.loaded:
                self.use(str(what))
        elif kind == "loaded":
            self.use(str(what))
        elif kind == "forget" and what in self.loaded:
            self.loaded.remove(str(what))
        elif kind == "correct":
            self.capacity, active = cast("tuple[int, frozenset[str]]", what)
            for each in active if len(active) <= self.capacity else ():
                if each not in self.loaded:
                    self.use(each)
            self.evict()


@given(capacity=st.integers(1, 5), steps=STEPS)
def test_it_holds_what_the_reference_holds(capacity: int, steps: list[tuple[str, object]]) -> None:
    slots, reference = AdapterSlots(capacity), Reference(capacity)
    for kind, what in steps:
        take(slots, kind, what)
        reference.take(kind, what)
        assert slots.loaded == reference.loaded
        assert slots.newest == (reference.loaded[-1] if reference.loaded else None)
        is_free = len(reference.loaded) < reference.capacity or not all(reference.running[x] for x in reference.loaded)
        for name in "ab":
            assert slots.has_slot(name) is (name in reference.loaded or is_free)


def test_a_full_engine_costs_no_time() -> None:
    slots = AdapterSlots(MAX_SLOTS)
    for number in range(MAX_SLOTS):
        slots.begin(str(number))
    began = time.thread_time()
    assert not any(slots.has_slot("another") for _ in range(1_000))
    assert time.thread_time() - began < 0.01  # 100 ms if all adapters are looked at
    began = time.thread_time()
    slots.correct(1, ())
    assert time.thread_time() - began < 0.01  # 40 ms likewise
    assert slots.loaded == [str(MAX_SLOTS - 1)]


@given(capacity=st.integers(1, 5), asked=st.lists(NAMES, max_size=60))
def test_legs_one_after_the_other_load_what_a_least_recently_used_cache_loads(capacity: int, asked: list[str]) -> None:
    slots = AdapterSlots(capacity)
    reference = OrderedDict[str, None]()
    for adapter in asked:
        expected = adapter in reference
        reference[adapter] = None
        reference.move_to_end(adapter)
        if len(reference) > capacity:
            reference.popitem(last=False)
        assert slots.begin(adapter) is expected
        slots.end(adapter)
        assert slots.loaded == list(reference)


@given(capacity=st.integers(1, 5), asked=st.lists(NAMES, max_size=60), done=st.lists(st.integers(0, 3), max_size=60))
def test_a_queue_in_order_loads_what_a_least_recently_used_cache_loads(
    capacity: int, asked: list[str], done: list[int]
) -> None:
    """Legs wait, and are computed one after the other in their order: the model knows when they are given, no more."""
    slots, reference, waiting, ends = AdapterSlots(capacity), OrderedDict[str, None](), list[str](), iter(done)
    predicted: list[bool] = []
    found: list[bool] = []

    def compute() -> None:
        adapter = waiting.pop(0)
        found.append(adapter in reference)
        reference[adapter] = None
        reference.move_to_end(adapter)
        if len(reference) > capacity:
            reference.popitem(last=False)
        slots.end(adapter)

    for adapter in asked:
        waiting.append(adapter)
        predicted.append(slots.begin(adapter))
        for _ in range(min(len(waiting), next(ends, 1))):
            compute()
    while waiting:
        compute()
    assert predicted == found


def test_an_adapter_in_use_is_not_evicted() -> None:
    slots = AdapterSlots(2)
    slots.begin("a")
    slots.begin("b")
    slots.end("b")
    slots.begin("c")
    assert slots.loaded == ["a", "c"]  # the control is above: by use alone "a" would have gone
    assert not slots.has_slot("b")
    assert slots.has_slot("a")
    slots.end("a")
    assert slots.has_slot("b")


def test_what_an_engine_says_corrects_it() -> None:
    slots = AdapterSlots()
    assert slots.capacity == DEFAULT_SLOTS
    slots.record_loaded(["a", "b", "c", "d"])
    slots.correct(3, ["z"])
    assert (slots.capacity, slots.loaded) == (3, ["c", "d", "z"])
    slots.correct(2, ["p", "q", "r"])  # more than slots: some only wait
    assert (slots.capacity, slots.loaded) == (2, ["d", "z"])
    slots.correct(2, ["d"])  # that is no news, and no use of it
    assert slots.loaded == ["d", "z"]
    slots.correct(10**9, [])
    assert slots.capacity == MAX_SLOTS


@pytest.mark.parametrize("capacity", [0, -3])
def test_an_engine_has_one_slot_at_least(capacity: int) -> None:
    assert AdapterSlots(capacity).capacity == 1
