"""A picture goes to the encode engine that had it before: the policy of encode legs, whatever that of others is."""

from collections.abc import Sequence
from typing import TypeVar

from kvparams.instances import Candidate, RequestFacts
from kvparams.routing.policies.bounded_hash import choose_by_key

__all__ = ["MediaAffinity"]

C = TypeVar("C", bound=Candidate)


class MediaAffinity:
    """The first choice of the request's first medium, by a hash with bounded loads: its encoding may be cached."""

    def choose(self, candidates: Sequence[C], request: RequestFacts, turn: int) -> C:
        """The first choice of the request's first medium that is not overloaded."""
        return choose_by_key(candidates, request.media)
