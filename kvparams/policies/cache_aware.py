"""Whoever should answer first, when everybody counts who will have to wait for it.

For each candidate by itself: the seconds of work that wait there, then the seconds that this prompt takes there, less
for what its cache holds or what is fetched sooner than computed, at the speed that was learnt of it (`expect`). There
is no threshold between cache and load, because both are seconds, and no switch for all: each is judged on its own.

What computing this prompt takes is also what others wait for it. How many those are is what runs and waits now, on
average (Little's law: as many arrive during a stay as stay). So a second of work costs one second and that many more:
the busier everybody is, the more a cached prefix is worth; with nothing to do, only the own time counts.
"""

from collections.abc import Sequence
from typing import TypeVar

from kvparams.expectation import expect
from kvparams.policies.least_load import LeastLoad
from kvparams.policies.order import from_turn
from kvparams.scheduling import Candidate, RequestFacts, Role

__all__ = ["CacheAware"]

C = TypeVar("C", bound=Candidate)


class CacheAware:
    """Prefill by expected time to first token; decode, which has its KV fetched in any case, by load."""

    def __init__(self) -> None:
        self._by_load = LeastLoad()

    def choose(self, candidates: Sequence[C], request: RequestFacts, turn: int) -> C:
        """The candidate that costs the least time, its own and others'."""
        if candidates[0].instance.role is Role.DECODE:
            return self._by_load.choose(candidates, request, turn)
        behind = sum(each.in_flight for each in candidates) / len(candidates)
        best = candidates[0]
        least = (float("inf"), 0)
        for each in from_turn(candidates, turn):
            wait_s, fetch_s, work_s, *_ = expect(each, request)
            cost = max(wait_s, fetch_s) + work_s * (1.0 + behind), each.in_flight
            if cost < least:
                best, least = each, cost
        return best
