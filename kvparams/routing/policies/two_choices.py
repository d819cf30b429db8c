"""Chooses the better of two random candidates.

This is nearly as even as the best of all, and several proxies that know little of each other do not all choose the same
one (Mitzenmacher, The Power of Two Choices, 2001).
"""

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import xxhash

from kvparams.instances import Candidate, RequestFacts
from kvparams.routing.policies.least_load import load_key

__all__ = ["TwoChoices"]

C = TypeVar("C", bound=Candidate)


class TwoChoices:
    """Two different ones at random, by a hash of request and turn; the less loaded of them."""

    def choose(self, candidates: Sequence[C], request: RequestFacts, turn: int) -> C:
        """The less loaded of two."""
        count = len(candidates)
        if count == 1:
            return candidates[0]
        drawn = xxhash.xxh3_64_intdigest(request.transfer_id.encode(), turn & 0xFFFF_FFFF)
        one = drawn % count
        other = (one + 1 + (drawn >> 32) % (count - 1)) % count
        return min(candidates[one], candidates[other], key=partial(load_key, request))
