"""Tracks the sequence numbers of one source's batches: gaps, duplicates and restarts.

Publishers number their batches from 0 and forget them after a while; a publisher that was restarted begins at 0 again
and knows nothing of the blocks that its predecessor announced. A subscriber that joins late, or loses messages, asks
for a replay.

In doubt the source is cleared. Forgotten blocks are computed once more; wrong beliefs send requests to the wrong place
for as long as nobody notices.
"""

from array import array
from typing import Final, Literal, NamedTuple

from kvparams.kv_events.zmq_frames import MAX_SEQUENCE

__all__ = ["REMEMBERED_SEQUENCES", "SequenceCheck", "SequenceFinding", "SequenceTracker"]

REMEMBERED_SEQUENCES: Final = 4_096
"""Marks of batches that are kept to know one that comes twice; nobody may hold back more batches than that."""

SequenceFinding = Literal[
    "in_order",  # the next one; it counts as taken now
    "duplicate",  # taken before, or given up; drop it
    "gap",  # `missing` batches before it were lost: ask for a replay from `replay_from`, and hold this one back
    "restart",  # of another publisher: clear the source, then ask about this batch again
]


class SequenceCheck(NamedTuple):
    """A `SequenceCheck` says where a batch stands in its stream."""

    finding: SequenceFinding
    missing: int = 0
    """Batches in front of it that were never taken."""
    replay_from: int = 0
    """The number to ask for in a replay: of the last batch that was taken, whose mark shows that the publisher is still
    the same; where none was taken, the first that is expected."""


class SequenceTracker:
    """A `SequenceTracker` follows one source.

    The caller asks it about each batch in the order in which it wants to take them, replayed ones too.

    After a gap the caller feeds what the replay brings, then what it held back; those that both bring are duplicates.
    Where the replay cannot bring what is missing (the publisher has forgotten it, or there is none to ask), the caller
    clears the source and goes on with `resume`.

    A publisher that restarts while nobody listens, and comes to the very number that is expected before it is heard
    again, cannot be told from the old one by its numbers. So whoever has lost the connection asks for a replay from
    `last` before it goes on; a replay that does not bring that very batch is another publisher's, and `resume(0)`
    begins anew.
    """

    __slots__ = ("_first_held", "_given_up", "_marks", "_next", "_remembered", "_start")

    def __init__(self, remembered: int = REMEMBERED_SEQUENCES) -> None:
        """Creates a tracker that expects number 0.

        Args:
            remembered: how many marks are kept, 8 bytes each.

        Raises:
            ValueError: that is none.
        """
        if remembered < 1:
            raise ValueError("a tracker remembers one batch at least")
        self._remembered = remembered
        self._first_held: int | None = None
        self._begin(0, range(0))

    @property
    def next(self) -> int:
        """The number that is expected."""
        return self._next

    @property
    def last(self) -> int:
        """The number to ask a replay from, see `SequenceCheck.replay_from`."""
        return max(self._next - 1, self._start)

    def observe(self, sequence: int, mark: int | None = None) -> SequenceCheck:
        """Classifies the batch with this number.

        Args:
            sequence: from 0 to 2^64 - 2.
            mark: tells this batch from another one of the same number (`Batch.mark`, 64 bits). None: the stream never
                repeats itself, so a number that was taken before is another publisher's.

        Raises:
            ValueError: the number or the mark is out of range.
        """
        if not 0 <= sequence <= MAX_SEQUENCE or not 0 <= (mark or 0) < 2**64:
            raise ValueError("a number or a mark out of range")
        if sequence > self._next:
            self._first_held = sequence if self._first_held is None else min(self._first_held, sequence)
            return SequenceCheck("gap", sequence - self._next, self.last)
        if sequence == self._next:
            self._take(sequence, mark or 0)
            return SequenceCheck("in_order")
        if sequence in self._given_up or (mark is not None and self._mark_of(sequence) == mark):
            return SequenceCheck("duplicate")
        self._begin(0, range(0))
        return SequenceCheck("restart")

    def resume(self, sequence: int) -> None:
        """Skips to `sequence`, which is expected next; the caller has cleared the source.

        What has come since the gap and lies before `sequence` may still come again, and is dropped as a duplicate.
        """
        self._begin(sequence, range(sequence if self._first_held is None else self._first_held, sequence))

    def _begin(self, sequence: int, given_up: range) -> None:
        self._start = self._next = sequence
        self._marks = array("Q")
        self._given_up = given_up
        self._first_held = None

    def _take(self, sequence: int, mark: int) -> None:
        if len(self._marks) < self._remembered:
            self._marks.append(mark)
        else:
            self._marks[(sequence - self._start) % self._remembered] = mark
        self._next += 1
        self._first_held = None

    def _mark_of(self, sequence: int) -> int | None:
        """Returns the mark of a batch that was taken, or None if that is too long ago."""
        if self._next - sequence > len(self._marks):
            return None
        return self._marks[(sequence - self._start) % self._remembered]
