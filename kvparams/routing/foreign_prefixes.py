"""Estimates which engines hold prefixes that foreign proxies have sent, and makes such proxies agree on an engine.

Proxies that share nothing do not know each other's prompts. Each ranks the engines for a prompt by the same rule, from
the prompt alone: rendezvous hashing (Thaler and Ravishankar, 1998) of the first block that the proxy does not know. The
first of the ranking probably holds what foreign proxies have sent of this prompt. The estimate is in tokens, so the
policy weighs it against load as it weighs its own knowledge. There is no other preference, and load still decides.

How much such a prefix is worth is learnt from engines' reports: tokens that were cached although this proxy had never
sent them there. Where prompts have nothing in common, nothing is found and nothing is expected.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import xxhash

__all__ = ["ForeignHits", "PrefixBranches", "block_key", "rank_instances"]

_KEPT: Final = 0.98
"""The weight of earlier legs beside the next one: about the last 50 count."""
_LEAD: Final = 2.0
"""More lets queues grow at preferred engines where few prompts share prefixes."""
_HALF: Final = 0.01
"""The share of unknown tokens found at which the expectation is halved: so little may be found by accident."""
_PRIOR_TOKENS: Final = (4000.0, 1600.0)
"""Unknown tokens, and those of them found, that are assumed before the first report. Proxies start by agreeing, and
stop within a few dozen legs where nothing is found."""
_SHARED_BRANCHES: Final = 2
"""A prefix from which so many prompts have gone on differently belongs to no single conversation."""


def block_key(block: bytes) -> int:
    """Returns the key of a block for `rank_instances`. It has no secret: all proxies must compute the same."""
    return xxhash.xxh3_64_intdigest(block)


def rank_instances(ids: Sequence[str], cached: Sequence[int], key: int) -> list[int]:
    """Ranks instances by how probably foreign proxies have sent a prompt there.

    Args:
        ids: the instances.
        cached: tokens of the prompt that each is known to hold; more is better. Zeros where that does not matter.
        key: of the first unknown block. Equal instances are ranked by its rendezvous hash: when an instance comes or
            goes, the others keep their order.

    Returns:
        Indices into `ids`, the most probable first.
    """
    weights = [(-count, -xxhash.xxh3_64_intdigest(id.encode(), key), id) for count, id in zip(cached, ids, strict=True)]
    return sorted(range(len(ids)), key=weights.__getitem__)


class PrefixBranches:
    """Counts how often prompts have left a known prefix, for the prefixes that were used most recently."""

    __slots__ = ("_counts", "_most")

    def __init__(self, most: int = 1 << 16) -> None:
        self._counts = OrderedDict[int, int]()
        self._most = most

    def is_shared(self, last: int) -> bool:
        """Returns whether the prefix with this last block hash begins the prompts of several conversations."""
        return self._counts.get(last, 0) >= _SHARED_BRANCHES

    def record(self, last: int) -> None:
        """Records a prompt that goes on from the prefix with a block that was unknown."""
        self._counts[last] = self._counts.pop(last, 0) + 1
        if len(self._counts) > self._most:
            self._counts.popitem(last=False)


class ForeignHits:
    """Learns which share of tokens that a proxy has not sent to an engine the engine has cached nevertheless.

    The first of the ranking is one case, all other engines are another.
    """

    __slots__ = ("_asked", "_found")

    def __init__(self) -> None:
        asked, found = _PRIOR_TOKENS
        self._asked = [asked, asked]
        self._found = [found, 0.0]

    def expected_share(self, *, is_first: bool) -> float:
        """Returns the share of a prompt's unknown tokens to be expected in the cache of an engine.

        For the first of the ranking this is `_LEAD` times what was found: the more proxies agree on an engine, the more
        all of them find.
        """
        first, other = (found / asked for found, asked in zip(self._found, self._asked, strict=True))
        if not is_first:
            return other
        found = sum(self._found) / sum(self._asked)
        return min(1.0, _LEAD * max(first, found)) * found**2 / (found**2 + _HALF**2)

    def record(self, found: int, asked: int, *, is_first: bool) -> None:
        """Records a leg: of the tokens that were asked for and not known to be cached, so many were found."""
        index = 0 if is_first else 1
        self._found[index] = _KEPT * self._found[index] + found
        self._asked[index] = _KEPT * self._asked[index] + asked
