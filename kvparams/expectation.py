"""What is to be expected of a leg on an instance: the wait there, what is cached, what is fetched, what is computed.

The one rule: KV that a store or a peer has is fetched where that should be faster than computing it, and whoever asks
for an expectation gets the faster way.
"""

from typing import NamedTuple

from kvparams.scheduling import Candidate, RequestFacts

__all__ = ["Expectation", "expect"]


class Expectation(NamedTuple):
    """Of one leg on one instance."""

    wait_s: float
    """Until what was given to the instance before is done."""
    work_s: float
    """From then to the first token."""
    cached: int
    """Tokens that the instance holds."""
    fetched: int
    """Tokens after these whose KV it should fetch."""
    computed: int
    """The rest, at least one: the first token comes from the last one's."""

    @property
    def ttft_s(self) -> float:
        """From now to the first token."""
        return self.wait_s + self.work_s


def expect(candidate: Candidate, request: RequestFacts) -> Expectation:
    """What to expect of this request's leg on this candidate."""
    pace = candidate.pace
    tokens = request.tokens
    cached = request.cached.get(candidate.instance, 0)
    computed = max(1, tokens - cached)
    work_s = pace.speed.seconds(computed, tokens)
    fetched = request.stored - cached
    if fetched > 0:
        rest = max(1, tokens - request.stored)
        fetching_s = pace.speed.seconds(rest, tokens, fetched)
        if fetching_s < work_s:
            return Expectation(pace.wait_s, fetching_s, cached, fetched, rest)
    return Expectation(pace.wait_s, work_s, cached, 0, computed)
