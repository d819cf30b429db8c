"""A prompt and a prefill leg, as the prefix cache model sees them."""

from typing import NamedTuple, Protocol

from kvparams.index.block_hashes import BlockHashes
from kvparams.index.routing_feed import RoutedRequest
from kvparams.instances import Instance, RequestFacts
from kvparams_proxy.fleet.foreign_prefix_model import ForeignRank
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.remote_cache_model import FetchableTokens, HeldTokens
from kvparams_proxy.fleet.routing_decision import RoutingDecision

__all__ = ["PrefillLeg", "PrefillObserver", "PromptLookup"]


class PromptLookup(NamedTuple):
    """The state of the cache model for one prompt."""

    facts: RequestFacts
    hashes: BlockHashes | None
    """None where there are no token ids."""
    held: HeldTokens
    """By stores and peers."""


class PrefillLeg:
    """A running prefill leg, with the model's beliefs about it."""

    __slots__ = (
        "answered",
        "cached",
        "decision",
        "foreign_rank",
        "fresh",
        "hashes",
        "prompt_tokens",
        "reach",
        "routed",
        "sent",
        "settled",
        "told",
    )

    def __init__(self, decision: RoutingDecision, hashes: BlockHashes | None, reach: FetchableTokens) -> None:
        self.decision = decision
        self.hashes = hashes
        self.reach = reach
        """What its engine was believed to be able to fetch."""
        self.routed: RoutedRequest | None = None
        self.settled = 0
        """Blocks that were believed to be there, not only to come."""
        self.fresh = 0
        """The hash of the first block that it brings; 0 where it brings none."""
        self.foreign_rank: ForeignRank | None = None
        """The place of its engine among those that foreign proxies would choose; None while there are none."""
        self.answered = False
        """Whether it has ended well; then what its engine reports is here, as far as it does."""
        self.prompt_tokens: int | None = None
        self.cached: int | None = None
        self.sent = False
        """Whether its engine was sent to another one's memory."""
        self.told: str | None = None
        """Where its engine lets others read, it says."""


class PrefillObserver(Protocol):
    """Hears what this proxy's own prefill legs do, to tell other proxies."""

    def prefill_began(self, key: str, member: Member, leg: PrefillLeg) -> None:
        """Hears that a leg was given to an engine."""
        ...

    def prompt_computed(self, key: str, leg: PrefillLeg) -> None:
        """Hears that the prompt of a leg is computed that goes on with the answer."""
        ...

    def prefill_ended(self, key: str, member: Member, leg: PrefillLeg) -> None:
        """Hears that a leg has ended; `leg` has what its engine reported."""
        ...

    def blocks_routed(self, instance: Instance, hashes: BlockHashes, held: int) -> None:
        """Hears that an engine has these blocks, of which it was believed to have the first `held`."""
        ...
