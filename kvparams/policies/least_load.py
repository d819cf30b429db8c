"""Whoever has the least to do."""

from collections.abc import Sequence
from typing import TypeVar

from kvparams.policies.order import from_turn
from kvparams.scheduling import Candidate, RequestFacts

__all__ = ["LeastLoad", "load"]

C = TypeVar("C", bound=Candidate)


def load(candidate: Candidate) -> tuple[int, int]:
    """Legs, then prompt tokens: less is sooner free."""
    return candidate.in_flight, candidate.tokens


class LeastLoad:
    """The fewest legs; of those the fewest prompt tokens; of those the next in turn."""

    def choose(self, candidates: Sequence[C], request: RequestFacts, turn: int) -> C:
        """The least loaded candidate, whatever the request."""
        return min(from_turn(candidates, turn), key=load)
