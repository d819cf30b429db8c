"""A conversation stays where it was."""

from collections.abc import Sequence
from typing import TypeVar

from kvparams.instances import Candidate, RequestFacts
from kvparams.routing.policies.bounded_hash import choose_by_key
from kvparams.routing.policies.least_load import LeastLoad

__all__ = ["SessionAffinity"]

C = TypeVar("C", bound=Candidate)


class SessionAffinity:
    """The first choice of the conversation, by a hash with bounded loads; without a conversation, the least load."""

    def __init__(self) -> None:
        self._elsewhere = LeastLoad()

    def choose(self, candidates: Sequence[C], request: RequestFacts, turn: int) -> C:
        """The first choice of the request's conversation that is not overloaded."""
        if not request.session:
            return self._elsewhere.choose(candidates, request, turn)
        return choose_by_key(candidates, f"{request.tenant}\n{request.session}")
