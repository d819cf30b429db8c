"""Chooses the instance with the least load."""

from collections.abc import Sequence
from typing import TypeVar

from kvparams.instances import Candidate, RequestFacts
from kvparams.routing.policies.rotation import rotate_candidates

__all__ = ["LeastLoad", "load_key"]

C = TypeVar("C", bound=Candidate)


def load_key(candidate: Candidate) -> tuple[int, int]:
    """Legs, then prompt tokens: less is sooner free."""
    return candidate.in_flight, candidate.tokens


class LeastLoad:
    """The fewest legs; of those the fewest prompt tokens; of those the next in turn."""

    def choose(self, candidates: Sequence[C], request: RequestFacts, turn: int) -> C:
        """The least loaded candidate, whatever the request."""
        return min(rotate_candidates(candidates, turn), key=load_key)
