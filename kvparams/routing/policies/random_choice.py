"""Anybody."""

from collections.abc import Sequence
from typing import TypeVar

import xxhash

from kvparams.instances import Candidate, RequestFacts

__all__ = ["RandomChoice"]

C = TypeVar("C", bound=Candidate)


class RandomChoice:
    """Everyone alike often. The die is a hash of request and turn: what was chosen can be computed again."""

    def choose(self, candidates: Sequence[C], request: RequestFacts, turn: int) -> C:
        """Any candidate, whatever its load."""
        return candidates[xxhash.xxh3_64_intdigest(request.transfer_id.encode(), turn & 0xFFFF_FFFF) % len(candidates)]
