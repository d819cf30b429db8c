"""A conversation stays where it was."""

from collections.abc import Sequence
from typing import TypeVar

import xxhash

from kvparams.instances import Candidate, RequestFacts
from kvparams.routing.policies.least_load import LeastLoad

__all__ = ["SessionAffinity"]

C = TypeVar("C", bound=Candidate)


class SessionAffinity:
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018), by highest random weight.

    Each conversation has an order of preference over instances that no other instance's coming or going changes; it
    gets the first that runs less than 5/4 of the mean. No table is kept, so several proxies choose alike and nothing
    grows. What belongs to no conversation goes where the least runs.
    """

    def __init__(self) -> None:
        self._elsewhere = LeastLoad()

    def choose(self, candidates: Sequence[C], request: RequestFacts, turn: int) -> C:
        """The first choice of the request's conversation that is not overloaded."""
        if not request.session:
            return self._elsewhere.choose(candidates, request, turn)
        # ceil(5/4 of the mean, this leg counted): somebody is always below it
        bound = -(-5 * (sum(each.in_flight for each in candidates) + 1) // (4 * len(candidates)))
        conversation = xxhash.xxh3_64_intdigest(f"{request.tenant}\n{request.session}".encode())
        return max(
            (each for each in candidates if each.in_flight < bound),
            key=lambda each: (xxhash.xxh3_64_intdigest(each.instance.id.encode(), conversation), each.instance.id),
        )
