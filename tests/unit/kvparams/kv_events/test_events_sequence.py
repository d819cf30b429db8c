"""Tests gaps, duplicates and restarts of event streams; a user who follows the tracker believes nothing false."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvparams.kv_events.sequence_tracker import SequenceCheck, SequenceTracker


def fed(*numbers: int, remembered: int = 8) -> SequenceTracker:
    """A tracker that has taken these, with marks 100 higher."""
    tracker = SequenceTracker(remembered)
    for number in numbers:
        assert tracker.observe(number, 100 + number) == SequenceCheck("in_order")
    return tracker


def test_one_after_another_is_in_order() -> None:
    """Spec-mandated, 1.0#14.12."""
    assert fed(*range(100)).next == 100


def test_a_gap_says_how_much_is_missing_and_takes_nothing() -> None:
    """Spec-mandated, 1.0#14.12: the replay begins with the last one taken, so that its mark can be compared."""
    tracker = fed(0, 1, 2)
    assert tracker.observe(5, 105) == SequenceCheck("gap", 2, 2)
    assert tracker.observe(6, 106) == SequenceCheck("gap", 3, 2)
    assert tracker.observe(2, 102) == SequenceCheck("duplicate")
    for number in (3, 4, 5, 6):
        assert tracker.observe(number, 100 + number) == SequenceCheck("in_order")
    assert tracker.observe(5, 105) == SequenceCheck("duplicate")


def test_who_joins_late_misses_what_came_before() -> None:
    """Spec-mandated, 1.0#14.12."""
    assert SequenceTracker().observe(3, 1) == SequenceCheck("gap", 3, 0)


def test_another_batch_of_a_number_that_was_taken_is_a_restart() -> None:
    """Spec-mandated, 1.0#14.13: nothing is taken, and all of the new publisher's batches are asked for."""
    tracker = fed(0, 1, 2)
    assert tracker.observe(1, 999) == SequenceCheck("restart")
    assert tracker.next == 0
    assert tracker.observe(1, 999) == SequenceCheck("gap", 1, 0)
    assert tracker.observe(0, 998) == SequenceCheck("in_order")
    assert tracker.observe(1, 999) == SequenceCheck("in_order")
    assert tracker.observe(0, 100) == SequenceCheck("restart")


def test_what_is_too_old_to_be_known_is_a_restart() -> None:
    """Spec-mandated, 1.0#14.13: in doubt the source is cleared."""
    tracker = fed(*range(20), remembered=8)
    assert tracker.observe(12, 112) == SequenceCheck("duplicate")
    assert tracker.observe(11, 111) == SequenceCheck("restart")


def test_a_stream_without_marks_never_repeats_itself() -> None:
    """Spec-mandated, 1.0#14.13."""
    tracker = SequenceTracker()
    assert tracker.observe(0) == tracker.observe(1) == SequenceCheck("in_order")
    assert tracker.observe(1) == SequenceCheck("restart")


def test_what_cannot_be_replayed_is_given_up() -> None:
    """Spec-mandated, 1.0#14.14: after the source was cleared; what came before is no duplicate of anything then."""
    tracker = fed(0, 1)
    tracker.resume(7)
    assert (tracker.next, tracker.last) == (7, 7)
    assert tracker.observe(7, 107) == SequenceCheck("in_order")
    assert tracker.observe(9, 109) == SequenceCheck("gap", 1, 7)
    assert tracker.observe(1, 101) == SequenceCheck("restart")


def test_what_was_given_up_may_still_come() -> None:
    """Spec-mandated, 1.0#14.14: a replay can be ahead of live batches; what lies before the gap is no part of it."""
    tracker = fed(0, 1)
    assert tracker.observe(4, 104).finding == "gap"
    tracker.resume(7)
    assert tracker.observe(7, 107) == SequenceCheck("in_order")
    assert [tracker.observe(number, 0).finding for number in (4, 5, 6)] == ["duplicate"] * 3
    assert tracker.observe(3, 103) == SequenceCheck("restart")


def test_numbers_out_of_range_are_a_mistake_of_the_caller() -> None:
    tracker = SequenceTracker()
    for number, mark in ((-1, 0), (2**64 - 1, 0), (0, -1), (0, 2**64)):
        with pytest.raises(ValueError, match="out of range"):
            tracker.observe(number, mark)
    with pytest.raises(ValueError, match="one batch"):
        SequenceTracker(0)


class Following(RuleBasedStateMachine):
    """A publisher that forgets and restarts, a network that loses, and a subscriber that does as the tracker says.

    The oracle is naive: every batch has a serial number that no other batch ever has. What the subscriber has taken
    since it last cleared must be what one publisher said without a gap, once each and in order. Without gaps to the
    beginning, unless the publisher itself had forgotten.
    """

    remembered = 4
    buffered = 3
    """What the publisher keeps for replays."""

    def __init__(self) -> None:
        super().__init__()
        self.serial = 0
        self.said: list[int] = []
        """The serial numbers of the publisher that runs now."""
        self.lives: list[list[int]] = [self.said]
        self.heard = 0
        """How many of them have been sent to the subscriber, or lost."""
        self.connected = True
        self.tracker = SequenceTracker(self.remembered)
        self.taken: list[int] = []
        self.began = 0

    def offer(self, number: int, mark: int) -> SequenceCheck:
        order = self.tracker.observe(number, mark)
        if order.finding == "restart":
            self.taken, self.began = [], 0
            order = self.tracker.observe(number, mark)
            assert order.finding != "restart"
        if order.finding == "in_order":
            self.taken.append(mark)
        return order

    def catch_up(self, first: int) -> None:
        """Ask for a replay: all that the publisher still has from `first` on."""
        kept = range(max(first, len(self.said) - self.buffered), len(self.said))
        for number in kept:
            order = self.offer(number, self.said[number])
            if order.finding == "gap" and order.replay_from < first:  # of another publisher: all that it said
                self.catch_up(order.replay_from)
                return
            if order.finding == "gap":  # what is missing is forgotten
                self.taken, self.began = [], number
                self.tracker.resume(number)
                assert self.offer(number, self.said[number]).finding == "in_order"

    def reconnect(self) -> None:
        """As the tracker asks: a replay from the last one before anything else."""
        last = self.tracker.last
        if self.tracker.next and not max(0, len(self.said) - self.buffered) <= last < len(self.said):
            self.taken, self.began = [], 0
            self.tracker.resume(0)
        self.catch_up(last)

    @rule(batches=st.integers(1, 6))
    def publish(self, batches: int) -> None:
        for _ in range(batches):
            self.said.append(self.serial)
            self.serial += 1

    @rule()
    def restart(self) -> None:
        """Whoever is connected sees the connection break."""
        self.said = []
        self.lives.append(self.said)
        self.heard = 0
        self.connected = False

    @rule()
    def break_off(self) -> None:
        self.connected = False

    @rule()
    def lose(self) -> None:
        self.heard = min(self.heard + 1, len(self.said))

    @precondition(lambda self: self.heard < len(self.said))
    @rule()
    def deliver(self) -> None:
        if not self.connected:
            self.connected = True
            self.reconnect()
        number = self.heard
        self.heard += 1
        order = self.offer(number, self.said[number])
        if order.finding == "gap":
            self.catch_up(order.replay_from)
            assert self.offer(number, self.said[number]).finding == "duplicate"

    @rule()
    def repeat(self) -> None:
        """The network brings the last one again."""
        if self.connected and 0 < self.heard == len(self.said) == self.tracker.next:
            assert self.offer(self.heard - 1, self.said[-1]).finding == "duplicate"

    @invariant()
    def what_was_taken_is_one_publisher_without_a_gap(self) -> None:
        assert any(life[self.began : self.began + len(self.taken)] == self.taken for life in self.lives)


class Careless(Following):
    """A subscriber that asks nobody after its connection broke."""

    def reconnect(self) -> None:
        pass


QUICK = settings(stateful_step_count=20)


def test_who_follows_the_tracker_never_believes_two_publishers() -> None:
    """Spec-mandated, 1.0#14.12 to 1.0#14.14."""
    run_state_machine_as_test(Following, settings=QUICK)  # pyright: ignore[reportUnknownMemberType]


@pytest.mark.slow
def test_who_follows_the_tracker_never_believes_two_publishers_for_long(effort: Callable[[int, int], int]) -> None:
    long = settings(max_examples=effort(300, 20_000), stateful_step_count=80, deadline=None)
    run_state_machine_as_test(Following, settings=long)  # pyright: ignore[reportUnknownMemberType]


@pytest.mark.parametrize(("kind", "believes"), [(Following, [2, 3, 4]), (Careless, [0, 1, 4])])
def test_the_machine_sees_what_the_tracker_warns_of(kind: type[Following], believes: list[int]) -> None:
    """The control: a publisher comes back at the number that is expected, and only a replay tells that it is new."""
    machine = kind()
    machine.publish(2)
    machine.deliver()
    machine.deliver()
    machine.restart()
    machine.publish(3)
    machine.lose()
    machine.lose()
    machine.deliver()
    assert machine.taken == believes
    if kind is Careless:
        with pytest.raises(AssertionError):
            machine.what_was_taken_is_one_publisher_without_a_gap()
