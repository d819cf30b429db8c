"""Models which prompt prefixes each prefill engine has cached, for cache-aware policies (`uses_prefixes`).

It is learnt from where legs are sent, and corrected by the `cached_tokens` that engines report. A leg's blocks are
believed to be there from when it is given: who comes next with the same prefix runs behind it. Its engine may have
computed both side by side all the same, so what only a running leg brings says nothing about how much fits. What decode
engines have is learnt from what they have answered, where a plan asks for it.

An engine that publishes KV events (`kvparams_proxy.fleet.kv_events`) is believed to have what it says besides, and what
it says is gone is gone. What is computed in one place and fetched in another is `remote_cache_model.py`.

The model decides only where a request goes, never what the answer is. Namespaces are those of
`kvparams.index.block_hashes`: model and cache salt, which is bound to the tenant where clients have keys; vLLM and
SGLang name a LoRA by the model.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import gcd
from typing import Final

from kvparams.index.block_hashes import BlockHasher, BlockHashes
from kvparams.index.prefix_index import PrefixIndex
from kvparams.index.routing_feed import RoutedRequest, RoutingFeed
from kvparams.instances import Instance, RequestFacts, SchedulingPolicy
from kvparams.routing.ttft_estimate import TTFTEstimate, estimate_ttft
from kvparams_proxy.fleet.event_sources import EventSources
from kvparams_proxy.fleet.foreign_prefix_model import ForeignPrefixModel
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.prediction_stats import PredictionStats
from kvparams_proxy.fleet.prefill_leg import PrefillLeg, PrefillObserver, PromptLookup
from kvparams_proxy.fleet.remote_cache_model import (
    FetchableTokens,
    HeldTokens,
    PeerMemory,
    RemoteCacheModel,
    SharedStore,
)
from kvparams_proxy.fleet.routing_decision import CacheExplanation, RoutingDecision

__all__ = ["BLOCK_TOKENS", "SHARED_BLOCK_TOKENS", "PrefixCacheModel"]

BLOCK_TOKENS: Final = 64
"""A multiple of the block sizes of vLLM (16), TensorRT-LLM (32) and SGLang (1): a quarter of the work for less than 64
tokens that are computed again."""
SHARED_BLOCK_TOKENS: Final = 128
"""Where proxies tell each other of blocks, so that a prompt of 8,000 tokens costs half a kilobyte."""
_MOST_TOKENS: Final = 1 << 17
"""Of one prompt; what comes behind is not looked at. So many take some 0.5 ms."""
_BLOCKS: Final = 1 << 20
"""Of all engines together, some 65 MiB when all are used."""
_FITS: Final = 1 << 15
"""Blocks that one engine's cache is believed to hold at first: more than most, since misses correct it at once."""
_MOST_FITS: Final = 1 << 18
_HOST: Final = 1
"""The level of an engine's own memory: what it keeps there is as good as cached."""


class PrefixCacheModel:
    """Models the caches of all prefill engines of one fleet. Only `Fleet`, `Dispatcher` and `Execution` call it."""

    def __init__(self, now: Callable[[], float], seed: int, block_tokens: int = BLOCK_TOKENS) -> None:
        """Creates an empty model.

        Args:
            now: the clock, in seconds.
            seed: 64 bits that clients do not know.
            block_tokens: the size of a block.
        """
        self.block_tokens: Final = block_tokens
        self._now = now
        self._chain = BlockHasher(seed, self.block_tokens)
        self._index = PrefixIndex(_BLOCKS)
        self.feed: Final = RoutingFeed(self._index, _FITS, _MOST_FITS)
        self._foreign = ForeignPrefixModel(block_tokens)
        self._fetching = RemoteCacheModel(self._index, self.block_tokens, (_MOST_FITS, _BLOCKS), (_FITS, _MOST_FITS))
        self.event_sources: Final = EventSources(self._index, self._chain, self.feed, self._namespace, now)
        """The engines that say themselves what they have."""
        self._legs: dict[Hashable, PrefillLeg] = {}
        """By transfer id of the request, which has one prefill leg at a time; those of other proxies by `begin_leg`."""
        self.observer: PrefillObserver | None = None
        self._coming: dict[Instance, dict[int, int]] = {}
        """By instance, first blocks that running legs bring, and how many bring each."""
        self._grains: dict[Instance, int] = {}
        """What every number of cached tokens that an instance has reported is a multiple of."""
        self.prediction_stats: Final = PredictionStats()

    def __len__(self) -> int:
        """Returns the number of running legs."""
        return len(self._legs)

    @property
    def blocks(self) -> int:
        """The number of blocks that some engine is believed to have."""
        return len(self._index)

    def choose(self, policy: SchedulingPolicy, members: Sequence[Member], facts: RequestFacts, turn: int) -> Member:
        """Chooses the instance for a prefill leg. Its work counts from now on, until `leg_released`."""
        facts, hashes, held = looked = self._look(members, facts)
        chosen, decision, reach = self._decide(policy, members, looked, turn)
        leg = PrefillLeg(decision, hashes, reach)
        if hashes is not None:
            leg.foreign_rank = self._foreign.begin_leg(chosen, facts, hashes)
            best = max(facts.cached_tokens.get(each.instance, 0) for each in members)
            self.prediction_stats.record_lookup(facts.prompt_tokens, max(best, *held.values(), 0))
        self.begin_leg(facts.transfer_id, chosen, leg)
        if self.observer is not None:
            self.observer.prefill_began(facts.transfer_id, chosen, leg)
        return chosen

    def begin_leg(self, key: Hashable, member: Member, leg: PrefillLeg) -> None:
        """Begins a leg: its work counts until `end_leg` with the same key, and its blocks are believed to be there.

        Raises:
            ValueError: it has begun already.
        """
        expected = leg.decision.expected
        member.backlog.begin(key, expected.compute_s, expected.fetch_s, expected.load_s)
        self._legs[key] = leg
        if leg.hashes is not None:
            self._believe(leg, member.instance, leg.hashes)

    def explain(
        self, policy: SchedulingPolicy, members: Sequence[Member], facts: RequestFacts, turn: int
    ) -> CacheExplanation:
        """Explains the decision that `choose` would make now. Nothing is counted or kept."""
        facts, _, held = looked = self._look(members, facts)
        expected = [estimate_ttft(each, facts) for each in members]
        reaches = [self._fetching.fetchable_tokens(each.instance, held) for each in members]
        sources = [_whose(one, reach) for one, reach in zip(expected, reaches, strict=True)]
        return CacheExplanation(self._decide(policy, members, looked, turn)[1], expected, sources)

    def cached_tokens(self, facts: RequestFacts) -> Mapping[Instance, int]:
        """Returns the tokens of the prompt that each instance is believed to have.

        An instance that is missing has none.
        """
        return self._look((), facts).facts.cached_tokens

    def record_decode(
        self, instance: Instance, facts: RequestFacts, prompt_tokens: int | None, cached: int | None
    ) -> None:
        """Records the answer of a decode engine, which has had all of the prompt.

        Both numbers are unknown where it was handed what another engine had computed, or where it did not report them:
        a stream need not.
        """
        hashes = self._hashes(facts)
        if hashes is None:
            return
        routed = self.record_routed(instance, hashes)
        if self.observer is not None:
            self.observer.blocks_routed(instance, hashes, len(routed.used))
        had, grain = self._said(instance, facts.prompt_tokens, prompt_tokens, cached)
        if had is None or not grain:  # it may never say it
            return
        most = (facts.prompt_tokens - 1) // self.block_tokens
        believed = min(len(routed.used), most)
        if abs(believed * self.block_tokens - had) >= max(grain, self.block_tokens):
            self.feed.record_reported(routed._replace(used=routed.used[:believed]), min(had // self.block_tokens, most))

    def record_first_byte(self, member: Member, facts: RequestFacts) -> None:
        """Records the first byte of a leg that goes on with an answer: its prompt is computed."""
        leg = self._legs.get(facts.transfer_id)
        if leg is not None:
            self.prompt_computed(facts.transfer_id, member)
            if self.observer is not None:
                self.observer.prompt_computed(facts.transfer_id, leg)

    def record_routed(self, instance: Instance, hashes: BlockHashes) -> RoutedRequest:
        """Records that an engine has these blocks from now on."""
        return self.feed.record_routed(instance, hashes, self._now())

    def prompt_computed(self, key: Hashable, member: Member) -> None:
        """Ends the work of a leg that goes on with the answer. Does nothing if there is no such leg."""
        leg = self._legs.get(key)
        if leg is not None:
            tokens = leg.decision.prompt_tokens
            member.backlog.end(key, max(1, tokens - leg.decision.expected.cached_tokens), tokens)

    def peer_source(self, facts: RequestFacts) -> tuple[Instance, str] | None:
        """Returns the address of the memory from which the request's running leg should read.

        None where it should fetch nothing, or from a store.
        """
        leg = self._legs.get(facts.transfer_id)
        if leg is None or leg.decision.source is None:
            return None
        address = self._fetching.peer_address(leg.decision.source)
        leg.sent = address is not None
        return None if address is None else (leg.decision.source, address)

    def record_report(
        self, facts: RequestFacts, prompt_tokens: int | None, cached: int | None, told: str | None = None
    ) -> RoutingDecision | None:
        """Records the report of an engine whose running leg for this request has ended well.

        The engine may report nothing; it may say where others can read (`kvparams.peer_reads`). Call `Fleet.release`
        after this.

        Returns:
            Why it went there.
        """
        leg = self._legs.get(facts.transfer_id)
        if leg is None:
            return None
        leg.answered = True
        leg.prompt_tokens, leg.cached, leg.told = prompt_tokens, cached, told
        return leg.decision

    def leg_released(self, member: Member, facts: RequestFacts) -> None:
        """Ends a leg of this proxy, whatever its result."""
        leg = self.end_leg(facts.transfer_id, member)
        if leg is not None and self.observer is not None:
            self.observer.prefill_ended(facts.transfer_id, member, leg)

    def end_leg(self, key: Hashable, member: Member, *, is_own: bool = True) -> PrefillLeg | None:
        """Ends a leg and learns from it. Returns it, or None if there is none.

        `is_own`: whether it counts in the statistics of this proxy's predictions.
        """
        leg = self._legs.pop(key, None)
        if leg is None:
            return None
        instance, expected, tokens = leg.decision.chosen, leg.decision.expected, leg.decision.prompt_tokens
        predicted = expected.cached_tokens + expected.fetched_tokens
        still = member.instance is instance and not member.has_left
        cached, grain = self._said(instance, tokens, leg.prompt_tokens, leg.cached, still=still)
        if leg.answered:
            found = predicted if cached is None else cached
            fetched = max(0, min(found, leg.reach.tokens) - expected.cached_tokens)
            member.backlog.end(key, max(1, tokens - found), tokens, fetched)
        else:
            member.backlog.end(key)
        if leg.answered and still and is_own:
            self._fetching.record_peer_address(member, leg.told)
        if leg.routed is None or leg.hashes is None:
            return leg
        self._settle(leg, instance)
        if not leg.answered:
            self.feed.record_failed(leg.routed, leg.hashes)
            return leg
        self._foreign.record_report(leg.foreign_rank, cached)
        settled = predicted  # what its engine has told of, too
        if not expected.fetched_tokens and leg.settled < len(leg.routed.used):
            settled = min(predicted, leg.settled * self.block_tokens)
        if is_own:
            self.prediction_stats.record_leg(predicted, settled, cached)
        if cached is not None:
            self._correct(leg, leg.routed, cached, grain)
        asked = leg.sent if isinstance(leg.reach.holder, PeerMemory) else expected.fetched_tokens
        reach = leg.reach if asked else leg.reach._replace(holder=None)
        self._fetching.record_leg(instance, reach, leg.hashes, self._now(), cached, grain)
        return leg

    def leg(self, key: Hashable) -> PrefillLeg | None:
        """Returns a running leg, or None."""
        return self._legs.get(key)

    @property
    def chain_mark(self) -> str:
        """Tells models apart whose block hashes differ: by their seed or the size of their blocks."""
        return self._chain.hashes(bytes(4 * self.block_tokens), 0).tobytes().hex()

    def chain_to(self, hash: int, blocks: int) -> BlockHashes:
        """Returns the hashes of so many blocks of one prompt that end with this one; fewer where they are not known."""
        return self._index.chain_to(hash, blocks)

    def contents(self) -> Iterator[tuple[Instance, int, BlockHashes, BlockHashes]]:
        """Yields what engines are believed to have: see `RoutingFeed.contents`."""
        for worker, capacity, hashes, parents in self.feed.contents():
            if isinstance(worker, Instance):
                yield worker, capacity, hashes, parents

    def record_contents(self, instance: Instance, capacity: int, hashes: BlockHashes, parents: BlockHashes) -> None:
        """Believes what another proxy's `contents` says of an engine.

        Raises:
            ValueError: a hash stands there twice, or is 0.
        """
        self.feed.record_contents(instance, capacity, hashes, parents, self._now())

    def distrust_capacities(self) -> None:
        """Forgets how much fits into caches: what was learnt without the legs of other proxies is far too little."""
        self.feed.distrust_capacities()

    def _said(
        self, instance: Instance, tokens: int, prompt_tokens: int | None, cached: int | None, *, still: bool = True
    ) -> tuple[int | None, int]:
        """Returns the cached tokens that an engine reports, or None, and the granularity of the number."""
        grain = self._grains.get(instance, 0)
        if cached is None and grain and prompt_tokens is not None:
            cached = 0  # vLLM 0.32.0 leaves out what is 0
        elif cached and still:
            grain = self._grains[instance] = gcd(grain, cached)
        if prompt_tokens and prompt_tokens != tokens:  # ours are not the engine's own ids
            grain = max(grain, tokens // 4)
            cached = None if cached is None else cached * tokens // prompt_tokens
        return cached, grain

    def forget_instance(self, instance: Instance) -> None:
        """Forgets an instance that has left or restarted: its cache is empty."""
        self.feed.forget_worker(instance)
        self._fetching.forget_instance(instance)
        self._grains.pop(instance, None)
        self.event_sources.forget_instance(instance)

    def _namespace(self, model: str, adapter: str | None, salt: str | None) -> int:
        return self._chain.namespace(adapter or model, None, salt)

    # what is believed

    def _look(self, members: Sequence[Member], facts: RequestFacts) -> PromptLookup:
        hashes = self._hashes(facts)
        if hashes is None:
            return PromptLookup(facts, None, {})
        cached, held = self._match(hashes, facts.prompt_tokens)
        facts = facts._replace(cached_tokens=cached)
        if self.observer is None and not all(each in self.event_sources for each in members):  # otherwise it is told
            facts = self._foreign.annotate_facts(members, facts, hashes)
        return PromptLookup(self._fetching.annotate_facts(members, facts, held), hashes, held)

    def _decide(
        self, policy: SchedulingPolicy, members: Sequence[Member], looked: PromptLookup, turn: int
    ) -> tuple[Member, RoutingDecision, FetchableTokens]:
        facts, hashes, held = looked
        chosen = policy.choose(members, facts, turn)
        expected, reach = estimate_ttft(chosen, facts), self._fetching.fetchable_tokens(chosen.instance, held)
        instances, whose = [each.instance for each in members], _whose(expected, reach)
        tokens, cached = facts.prompt_tokens, facts.cached_tokens
        return chosen, RoutingDecision(chosen.instance, tokens, expected, instances, cached, whose, hashes), reach

    def _hashes(self, facts: RequestFacts) -> BlockHashes | None:
        """Returns the block hashes of a prompt, or None without token ids."""
        ids = facts.token_ids if facts.routing_ids is None else facts.routing_ids
        if ids is None:
            return None
        namespace = self._namespace(facts.model or "*", None, facts.cache_salt)
        return self._chain.hashes(ids if len(ids) <= _MOST_TOKENS else ids[:_MOST_TOKENS], namespace)

    def _match(self, hashes: BlockHashes, tokens: int) -> tuple[dict[Instance, int], HeldTokens]:
        """Returns the tokens that instances and the caches they fetch from have.

        The last token of a prompt is always computed.
        """
        most = (tokens - 1) // self.block_tokens
        cached: dict[Instance, int] = {}
        held: dict[SharedStore | PeerMemory, int] = {}
        for who, blocks in self._index.match(hashes).held[_HOST].items():
            found = self.block_tokens * min(blocks, most)
            if isinstance(who, SharedStore | PeerMemory):
                held[who] = found
            elif isinstance(who, Instance | Member):
                instance = who if isinstance(who, Instance) else who.instance
                cached[instance] = max(found, cached.get(instance, 0))
        return cached, held

    def _believe(self, leg: PrefillLeg, instance: Instance, hashes: BlockHashes) -> None:
        routed = leg.routed = self.feed.record_routed(instance, hashes, self._now())
        believed = len(routed.used)
        if believed < len(hashes):
            leg.fresh = int(hashes[believed])
        leg.settled = believed
        coming = self._coming.get(instance)
        if coming is not None:
            for number, one in enumerate(hashes[:believed].tolist()):
                if one in coming:
                    leg.settled = number
                    break
        if leg.fresh:
            coming = self._coming.setdefault(instance, {})
            coming[leg.fresh] = coming.get(leg.fresh, 0) + 1

    def _settle(self, leg: PrefillLeg, instance: Instance) -> None:
        """Ends the expectation of the leg's new blocks: they are stored now, or never will be."""
        if not leg.fresh:
            return
        coming = self._coming[instance]
        coming[leg.fresh] -= 1
        if not coming[leg.fresh]:
            del coming[leg.fresh]
            if not coming:
                del self._coming[instance]

    def _correct(self, leg: PrefillLeg, routed: RoutedRequest, cached: int, grain: int) -> None:
        """Corrects the model where the report contradicts it."""
        most = (leg.decision.prompt_tokens - 1) // self.block_tokens
        believed, settled = min(len(routed.used), most), min(leg.settled, most)
        blocks = min(cached // self.block_tokens, most)
        if blocks > believed:
            if leg.reach.tokens >= cached:  # it was fetched, its cache need not be larger than believed
                return
            self.feed.record_reported(routed._replace(used=routed.used[:believed]), blocks)
        elif settled * self.block_tokens - cached >= max(grain, self.block_tokens):
            self.feed.record_reported(routed._replace(used=routed.used[:settled]), blocks)


def _whose(expected: TTFTEstimate, reach: FetchableTokens) -> Instance | None:
    """Returns the engine that something is fetched from, or None if it is a store."""
    return reach.holder.instance if expected.fetched_tokens and isinstance(reach.holder, PeerMemory) else None
