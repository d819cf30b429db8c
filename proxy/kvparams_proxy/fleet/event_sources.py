"""The engines that publish KV events, and what the prefix index believes because of them."""

from collections.abc import Callable, Iterator
from typing import Final

from kvparams.index.block_hashes import BlockHasher, BlockHashes
from kvparams.index.event_feed import EventFeed, IndexChange
from kvparams.index.holder_sets import LEVELS
from kvparams.index.prefix_index import PrefixIndex
from kvparams.index.routing_feed import RoutingFeed
from kvparams.instances import Instance
from kvparams.kv_events.model import EventBatch
from kvparams_proxy.fleet.member import Member

__all__ = ["EventSources"]

_NAMES: Final = 1 << 20
"""Of engines' own blocks, of 16 tokens mostly: some 50 MiB when all are used, and engines publish events."""


class EventSources:
    """The engines of one fleet that publish KV events. `KVEventConsumer` brings the events."""

    def __init__(
        self,
        index: PrefixIndex,
        chain: BlockHasher,
        routing: RoutingFeed,
        namespace: Callable[[str, str | None, str | None], int],
        now: Callable[[], float],
    ) -> None:
        """Creates an empty set. `routing` believes no longer what an engine says is gone."""
        self._events = EventFeed(index, chain, _NAMES, namespace=namespace, gone=self._gone)
        self._index = index
        self._routing = routing
        self._now = now
        self._replays: dict[Member, Callable[[], None]] = {}

    @property
    def unplaced_blocks(self) -> int:
        """The number of reported blocks that could not be placed."""
        return self._events.unplaced

    def __contains__(self, member: Member) -> bool:
        """Returns whether the member says itself what it has."""
        return member in self._replays

    def add(self, member: Member, replay: Callable[[], None]) -> None:
        """Adds an engine that publishes events. `replay` is called when it has to publish everything again."""
        self._replays[member] = replay

    def apply(self, member: Member, batch: EventBatch | None, model: str) -> None:
        """Applies events of an engine. None invalidates all earlier ones."""
        if batch is None:
            self._events.clear(member)
        else:
            self._events.apply(batch, member, model, self._now())

    def watch_changes(self, changed: Callable[[IndexChange], None]) -> None:
        """Tells `changed` from now on what events change; workers are members."""
        self._events.changed = changed

    def apply_change(self, change: IndexChange) -> None:
        """Applies what another proxy's events have changed; the worker is a member.

        Raises:
            ValueError: the change cannot be.
        """
        self._events.apply_change(change, self._now())

    def contents(self, member: Member) -> Iterator[tuple[int, BlockHashes, BlockHashes]]:
        """Yields the blocks that an engine has by its events: levels, blocks, and the blocks in front of them."""
        for level in range(LEVELS):
            for hashes, parents in self._index.contents(member, level):
                yield level, hashes, parents

    def record_contents(self, member: Member, level: int, hashes: BlockHashes, parents: BlockHashes) -> None:
        """Believes what another proxy's `contents` says.

        Raises:
            ValueError: a hash stands there twice, or is 0, or there is no such level.
        """
        self._index.stored_forest(member, hashes, parents, self._now(), level)

    def remove(self, member: Member) -> None:
        """Removes an engine that publishes events no longer."""
        if self._replays.pop(member, None) is not None:
            self._events.forget_worker(member)

    def forget_instance(self, instance: Instance) -> None:
        """Forgets the blocks of an instance that has left or restarted, and asks for a replay."""
        for member, replay in self._replays.items():
            if member.instance is instance:
                self._events.forget_worker(member)
                replay()

    def _gone(self, who: object, hashes: BlockHashes | None) -> None:
        """Handles the eviction of blocks, or of all blocks, by an engine: holders that depended on them are removed."""
        if isinstance(who, Member) and hashes is None:
            self._routing.forget_worker(who.instance)
        elif isinstance(who, Member) and hashes is not None:
            self._routing.record_removed(who.instance, hashes)
