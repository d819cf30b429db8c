"""Chooses the instance with the least load."""

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from kvparams.instances import Candidate, RequestFacts
from kvparams.routing.policies.rotation import rotate_candidates

__all__ = ["LeastLoad", "load_key"]

C = TypeVar("C", bound=Candidate)


def load_key(request: RequestFacts, candidate: Candidate) -> tuple[int, bool, int]:
    """Legs, then whether the request's LoRA adapter has to be loaded, then prompt tokens: less is sooner free."""
    return candidate.in_flight, candidate.instance in request.adapter_load_s, candidate.tokens


class LeastLoad:
    """The fewest legs; of those who has the request's adapter; of those the fewest prompt tokens, then in turn."""

    def choose(self, candidates: Sequence[C], request: RequestFacts, turn: int) -> C:
        """The least loaded candidate."""
        return min(rotate_candidates(candidates, turn), key=partial(load_key, request))
