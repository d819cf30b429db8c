"""Shares what prefill engines are believed to have cached, and the work that waits there.

Each proxy tells its prefill legs when they begin and end, and the others run their cache model with these legs as with
their own: so all learn the same speeds, the same prefixes and the same corrections. Of a prompt's blocks only those are
told that the engine was not believed to have; the reader finds those in front in its own index.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final, NamedTuple

from kvparams.index.block_hashes import BlockHashes, join_hashes, pack_hashes, unpack_hashes
from kvparams.index.event_feed import IndexChange
from kvparams.instances import Instance
from kvparams.replication.entries import (
    BlocksChanged,
    BlocksHeld,
    BlocksRouted,
    Entry,
    PrefillBegan,
    PrefillEnded,
    PrefillLoadsAdapter,
    PromptComputed,
)
from kvparams.replication.siblings import Sibling
from kvparams.routing.ttft_estimate import TTFTEstimate
from kvparams_proxy.coordination.load_sync import EngineNames
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.prefill_leg import PrefillLeg
from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel
from kvparams_proxy.fleet.remote_cache_model import FetchableTokens, SharedStore
from kvparams_proxy.fleet.routing_decision import RoutingDecision

__all__ = ["PrefixSync"]

_PIECE: Final = 4000
"""Blocks in one entry."""
_MOST_RECENT: Final = 1 << 18
"""Blocks of recent prompts that are remembered: 2 MiB, some minutes of a busy proxy."""
_MOST_PROMPTS: Final = 1 << 15
"""Such prompts: each takes some 250 bytes beside its blocks."""
_MOST_LEGS: Final = 1 << 16
"""Of one sibling that run at a time; of more, nothing is believed."""


class _RecentPrompt(NamedTuple):
    """A `_RecentPrompt` is a prompt that an engine has computed for this proxy."""

    at: float
    engine: int
    hashes: BlockHashes


class PrefixSync:
    """Tells this proxy's prefill legs (`PrefillObserver`), and applies those of siblings."""

    def __init__(
        self, model: PrefixCacheModel, names: EngineNames, publish: Callable[[Entry], None], now: Callable[[], float]
    ) -> None:
        """`model` tells its legs to this object from now on.

        Args:
            model: what is shared.
            names: of the fleet's members.
            publish: tells the siblings.
            now: the clock, in seconds.
        """
        self._model = model
        self._names = names
        self._publish = publish
        self._now = now
        self._recent: deque[_RecentPrompt] = deque()
        """What this proxy told last, for siblings that did not hear it."""
        self._recent_blocks = 0
        self._numbers = count(1)
        self._own: dict[str, int] = {}
        """The numbers of this proxy's running legs, by key."""
        self._legs: dict[int, dict[int, Member]] = {}
        """The running legs of siblings: sibling, leg, engine."""
        model.observer = self
        model.event_sources.watch_changes(self._events_changed)

    # this proxy's legs

    def prefill_began(self, key: str, member: Member, leg: PrefillLeg) -> None:
        """See `PrefillObserver`."""
        engine = self._names.find_key(member)
        if engine is not None:
            number = self._own[key] = next(self._numbers)
            for entry in _began(number, engine, leg):
                self._publish(entry)

    def prompt_computed(self, key: str, leg: PrefillLeg) -> None:
        """See `PrefillObserver`."""
        number = self._own.get(key)
        if number is not None:
            tokens = leg.decision.prompt_tokens
            self._publish(PromptComputed(number, max(1, tokens - leg.decision.expected.cached_tokens), tokens))

    def prefill_ended(self, key: str, member: Member, leg: PrefillLeg) -> None:
        """See `PrefillObserver`."""
        number = self._own.pop(key, None)
        if number is not None:
            self._publish(PrefillEnded(number, leg.answered, leg.prompt_tokens, leg.cached))
            engine = self._names.find_key(member)
            if leg.answered and leg.hashes is not None and engine is not None:
                self._remember(engine, leg.hashes)

    def blocks_routed(self, instance: Instance, hashes: BlockHashes, held: int) -> None:
        """See `PrefillObserver`."""
        member = next((each for each in self._names.members.values() if each.instance is instance), None)
        if member is not None and held < len(hashes):
            parent = int(hashes[held - 1]) if held else 0
            engine = self._names.key_of(member)
            self._publish(BlocksRouted(engine, held, parent, pack_hashes(hashes[held:])))
            self._remember(engine, hashes)

    def _events_changed(self, change: IndexChange) -> None:
        """Tells what the KV events of an engine have changed, which this proxy alone listens to."""
        member = change.worker
        engine = self._names.find_key(member) if isinstance(member, Member) else None
        if engine is None:
            return
        parent = change.parent
        for first in range(0, max(1, len(change.hashes)), _PIECE):
            part = change.hashes[first : first + _PIECE]
            packed = pack_hashes(part)
            self._publish(BlocksChanged(engine, change.kind, change.level, parent, change.owner, packed))
            parent = int(part[-1]) if len(part) else 0

    def snapshot(self) -> Iterator[Entry | None]:
        """Yields the running legs, and the blocks that engines are believed to have. None: a place to pause."""
        # Legs come first: a reader that knew a leg's blocks before would take "none was cached" for a loss.
        yield from self._running()
        keys = {member.instance: key for key, member in self._names.members.items()}
        for instance, capacity, hashes, parents in self._model.contents():
            engine = keys.get(instance)
            if engine is not None and len(hashes):
                yield BlocksHeld(engine, capacity, 0, pack_hashes(hashes), pack_hashes(parents))
            yield None
        for engine, member in list(self._names.members.items()):
            for level, hashes, parents in self._model.event_sources.contents(member):
                if len(hashes):
                    yield BlocksHeld(engine, 0, level, pack_hashes(hashes), pack_hashes(parents))
                yield None

    def recent(self, seconds: float) -> Iterator[Entry | None]:
        """Yields what engines have computed for this proxy in the last seconds, and its running legs."""
        since = self._now() - seconds
        for prompt in [each for each in self._recent if each.at >= since]:
            yield BlocksRouted(prompt.engine, 0, 0, pack_hashes(prompt.hashes))
            yield None
        yield from self._running()

    def forget_recent(self, engine: int) -> None:
        """Forgets what an engine has computed, whose cache is empty now."""
        self._recent = deque(each for each in self._recent if each.engine != engine)
        self._recent_blocks = sum(len(each.hashes) for each in self._recent)

    def _remember(self, engine: int, hashes: BlockHashes) -> None:
        if not len(hashes):  # nothing to tell
            return
        self._recent.append(_RecentPrompt(self._now(), engine, hashes))
        self._recent_blocks += len(hashes)
        while self._recent_blocks > _MOST_RECENT or len(self._recent) > _MOST_PROMPTS:
            self._recent_blocks -= len(self._recent.popleft().hashes)

    def _running(self) -> Iterator[Entry]:
        """Yields this proxy's running legs. Some may have ended when the next one is asked for."""
        keys = {member.instance: key for key, member in self._names.members.items()}
        for key, number in list(self._own.items()):
            leg = self._model.leg(key) if self._own.get(key) == number else None
            engine = None if leg is None else keys.get(leg.decision.chosen)
            if leg is not None and engine is not None:
                yield from _began(number, engine, leg)

    # those of siblings

    def apply(self, sibling: Sibling, entry: Entry) -> None:
        """Applies an entry of a sibling, if it is one of a prefill leg or of blocks.

        Raises:
            ValueError: the entry says what cannot be.
        """
        if isinstance(entry, PrefillBegan):
            self._begin(sibling.id, entry)
        elif isinstance(entry, PrefillLoadsAdapter):
            member = self._legs.get(sibling.id, {}).get(entry.leg)
            if member is not None:
                member.backlog.add_load((sibling.id, entry.leg), _seconds(entry.load_s))
        elif isinstance(entry, PrefillEnded):
            self._end(sibling.id, entry)
        elif isinstance(entry, PromptComputed):
            member = self._legs.get(sibling.id, {}).get(entry.leg)
            if member is not None:
                self._model.prompt_computed((sibling.id, entry.leg), member)
        elif isinstance(entry, BlocksRouted):
            member = self._names.members.get(entry.engine)
            if member is not None:
                self._model.record_routed(member.instance, self._hashes(entry))
        elif isinstance(entry, BlocksHeld):
            member = self._names.members.get(entry.engine)
            if member is not None:
                hashes, parents = unpack_hashes(entry.hashes), unpack_hashes(entry.parents)
                if entry.capacity:
                    self._model.record_contents(member.instance, entry.capacity, hashes, parents)
                else:
                    self._model.event_sources.record_contents(member, entry.level, hashes, parents)
        elif isinstance(entry, BlocksChanged):
            member = self._names.members.get(entry.engine)
            if member is not None:
                self._model.event_sources.apply_change(
                    IndexChange(entry.kind, member, entry.owner, unpack_hashes(entry.hashes), entry.parent, entry.level)
                )

    def forget_legs(self, sibling: Sibling) -> None:
        """Ends all legs of a sibling: nothing is learnt from them."""
        for leg, member in self._legs.pop(sibling.id, {}).items():
            self._model.end_leg((sibling.id, leg), member, is_own=False)

    def _begin(self, sibling: int, entry: PrefillBegan) -> None:
        member = self._names.members.get(entry.engine)
        legs = self._legs.setdefault(sibling, {})
        if member is None or entry.leg in legs or len(legs) >= _MOST_LEGS:
            return
        instance = member.instance
        fetched = entry.fetched_tokens
        expected = TTFTEstimate(
            0.0,
            _seconds(entry.fetch_s),
            _seconds(entry.compute_s),
            entry.cached_tokens,
            fetched,
            max(1, entry.prompt_tokens - entry.cached_tokens - fetched),
        )
        decision = RoutingDecision(instance, entry.prompt_tokens, expected, (), {})
        store = SharedStore(instance.store) if fetched and instance.store is not None else None
        reach = FetchableTokens(entry.cached_tokens + fetched if store else 0, store)
        hashes = self._hashes(entry) if entry.hashes or entry.held_blocks else None
        legs[entry.leg] = member  # before its blocks are refused, if they are: its work counts until it ends
        self._model.begin_leg((sibling, entry.leg), member, PrefillLeg(decision, hashes, reach))

    def _end(self, sibling: int, entry: PrefillEnded) -> None:
        member = self._legs.get(sibling, {}).pop(entry.leg, None)
        if member is None:
            return
        key = (sibling, entry.leg)
        leg = self._model.leg(key)
        if leg is not None:
            leg.answered, leg.prompt_tokens, leg.cached = entry.answered, entry.prompt_tokens, entry.cached_tokens
        self._model.end_leg(key, member, is_own=False)

    def _hashes(self, entry: PrefillBegan | BlocksRouted) -> BlockHashes:
        """Returns the blocks of an entry, behind those in front of them that are known here."""
        hashes = unpack_hashes(entry.hashes)
        if not entry.parent or not entry.held_blocks:
            return hashes
        front = self._model.chain_to(entry.parent, entry.held_blocks)
        return join_hashes(front, hashes)


def _began(number: int, engine: int, leg: PrefillLeg) -> Iterator[Entry]:
    expected, hashes = leg.decision.expected, leg.hashes
    held = 0 if leg.routed is None else len(leg.routed.used)
    yield PrefillBegan(
        number,
        engine,
        leg.decision.prompt_tokens,
        _seconds(expected.compute_s),
        _seconds(expected.fetch_s),
        expected.cached_tokens,
        expected.fetched_tokens,
        held,
        int(hashes[held - 1]) if held and hashes is not None else 0,
        b"" if hashes is None else pack_hashes(hashes[held:]),
    )
    if expected.load_s:
        yield PrefillLoadsAdapter(number, _seconds(expected.load_s))


def _seconds(value: float) -> float:
    """Returns a duration that is a number, from 0 to an hour."""
    return min(value, 3600.0) if value > 0 else 0.0
