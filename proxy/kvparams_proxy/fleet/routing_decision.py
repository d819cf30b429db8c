"""Explains routing: the reasons for a prefill leg's instance, and the decision for a request now."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from kvparams.instances import Instance
from kvparams.routing.ttft_estimate import TTFTEstimate
from kvparams_proxy.fleet.member import Member

if TYPE_CHECKING:
    from kvparams.index.block_hashes import BlockHashes

__all__ = ["CacheExplanation", "RouteExplanation", "RoutingDecision"]

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
    hashes: "BlockHashes | None" = None
    """The hashes of the prompt's blocks; None where there are no token ids, or another proxy decided."""

    def in_engine_tokens(self, tokens: int, engine_prompt_tokens: int | None) -> int:
        """Converts a number of this decision's tokens to the engine's own.

        The two differ where the proxy does not have the engine's ids, for example with `--tokenizer bytes`.

        Args:
            tokens: a number of tokens by which the decision was made.
            engine_prompt_tokens: the length of the prompt as the engine reports it; None converts nothing.
        """
        if engine_prompt_tokens is None or not self.prompt_tokens or engine_prompt_tokens == self.prompt_tokens:
            return tokens
        return tokens * engine_prompt_tokens // self.prompt_tokens

    def summary(self, engine_prompt_tokens: int | None = None) -> str:
        """Returns a text for people: the chosen instance first, then those that were believed to have most.

        Its numbers of tokens are the engine's own if `engine_prompt_tokens` is known, as in the request log.
        """
        it, convert = self.expected, partial(self.in_engine_tokens, engine_prompt_tokens=engine_prompt_tokens)
        whose = "" if self.source is None else f"from {self.source.id} "
        fetched = convert(it.fetched_tokens)
        load = f"load the adapter in {1000 * it.load_s:.0f} ms, " if it.load_s else ""
        fetch = f"fetch {fetched} {whose}in {1000 * it.fetch_s:.0f} ms, " if it.fetched_tokens else ""
        named = sorted(self.candidates, key=lambda each: (-self.cached_tokens.get(each, 0), each.id))
        others = [each for each in named if each is not self.chosen]
        parts = [
            f"{self.chosen.id}: {convert(it.cached_tokens)} of {convert(self.prompt_tokens)} tokens cached, "
            f"wait {1000 * it.wait_s:.0f} ms, {fetch}{load}compute {1000 * it.compute_s:.0f} ms"
        ]
        parts += [f"{each.id}: {convert(self.cached_tokens.get(each, 0))} cached" for each in others[: _NAMED - 1]]
        if len(others) >= _NAMED:
            parts.append(f"{len(others) - _NAMED + 1} more")
        return "; ".join(parts)


class RouteExplanation(NamedTuple):
    """The choice for a request now, and the candidates in their order."""

    chosen: Instance
    members: Sequence[Member]
    by_cache: "CacheExplanation | None" = None
    """None where the policy ignores caches."""
    waits: bool = False
    """Whether the request would wait for room. Then the choice is that among all that could run it."""
    excluded: Mapping[str, str] = {}
    """Why the request would not be given to a candidate now, by id."""


class CacheExplanation(NamedTuple):
    """A decision by what engines have cached, with the estimate for each candidate."""

    decision: RoutingDecision
    expected: Sequence[TTFTEstimate]
    sources: Sequence[Instance | None]
    """Whose memory each would fetch from."""
