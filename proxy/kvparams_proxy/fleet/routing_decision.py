"""Explains routing: the reasons for a prefill leg's instance, and the decision for a request now."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kvparams.instances import Instance
from kvparams.routing.ttft_estimate import TTFTEstimate
from kvparams_proxy.fleet.member import Member

__all__ = ["RouteExplanation", "RoutingDecision"]

_NAMED: Final = 8
"""Candidates that a decision names."""


class RoutingDecision(NamedTuple):
    """The reasons for the choice of a leg's instance."""

    chosen: Instance
    prompt_tokens: int
    """Of the prompt."""
    expected: TTFTEstimate
    candidates: Sequence[Instance]
    cached_tokens: Mapping[Instance, int]
    """Tokens that instances were believed to have; none where it is not named."""
    source: Instance | None = None
    """Whose memory it is to fetch from; None: from its store, or it fetches nothing."""

    def summary(self) -> str:
        """Returns a text for people: the chosen instance first, then those that were believed to have most."""
        it = self.expected
        whose = "" if self.source is None else f"from {self.source.id} "
        fetch = f"fetch {it.fetched_tokens} {whose}in {1000 * it.fetch_s:.0f} ms, " if it.fetched_tokens else ""
        named = sorted(self.candidates, key=lambda each: (-self.cached_tokens.get(each, 0), each.id))
        others = [each for each in named if each is not self.chosen]
        parts = [
            f"{self.chosen.id}: {it.cached_tokens} of {self.prompt_tokens} tokens cached, "
            f"wait {1000 * it.wait_s:.0f} ms, {fetch}compute {1000 * it.compute_s:.0f} ms"
        ]
        parts += [f"{each.id}: {self.cached_tokens.get(each, 0)} cached" for each in others[: _NAMED - 1]]
        if len(others) >= _NAMED:
            parts.append(f"{len(others) - _NAMED + 1} more")
        return "; ".join(parts)


class RouteExplanation(NamedTuple):
    """A decision, with the estimate for each candidate."""

    decision: RoutingDecision
    members: Sequence[Member]
    expected: Sequence[TTFTEstimate]
    sources: Sequence[Instance | None]
    """Whose memory each would fetch from."""
