"""Models what foreign proxies have sent to engines, for one fleet: `kvparams.routing.foreign_prefixes`.

It is active only while engines have foreign load, so a proxy that is alone routes as if this did not exist.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvparams.index.block_hashes import BlockHashes, token_array
from kvparams.instances import RequestFacts
from kvparams.routing.foreign_prefixes import ForeignHits, PrefixBranches, block_key, rank_instances
from kvparams_proxy.fleet.member import Member

__all__ = ["ForeignPrefixModel", "ForeignRank"]


class ForeignRank(NamedTuple):
    """The place of a leg's engine in the ranking of its prompt."""

    is_first: bool
    known_tokens: int
    """Tokens that the engine was known to hold."""
    most_tokens: int
    """Tokens that it could hold at most."""


class ForeignPrefixModel:
    """The expected prefixes of foreign proxies. Only `PrefixCacheModel` calls it."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens: Final = block_tokens
        self._branches = PrefixBranches()
        self._hits = ForeignHits()

    def annotate_facts(self, members: Sequence[Member], facts: RequestFacts, hashes: BlockHashes) -> RequestFacts:
        """Returns facts that include the tokens that engines are expected to hold from foreign proxies.

        The mapping begins with the first of the ranking.
        """
        order = self._rank(members, facts, hashes)
        if not order:
            return facts
        first, others = (self._hits.expected_share(is_first=each) for each in (True, False))
        most = self._most_tokens(facts)
        expected = {
            each.instance: int((others if place else first) * max(0, most - facts.cached_tokens.get(each.instance, 0)))
            for place, each in enumerate(order)
        }
        return facts._replace(foreign_cached_tokens=expected)

    def begin_leg(self, chosen: Member, facts: RequestFacts, hashes: BlockHashes) -> ForeignRank | None:
        """Records a leg. Returns its place in the ranking of `annotate_facts`, or None where that made none."""
        if not facts.foreign_cached_tokens:
            return None
        known = self._known_blocks(facts)
        if 0 < known < len(hashes):
            self._branches.record(int(hashes[known - 1]))
        first = next(iter(facts.foreign_cached_tokens))
        cached = facts.cached_tokens.get(chosen.instance, 0)
        return ForeignRank(chosen.instance is first, cached, self._most_tokens(facts))

    def record_report(self, rank: ForeignRank | None, cached: int | None) -> None:
        """Records the tokens that the engine of a leg has reported as cached. Nothing is learnt where one is None."""
        if rank is None or cached is None:
            return
        asked = rank.most_tokens - rank.known_tokens
        if asked > 0:
            found = min(asked, max(0, cached - rank.known_tokens))
            self._hits.record(found, asked, is_first=rank.is_first)

    def _rank(self, members: Sequence[Member], facts: RequestFacts, hashes: BlockHashes) -> list[Member]:
        """Ranks the members. Returns nothing while no foreign load has been seen, or without a full block."""
        if not len(hashes) or not any(each.backlog.is_shared for each in members):
            return []
        known = self._known_blocks(facts)
        is_shared = known > 0 and self._branches.is_shared(int(hashes[known - 1]))
        # Conversations with a common beginning are spread over all engines: each proxy knows others that hold it.
        cached = [0 if is_shared else facts.cached_tokens.get(each.instance, 0) for each in members]
        key = self._key(facts, min(known, len(hashes) - 1))
        return [members[index] for index in rank_instances([each.instance.id for each in members], cached, key)]

    def _key(self, facts: RequestFacts, block: int) -> int:
        """Returns the key of a block. It is made of its tokens, since the block hashes of proxies differ."""
        ids = facts.token_ids if facts.routing_ids is None else facts.routing_ids
        assert ids is not None  # there are hashes of them
        size = self._block_tokens
        tokens = token_array(ids[block * size : (block + 1) * size])
        return block_key(tokens.astype("<u4").tobytes())

    def _known_blocks(self, facts: RequestFacts) -> int:
        """Returns the blocks of the prompt that this proxy knows some engine to hold."""
        return max(facts.cached_tokens.values(), default=0) // self._block_tokens

    def _most_tokens(self, facts: RequestFacts) -> int:
        return (facts.prompt_tokens - 1) // self._block_tokens * self._block_tokens
