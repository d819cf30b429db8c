"""Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018), by highest random weight.

Each key has an order of preference over instances that no other instance's coming or going changes; it gets the first
that runs less than 5/4 of the mean. No table is kept, so several proxies choose alike and nothing grows.
"""

from collections.abc import Sequence
from typing import TypeVar

import xxhash

from kvparams.instances import Candidate

__all__ = ["choose_by_key"]

C = TypeVar("C", bound=Candidate)


def choose_by_key(candidates: Sequence[C], key: str) -> C:
    """Returns the first choice of the key that is not overloaded."""
    # ceil(5/4 of the mean, this leg counted): somebody is always below it
    bound = -(-5 * (sum(each.in_flight for each in candidates) + 1) // (4 * len(candidates)))
    seed = xxhash.xxh3_64_intdigest(key.encode())
    return max(
        (each for each in candidates if each.in_flight < bound),
        key=lambda each: (xxhash.xxh3_64_intdigest(each.instance.id.encode(), seed), each.instance.id),
    )
