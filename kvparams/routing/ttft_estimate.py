"""Estimates the time to first token of a leg on an instance: waiting, fetching, loading an adapter, computing.

KV that a store or a peer has is fetched if the first token should come sooner than by computing it, and the estimate
takes that way. Fetching begins at once, beside the work that waits.
"""

from typing import NamedTuple

from kvparams.instances import Candidate, RequestFacts

__all__ = ["TTFTEstimate", "estimate_ttft"]


class TTFTEstimate(NamedTuple):
    """A `TTFTEstimate` is the estimate for one leg on one instance."""

    wait_s: float
    """Until what was given to the instance before is done."""
    fetch_s: float
    """Until what is fetched is there."""
    compute_s: float
    """Of computing, once both are over."""
    cached_tokens: int
    """Tokens that the instance is believed to hold. Those expected from foreign proxies are not among them."""
    fetched_tokens: int
    """Tokens after these whose KV it should fetch."""
    computed_tokens: int
    """The rest that should have to be computed, at least one: the first token comes from the last one's."""
    load_s: float = 0.0
    """The time to load the request's LoRA adapter, before computing; 0 where the instance should have it."""

    @property
    def busy_s(self) -> float:
        """The seconds that the instance can do nothing else: engines load adapters between their steps."""
        return self.load_s + self.compute_s

    @property
    def ttft_s(self) -> float:
        """From now to the first token."""
        return max(self.wait_s, self.fetch_s) + self.load_s + self.compute_s


def estimate_ttft(candidate: Candidate, request: RequestFacts) -> TTFTEstimate:
    """Estimates the time to first token of this request's leg on this candidate."""
    pace = candidate.backlog
    speed = pace.cost_model
    wait_s = pace.wait_s
    tokens = request.prompt_tokens
    cached = request.cached_tokens.get(candidate.instance, 0)
    held = cached + request.foreign_cached_tokens.get(candidate.instance, 0)
    load_s = request.adapter_load_s.get(candidate.instance, 0.0)
    computed = max(1, tokens - held)
    work_s = speed.predict_s(computed, tokens)
    stored = request.peer_stored_tokens.get(candidate.instance, request.stored_tokens)
    fetched = stored - held
    if fetched > 0:
        fetch_s = pace.expected_fetch_s(fetched)
        rest = max(1, tokens - stored)
        rest_s = speed.predict_s(rest, tokens)
        if max(wait_s, fetch_s) + rest_s < wait_s + work_s:
            return TTFTEstimate(wait_s, fetch_s, rest_s, cached, stored - cached, rest, load_s)
    return TTFTEstimate(wait_s, 0.0, work_s, cached, 0, computed, load_s)
