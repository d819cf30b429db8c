"""Models the blocks that prefill engines may fetch instead of computing: those in stores and in other engines' memory.

What a leg computed on an engine with a store is in that store from when it has ended, for all that share it. What it
computed on an engine that lets others read (`kvparams.peer_reads`, learnt from its answers) is in its memory, for those
that read from others and may be paired with whom it may. An engine that was expected to fetch, and reports less, says
that whoever was to have it has it no longer.

Addresses are only stored here. Callers that pass one on compare it with its engine first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvparams.index.block_hashes import BlockHashes
from kvparams.index.prefix_index import PrefixIndex
from kvparams.index.routing_feed import RoutedRequest, RoutingFeed
from kvparams.instances import Instance, RequestFacts
from kvparams.routing.pairing import may_pair
from kvparams_proxy.fleet.member import Member

__all__ = ["FetchableTokens", "HeldTokens", "PeerMemory", "RemoteCacheModel", "SharedStore"]


@dataclass(frozen=True, slots=True)
class SharedStore:
    """A holder of blocks that several engines fetch from."""

    name: str


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """The memory that one engine keeps for others."""

    instance: Instance


HeldTokens = Mapping[SharedStore | PeerMemory, int]
"""Tokens of one prompt that each is believed to have."""


class FetchableTokens(NamedTuple):
    """The tokens that one engine can fetch of a prompt at most."""

    tokens: int
    holder: SharedStore | PeerMemory | None
    """None: nothing, from nobody."""


_NOWHERE: Final = FetchableTokens(0, None)


class RemoteCacheModel:
    """The remote caches of one fleet. Only `PrefixCacheModel` calls it."""

    def __init__(self, index: PrefixIndex, block_tokens: int, store: tuple[int, int], peer: tuple[int, int]) -> None:
        """Creates an empty model.

        Args:
            index: where it is kept who has what.
            block_tokens: of one block.
            store: blocks that a store is believed to hold at first, and at most.
            peer: the same of one engine's memory.
        """
        self._block_tokens = block_tokens
        self._stores = RoutingFeed(index, *store)
        self._peers = RoutingFeed(index, *peer)
        self._places: dict[Instance, tuple[Member, str]] = {}
        """Engines that read from others and let others read, and where."""

    def annotate_facts(self, members: Sequence[Member], facts: RequestFacts, held: HeldTokens) -> RequestFacts:
        """Returns facts that include the tokens each of these instances can fetch."""
        if not held or not members:
            return facts
        common = members[0].instance.store
        stored = 0 if common is None else held.get(SharedStore(common), 0)
        held = self._best_first(held)
        reached = {each.instance: self._reach(each.instance, held).tokens for each in members}
        return facts._replace(
            stored_tokens=stored,
            peer_stored_tokens={each: tokens for each, tokens in reached.items() if tokens != stored},
        )

    def fetchable_tokens(self, instance: Instance, held: HeldTokens) -> FetchableTokens:
        """Returns the tokens that the instance can fetch at most, and their holder."""
        return self._reach(instance, self._best_first(held))

    def _best_first(self, held: HeldTokens) -> HeldTokens:
        """Orders the holders: most tokens first, then the least busy.

        A prefix that all have is looked at once for all. An instance that has read from a holder can be read next.
        """
        if not self._places:
            return held
        return dict(sorted(held.items(), key=lambda each: (-each[1], self._busy(each[0]))))

    def _busy(self, who: SharedStore | PeerMemory) -> tuple[int, float]:
        place = self._places.get(who.instance) if isinstance(who, PeerMemory) else None
        return (0, 0.0) if place is None else (place[0].in_flight, place[0].backlog.ended)

    def _reach(self, instance: Instance, held: HeldTokens) -> FetchableTokens:
        best = _NOWHERE
        store = None if instance.store is None else SharedStore(instance.store)
        if store is not None and store in held:
            best = FetchableTokens(held[store], store)
        if instance in self._places:
            for who, tokens in held.items():
                if tokens <= best.tokens:
                    break
                if isinstance(who, PeerMemory) and self._reads(instance, who.instance):
                    return FetchableTokens(tokens, who)
        return best

    def _reads(self, instance: Instance, other: Instance) -> bool:
        place = self._places.get(other)
        return place is not None and other != instance and place[0].ready and may_pair(instance, other)

    def peer_address(self, instance: Instance) -> str | None:
        """Returns the address at which other engines can read the instance's memory, as it reports."""
        place = self._places.get(instance)
        return None if place is None else place[1]

    def record_peer_address(self, member: Member, address: str | None) -> None:
        """Records the address that an engine has reported with a leg's answer."""
        if address is not None:
            self._places[member.instance] = member, address
        elif member.instance in self._places:
            self.forget_instance(member.instance)

    def forget_instance(self, instance: Instance) -> None:
        """Forgets an instance that has left or restarted."""
        if self._places.pop(instance, None) is not None:
            self._peers.forget_worker(PeerMemory(instance))

    def record_leg(
        self, instance: Instance, reach: FetchableTokens, hashes: BlockHashes, now: float, found: int | None, grain: int
    ) -> None:
        """Records a leg that has ended well: its blocks are where its instance saves them.

        Args:
            instance: where it ran.
            reach: what it was to fetch; nothing, where it was to fetch nothing.
            hashes: of its blocks.
            now: the time.
            found: tokens that it need not compute, it says; None where it does not.
            grain: how exactly it says so.
        """
        where, wanted = reach.holder, reach.tokens // self._block_tokens
        if instance.store is not None:
            store = SharedStore(instance.store)
            routed = self._stores.record_routed(store, hashes, now)
            if where == store:
                self._correct(self._stores, routed, wanted, found, grain)
        if isinstance(where, PeerMemory) and where.instance in self._places:
            self._correct(self._peers, self._peers.record_routed(where, hashes[:wanted], now), wanted, found, grain)
        if instance in self._places:
            self._peers.record_routed(PeerMemory(instance), hashes, now)

    def _correct(self, feed: RoutingFeed, routed: RoutedRequest, wanted: int, found: int | None, grain: int) -> None:
        """Corrects the model with the tokens that were found at a holder."""
        size = self._block_tokens
        believed = min(len(routed.used), wanted)
        if found is not None and believed * size - found >= max(grain, size):
            feed.record_reported(routed._replace(used=routed.used[:believed]), found // size)
