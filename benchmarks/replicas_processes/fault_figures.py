"""Computes the figures of the run in which replicas come and go and the Valkey server is away. Pure.

Hits are compared with those of the same requests in the run of one replica, because the trace's own share of hits
changes with time.
"""

from collections.abc import Iterator
from typing import Final

from benchmarks.replicas_processes.figures import Figure, Run, relative_hits
from benchmarks.replicas_processes.load_generator import DealtRequest
from benchmarks.replicas_processes.scenarios import FaultTimes

__all__ = ["fault_figures"]

_WINDOW_S: Final = 10.0
_LEARN_S: Final = 2.0
"""For so long a new replica may ask the others."""
_JOIN: Final = "3 replicas, 3 join"
_KILL: Final = "6 replicas, 1 killed"
_OUTAGE: Final = "5 replicas, Valkey away"


def fault_figures(run: Run, times: FaultTimes, reference: Run) -> Iterator[Figure]:
    """Yields the figures, beside a run of one replica over the same trace."""
    yield from _join(run, times, reference)
    yield from _kill(run, times)
    yield from _outage(run, times, reference)


def _join(run: Run, times: FaultTimes, reference: Run) -> Iterator[Figure]:
    def hits_of_new(begin_s: float, end_s: float) -> float:
        def is_new(each: DealtRequest) -> bool:
            return begin_s <= each.at_s - times.joined.get(each.replica, float("inf")) < end_s

        return relative_hits(run.select(is_new), run.log, reference.log)

    first, last = min(times.joined.values()) + _WINDOW_S, max(times.joined.values()) + 2 * _WINDOW_S
    old = run.select(lambda each: each.replica not in times.joined and first <= each.at_s < last)
    old_hits = relative_hits(old, run.log, reference.log)
    new_hits = hits_of_new(_WINDOW_S, 2 * _WINDOW_S)
    yield Figure(_JOIN, "new replicas, first 2 s: hits / one", hits_of_new(0.0, _LEARN_S))
    yield Figure(_JOIN, "new replicas, 2 s to 10 s: hits / one", hits_of_new(_LEARN_S, _WINDOW_S))
    yield Figure(_JOIN, "new replicas, 10 s to 20 s: hits / one", new_hits)
    yield Figure(_JOIN, "old replicas, same time: hits / one", old_hits)
    yield Figure(_JOIN, "hits, new from 10 s to 20 s / old", new_hits / old_hits, ">= 0.95")


def _kill(run: Run, times: FaultTimes) -> Iterator[Figure]:
    failed = {each.number for each in run.failed}
    yield Figure(_KILL, "requests that it had not answered", len(times.lost))
    yield Figure(_KILL, "failed requests of other replicas", len(failed - times.lost), "<= 0")
    yield Figure(_KILL, "siblings right at all others after, s", times.siblings_right_after_s, "<= 3")
    yield Figure(_KILL, "legs too many at others, first second", times.legs_wrong_before_lease)
    yield Figure(_KILL, "legs too many at others, after 3 s", abs(times.legs_wrong_after_3_s), "<= 1")


def _outage(run: Run, times: FaultTimes, reference: Run) -> Iterator[Figure]:
    def hits(begin_s: float, end_s: float) -> float:
        return relative_hits(run.select(lambda each: begin_s <= each.at_s < end_s), run.log, reference.log)

    before = hits(_WINDOW_S, times.down_at)
    away = hits(times.down_at + _WINDOW_S, times.up_at)
    back_s = times.up_at + _WINDOW_S
    after = hits(back_s, back_s + _WINDOW_S)
    failed = sum(each.number not in times.lost and each.at_s >= times.down_at for each in run.failed)
    yield Figure(_OUTAGE, "failed requests", failed, "<= 0")
    yield Figure(_OUTAGE, "before: hits / one", before)
    yield Figure(_OUTAGE, "while it is away: hits / one", away)
    yield Figure(_OUTAGE, "first 10 s after: hits / one", hits(times.up_at, back_s))
    yield Figure(_OUTAGE, "10 s to 20 s after: hits / one", after)
    yield Figure(_OUTAGE, "hits, 10 s after / before", after / before, ">= 0.95")
