"""Tests the proxy's model of prefix caches, against known caches and through the whole proxy."""

import json
import logging
from array import array
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.instances import Instance, RequestFacts, Role, RoundRobin
from kvparams.routing.policies.cache_aware import CacheAware
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.prefix_cache_model import BLOCK_TOKENS, PrefixCacheModel
from kvparams_proxy.fleet.routing_decision import RoutingDecision
from tests.support.proxy.clock import Clock
from tests.support.proxy.fixtures import Proxy, StartProxy
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until

_NUMBERS = count(1)


class Engine:
    """A prefix cache: the blocks used last, as many as fit."""

    def __init__(self, blocks: int = 10_000, block: int = 16) -> None:
        self.blocks, self.block = blocks, block
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.asked = self.hit = 0

    def look(self, tokens: Sequence[int], salt: str | None) -> int:
        """Tokens that it need not compute."""
        found = 0
        for name in self._names(tokens, salt):
            if name not in self.cached or found + self.block >= len(tokens):
                break
            found += self.block
        self.asked += len(tokens)
        self.hit += found
        return found

    def keep(self, tokens: Sequence[int], salt: str | None) -> None:
        """It has computed them."""
        for name in reversed(list(self._names(tokens, salt))):
            self.cached[name] = None
            self.cached.move_to_end(name)
        while len(self.cached) > self.blocks:
            self.cached.popitem(last=False)

    def _names(self, tokens: Sequence[int], salt: str | None) -> Iterator[int]:
        name = hash(salt)
        for end in range(self.block, len(tokens) + 1, self.block):
            name = hash((name, *tokens[end - self.block : end]))
            yield name


class Waits:
    """Nobody waits here."""

    def __init__(self, facts: RequestFacts) -> None:
        self.facts = facts

    def granted(self, instance: Instance) -> None:
        raise AssertionError(instance)

    def refused(self, error: ProxyError) -> None:
        raise AssertionError(error)


class Site:
    """A fleet of prefill engines whose caches are known."""

    def __init__(self, engines: Sequence[Engine], *, aware: bool = True) -> None:
        self.clock = Clock()
        self.prefixes = PrefixCacheModel(self.clock.now, seed=1)
        self.engines = {f"p{number}": engine for number, engine in enumerate(engines)}
        self.fleet = Fleet(
            [Instance(id, "1", Role.PREFILL, f"http://{id}", "nixl") for id in self.engines],
            {role: CacheAware() if aware else RoundRobin() for role in Role},
            self.clock.now,
            self.clock.call_later,
            slow_start_s=0.0,
            prefixes=self.prefixes if aware else None,
        )

    def member(self, id: str) -> Member:
        return next(each for each in self.fleet.members if each.instance.id == id)

    def facts(self, tokens: Sequence[int], salt: str | None = None, model: str = "m") -> RequestFacts:
        name = f"r{next(_NUMBERS)}"
        return RequestFacts(name, name, model, 1, 1, array("I", tokens), salt, prompt_tokens=len(tokens))

    @contextmanager
    def leg(self, facts: RequestFacts, *, well: bool = True, tells: bool = True) -> Generator[Instance]:
        """One leg, as the proxy runs it; what it finds is looked for when it begins."""
        instance = self.fleet.acquire(Role.PREFILL, facts, (), Waits(facts))
        assert instance is not None
        assert facts.token_ids is not None
        engine = self.engines[instance.id]
        cached = engine.look(facts.token_ids, facts.cache_salt)
        yield instance
        self.clock.pass_time(0.01 + 1e-4 * (len(facts.token_ids) - cached))
        if well:
            engine.keep(facts.token_ids, facts.cache_salt)
            self.decision = self.prefixes.record_report(facts, len(facts.token_ids), cached if tells else None)
        self.fleet.release(instance, facts)

    decision: RoutingDecision | None = None

    def begun(self, tokens: Sequence[int], busy: Sequence[str]) -> tuple[RequestFacts, Instance]:
        """A leg, given to somebody while much has to be done on these engines."""
        loads = [(self.member(id), f"load-{next(_NUMBERS)}") for id in busy]
        for member, name in loads:
            member.backlog.begin(name, 100.0)
        facts = self.facts(tokens)
        instance = self.fleet.acquire(Role.PREFILL, facts, (), Waits(facts))
        assert instance is not None
        for member, name in loads:
            member.backlog.end(name)
        return facts, instance

    def ask(self, tokens: Sequence[int], salt: str | None = None, **how: bool) -> str:
        with self.leg(self.facts(tokens, salt), **how) as instance:
            pass
        return instance.id

    @property
    def idle(self) -> bool:
        """Nothing is kept of legs."""
        if self.prefixes._coming:  # pyright: ignore[reportPrivateUsage]  nobody else can see it leak
            return False
        return not len(self.prefixes) and all(member.backlog.wait_s == 0.0 for member in self.fleet.members)

    @property
    def hit_ratio(self) -> float:
        return sum(each.hit for each in self.engines.values()) / sum(each.asked for each in self.engines.values())


def prompt(seed: int, tokens: int) -> list[int]:
    return Random(seed).choices(range(1000), k=tokens)


def conversations(site: Site, many: int, turns: int) -> None:
    """All go on at once, a turn each; another 200 tokens are said in every turn."""
    for turn in range(turns):
        for one in range(many):
            site.ask(prompt(one, 1000 + 200 * turn))


def test_conversations_return_to_the_engine_that_has_them_and_the_others_get_their_share() -> None:
    aware, blind = Site([Engine() for _ in range(4)]), Site([Engine() for _ in range(4)], aware=False)
    for site in (aware, blind):
        conversations(site, many=13, turns=6)
    best = 1 - 2000 / 9000  # 200 new tokens a turn, and 1,000 at first
    assert aware.hit_ratio > 0.98 * best
    assert blind.hit_ratio < 0.6 * best
    asked = [engine.asked for engine in aware.engines.values()]
    assert max(asked) < 2 * min(asked)
    assert aware.idle
    assert aware.prefixes.prediction_stats.accuracy == 1.0


def test_what_is_predicted_is_what_a_cache_that_is_large_enough_reports_up_to_a_block() -> None:
    site = Site([Engine(), Engine(), Engine()])
    for turn in range(1, 8):
        for one in range(5):
            site.ask(prompt(one, 97 * turn))
            assert site.decision is not None
            # the same again, and the last token is computed in any case
            site.ask(prompt(one, 97 * turn))
            best = (97 * turn - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            assert site.decision.expected.cached_tokens == best
    assert site.prefixes.prediction_stats.accuracy == 1.0


@pytest.mark.parametrize(
    ("other", "shared"),
    [({"salt": "a"}, True), ({"salt": "b"}, False), ({"salt": None}, False), ({"model": "n"}, False)],
)
def test_nothing_is_shared_between_salts_and_models(other: dict[str, Any], shared: bool) -> None:
    site, tokens = Site([Engine()]), prompt(1, 640)
    with site.leg(site.facts(tokens, "a")):
        pass
    with site.leg(site.facts(tokens, **{"salt": "a", "model": "m", **other})):
        pass
    assert site.decision is not None
    assert (site.decision.expected.cached_tokens > 0) is shared


def test_an_engine_that_was_started_anew_or_that_left_has_nothing() -> None:
    site, tokens = Site([Engine(), Engine()]), prompt(1, 640)
    first = site.ask(tokens)
    assert site.ask(tokens) == first
    member = site.member(first)
    for ready in (True, False, True):
        site.fleet.record_probe(member, ready, member.models)
    site.engines[first].cached.clear()
    site.ask(tokens)
    assert site.decision is not None
    assert not site.decision.cached_tokens

    other = next(id for id in site.engines if id != first)
    for id in (first, other):
        site.fleet.remove(id)
        site.fleet.add(Instance(id, "2", Role.PREFILL, f"http://{id}", "nixl"))
        site.fleet.record_probe(site.member(id), True, None)
    site.ask(tokens)
    assert not site.decision.cached_tokens


def test_a_leg_that_fails_leaves_no_belief() -> None:
    site, tokens = Site([Engine()]), prompt(1, 640)
    site.ask(tokens[:320])
    site.ask(tokens, well=False)
    site.ask(tokens)
    assert site.decision is not None
    assert site.decision.expected.cached_tokens == 320
    assert site.idle


def test_a_cache_smaller_than_believed_is_corrected_by_what_its_engine_reports() -> None:
    """Four conversations fit into a cache, and 24 are held. The control is told nothing."""
    came_true: dict[bool, float] = {}
    for tells in (True, False):
        site, die, turns = Site([Engine(blocks=210), Engine(blocks=210)]), Random(3), [0] * 24
        predicted = true = 0
        for step in range(300):
            one = die.randrange(24)
            turns[one] = (turns[one] + 1) % 6
            before = sum(engine.hit for engine in site.engines.values())
            site.ask(prompt(one, 400 + 100 * turns[one]), tells=tells)
            assert site.decision is not None
            if step >= 100:
                predicted += site.decision.expected.cached_tokens
                true += min(site.decision.expected.cached_tokens, sum(e.hit for e in site.engines.values()) - before)
        came_true[tells] = true / predicted
    assert came_true[True] > 1.5 * came_true[False], came_true


def test_what_is_computed_side_by_side_is_not_taken_for_a_small_cache() -> None:
    site = Site([Engine()])
    old = [prompt(seed, 640) for seed in range(20)]
    for tokens in old:
        site.ask(tokens)
    for seed in range(100, 105):
        facts = [site.facts(prompt(seed, 640)) for _ in range(3)]
        with site.leg(facts[0]), site.leg(facts[1]), site.leg(facts[2]):
            pass
    for tokens in old:
        site.ask(tokens)
        assert site.decision is not None
        assert site.decision.expected.cached_tokens == 576
    assert site.idle


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 11), st.booleans()), max_size=60))
def test_legs_end_in_any_order_and_nothing_is_left_of_them(
    steps: list[tuple[bool, int, int, bool]],
) -> None:
    """Of few prompts, some the beginning of others, many at a time, well or not; engines restart in between."""
    site = Site([Engine(blocks=30), Engine(blocks=30)])
    running: list[tuple[RequestFacts, Instance]] = []
    for begins, which, length, well in steps:
        if begins or not running:
            facts = site.facts(prompt(which, 1 + 50 * length))
            instance = site.fleet.acquire(Role.PREFILL, facts, (), Waits(facts))
            assert instance is not None
            running.append((facts, instance))
        else:
            facts, instance = running.pop(length % len(running))
            if well:
                site.prefixes.record_report(facts, facts.prompt_tokens, (None, 0, 64, facts.prompt_tokens - 1)[which])
            elif which == 3:
                member = site.member(instance.id)
                for ready in (False, True):
                    site.fleet.record_probe(member, ready, None)
            site.fleet.release(instance, facts)
    for facts, instance in running:
        site.fleet.release(instance, facts)
    assert site.idle


def test_blocks_of_an_engine_that_are_larger_than_ours_are_not_taken_for_misses() -> None:
    site = Site([Engine(block=528)])
    old = [prompt(seed, 2000) for seed in range(10)]
    for tokens in (*old, *old, *old):
        site.ask(tokens)
    assert site.decision is not None
    assert site.decision.expected.cached_tokens > 1500


def test_an_engine_that_has_reported_and_says_nothing_has_found_nothing() -> None:
    """vLLM leaves `cached_tokens` out where it would be 0."""
    site, tokens = Site([Engine()]), prompt(1, 640)
    site.ask(tokens, tells=False)
    site.ask(tokens, tells=False)
    assert site.decision is not None
    assert site.decision.expected.cached_tokens == 576  # nothing is known against it
    site.ask(tokens)
    site.engines["p0"].cached.clear()
    site.ask(tokens, tells=False)
    assert site.prefixes.prediction_stats.accuracy == 0.5
    site.ask(tokens)
    assert site.prefixes.prediction_stats.accuracy == pytest.approx(2 / 3)


def test_ids_that_are_not_the_engines_own_are_taken_for_what_they_are_worth() -> None:
    """Pseudo tokens: the engine counts three where we have two, and is not disbelieved for it."""
    site, tokens = Site([Engine()]), prompt(1, 640)
    for cached in (0, 912, 912, 912):
        facts = site.facts(tokens)._replace(token_ids=None, routing_ids=array("I", tokens))
        assert site.fleet.acquire(Role.PREFILL, facts, (), Waits(facts)) is not None
        decision = site.prefixes.record_report(facts, 960, cached)
        site.fleet.release(site.member("p0").instance, facts)
        assert decision is not None
        assert decision.expected.cached_tokens == (576 if cached else 0)
    assert site.prefixes.prediction_stats.accuracy == 1.0


@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_prompts_of_about_a_block_are_routed(length: int) -> None:
    site = Site([Engine(), Engine()])
    for _ in range(3):
        site.ask(prompt(1, length))
    assert site.decision is not None
    assert site.decision.expected.cached_tokens == (64 if length > 64 else 0)
    assert site.idle


def test_a_hot_prefix_spreads_under_load_and_stays_where_it_is_without() -> None:
    site, shared = Site([Engine() for _ in range(4)]), prompt(1, 2000)
    for number in range(12):
        site.ask([*shared, *prompt(100 + number, 50)])
    alone = {each.asked for each in site.engines.values()}
    assert len(alone - {0}) <= 2
    facts = [site.facts([*shared, *prompt(200 + number, 2000)]) for number in range(12)]
    chosen = [site.fleet.acquire(Role.PREFILL, one, (), Waits(one)) for one in facts]
    assert {each.id for each in chosen if each is not None} == set(site.engines)
    for one, instance in zip(facts, chosen, strict=True):
        assert instance is not None
        site.fleet.release(instance, one)
    assert site.idle


def test_of_a_prompt_without_end_only_the_beginning_is_looked_at() -> None:
    site, tokens = Site([Engine(block=4096)]), [7] * 400_000
    site.ask(tokens)
    assert site.prefixes.blocks == (1 << 17) // BLOCK_TOKENS
    site.ask(tokens)
    assert site.decision is not None
    assert site.decision.expected.cached_tokens == 1 << 17


def test_words_of_a_decision_are_bounded() -> None:
    site, tokens = Site([Engine() for _ in range(300)]), prompt(1, 640)
    first = site.ask(tokens)
    site.ask(tokens)
    assert site.decision is not None
    words = site.decision.summary()
    assert words.startswith(f"{site.decision.chosen.id}: ")
    assert len(words) < 400
    assert "293 more" in words or "292 more" in words
    assert first in words


def test_round_robin_keeps_no_such_books() -> None:
    site = Site([Engine(), Engine()], aware=False)
    site.ask(prompt(1, 640))
    assert not len(site.prefixes)
    assert site.prefixes.prediction_stats.queried_tokens == 0
    assert all(member.backlog.ended == 0.0 for member in site.fleet.members)


def test_what_is_still_computed_beside_it_is_not_held_against_a_prediction() -> None:
    """The control asks again when it is there."""
    site, tokens = Site([Engine()]), prompt(1, 641)
    with site.leg(site.facts(tokens)), site.leg(site.facts(tokens)):
        pass
    assert site.decision is not None
    assert site.prefixes.prediction_stats.predicted_tokens == 640
    assert site.prefixes.prediction_stats.accuracy is None, "the engine computed both side by side"
    site.engines["p0"].cached.clear()
    site.ask(tokens)
    assert site.prefixes.prediction_stats.accuracy == 0.0


def test_predictions_that_no_longer_come_true_are_told_once_and_so_is_their_return(
    caplog: pytest.LogCaptureFixture,
) -> None:
    predictions = Site([Engine()]).prefixes.prediction_stats
    with caplog.at_level(logging.WARNING):
        for _ in range(300):
            predictions.record_leg(640, 640, 640)
        assert not caplog.records
        for _ in range(300):
            predictions.record_leg(640, 640, 0)
        assert len(caplog.records) == 1
        assert "only 50 %" in caplog.records[0].message
        assert predictions.accuracy == 0.0
        for _ in range(300):
            predictions.record_leg(640, 640, 640)
        assert len(caplog.records) == 2
        for _ in range(300):
            predictions.record_leg(640, 640, None)
        assert len(caplog.records) == 3
        assert "--enable-prompt-tokens-details" in caplog.records[-1].message


def test_caches_that_no_longer_work_are_told_of_though_belief_is_soon_corrected_to_nothing() -> None:
    """The control is the same fleet before that, and one that was emptied once and went on."""
    die = Random(3)
    for for_good in (False, True):
        site, turns = Site([Engine(), Engine()]), dict.fromkeys(range(40), 0)
        predictions, rang = site.prefixes.prediction_stats, False
        for step in range(800):
            if step == 400 or (step > 400 and for_good):
                assert step > 400 or not predictions.alarmed
                for engine in site.engines.values():
                    engine.cached.clear()
            one = die.randrange(40)
            turns[one] += 1
            site.ask(prompt(one, 500 + 100 * turns[one]))
            rang = rang or predictions.alarmed
        assert rang is for_good


# through the whole proxy


async def test_the_decision_is_in_the_answer_the_log_and_the_metrics(
    stub: StubEngines, proxy: StartProxy, tmp_path: Path
) -> None:
    urls = {role: [engine.url for engine in stub.engines if engine.role == role] for role in ("prefill", "decode")}
    log = tmp_path / "log"
    running = await proxy(urls["prefill"], urls["decode"], policy="cache_aware", log_requests=str(log))
    body = {"model": "stub", "prompt": prompt(1, 640), "max_tokens": 4}
    answers = [await running.client.post("/v1/completions", json=body) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    where = {answer.headers["x-kvparams-prefill"] for answer in answers[1:]}
    assert len(where) == 1
    assert " 0 of 640 tokens cached" in answers[0].headers["x-kvparams-decision"]
    assert await running.metric("kvparams_proxy_prefix_cache_queries_total") == 3 * 640
    assert await running.metric("kvparams_proxy_prefix_cache_zero_matches_total") >= 1
    counted = await running.metric("kvparams_proxy_prefix_cache_hits_total")
    assert 0 < counted <= 3 * 7  # this engine counts more tokens than it was sent
    assert (await running.client.get("/metrics")).text.count("kvparams_proxy_prefix_cache_accuracy ") >= 1

    async def written() -> bool:
        return log.exists() and log.read_text().count("\n") == 3

    await until(written)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["cached_tokens"] for line in lines] == [7, 7, 7]
    assert [line["predicted_tokens"] for line in lines][:1] == [0]
    assert set(lines[0]) >= {"predicted_tokens", "cached_tokens"}


async def test_text_has_no_ids_yet_and_is_routed_by_load(stub: StubEngines, proxy: StartProxy) -> None:
    urls = {role: [engine.url for engine in stub.engines if engine.role == role] for role in ("prefill", "decode")}
    running = await proxy(urls["prefill"], urls["decode"], policy="cache_aware")
    body = {"model": "stub", "prompt": "who is there? " * 100, "max_tokens": 4}
    answers = [await running.client.post("/v1/completions", json=body) for _ in range(4)]
    assert {answer.headers["x-kvparams-prefill"] for answer in answers} == {"prefill-0", "prefill-1"}
    assert await running.metric("kvparams_proxy_prefix_cache_queries_total") == 0
    assert await running.metric("kvparams_proxy_in_flight") == 0


async def test_round_robin_says_nothing_of_caches(stubbed: Proxy) -> None:
    answer = await stubbed.client.post("/v1/completions", json={"model": "stub", "prompt": [1, 2], "max_tokens": 4})
    assert "x-kvparams-prefill" in answer.headers
    assert "x-kvparams-decision" not in answer.headers
    assert "prefix_cache" not in (await stubbed.client.get("/metrics")).text


def test_an_answer_that_goes_on_teaches_what_was_computed_and_not_what_was_cached() -> None:
    """Of two prompts of one length, one of them cached, that took what their new tokens take."""
    site, tokens = Site([Engine()]), prompt(1, 6401)
    pace = site.member("p0").backlog
    for number in range(40):
        for asked in (tokens, prompt(100 + number, 6401)):
            facts = site.facts(asked)
            decision = site.prefixes.explain(CacheAware(), list(site.fleet.members), facts, 0).decision
            with site.leg(facts):
                site.clock.pass_time(0.01 + 1e-4 * decision.expected.computed_tokens)
                site.prefixes.record_first_byte(site.member("p0"), facts)
    assert (pace.cost_model.predict_s(1, 6401), pace.cost_model.predict_s(6401, 6401)) == pytest.approx(
        (0.0101, 0.6501), rel=0.05
    )


# what a store has


class StoreSite(Site):
    """The same with a store beside the engines, which fetch from it what they have not cached themselves."""

    def __init__(self, engines: Sequence[Engine], stores: Sequence[str | None], room: int = 10_000) -> None:
        super().__init__(engines)
        self.stores: dict[str, Engine] = {name: Engine(room) for name in stores if name is not None}
        for member, store in zip(list(self.fleet.members), stores, strict=True):
            self.fleet.replace(replace(member.instance, store=store))
        for member in self.fleet.members:
            self.fleet.record_probe(member, True, None)

    def ask_at(self, tokens: Sequence[int], *busy: str) -> RoutingDecision:
        """One leg, while much has to be done on these engines."""
        facts, instance = self.begun(tokens, busy)
        store = None if instance.store is None else self.stores[instance.store]
        engine = self.engines[instance.id]
        own = engine.look(tokens, None)
        found = max(own, 0 if store is None else store.look(tokens, None))
        self.clock.pass_time(0.01 + 1e-4 * (len(tokens) - found) + 1e-6 * (found - own))
        for cache in (engine, *(() if store is None else (store,))):
            cache.keep(tokens, None)
        decision = self.prefixes.record_report(facts, len(tokens), found)
        self.fleet.release(instance, facts)
        assert decision is not None
        return decision


def test_a_conversation_that_goes_elsewhere_fetches_what_the_store_has() -> None:
    site, tokens = StoreSite([Engine(), Engine()], ["s", "s"]), prompt(1, 3201)
    first = site.ask_at(tokens)
    assert (first.expected.cached_tokens, first.expected.fetched_tokens) == (0, 0)
    second = site.ask_at(tokens, first.chosen.id)
    assert second.chosen is not first.chosen
    assert (second.expected.cached_tokens, second.expected.fetched_tokens, second.expected.computed_tokens) == (
        0,
        3200,
        1,
    )
    assert "fetch 3200 in" in second.summary()
    assert site.prefixes.prediction_stats.accuracy == 1.0
    assert site.idle


@pytest.mark.parametrize("stores", [(None, None), ("s", "t"), ("s", None)])
def test_who_has_no_store_or_another_one_fetches_nothing(stores: tuple[str | None, str | None]) -> None:
    """The control."""
    site, tokens = StoreSite([Engine(), Engine()], stores), prompt(1, 3201)
    site.ask_at(tokens, "p1")
    second = site.ask_at(tokens, "p0")
    assert (second.chosen.id, second.expected.fetched_tokens, second.expected.computed_tokens) == ("p1", 0, 3201)


def test_a_store_that_has_it_no_longer_is_not_counted_on_again() -> None:
    """How long ago something was used is known no better than to a thousandth of all that may be kept."""
    site = StoreSite([Engine(block=4096), Engine(block=4096)], ["s", "s"])
    site.stores["s"].block = 64
    old = [prompt(seed, 1 << 15) for seed in range(8)]
    for tokens in old:
        site.ask_at(tokens, "p1")
    site.stores["s"].cached.clear()
    last = site.ask_at(old[-1], "p0").expected
    assert last.cached_tokens + last.fetched_tokens > 0, "nobody knows yet"
    assert site.ask_at(old[0], "p0").expected.fetched_tokens == 0, "what was used longer ago has gone, too"
    assert site.idle


# what other engines have in their memory


class PeerSite(Site):
    """Engines that let each other read what is in their memories; `memory` is what each keeps there."""

    def __init__(self, groups: Sequence[str | None], *, reads: bool = True) -> None:
        super().__init__([Engine() for _ in groups])
        self.memory = {id: Engine() for id in self.engines}
        self.reads = reads
        for member, group in zip(list(self.fleet.members), groups, strict=True):
            self.fleet.replace(replace(member.instance, group=group))
        for member in self.fleet.members:
            self.fleet.record_probe(member, True, None)

    def ask_at(self, tokens: Sequence[int], *busy: str, plan_asks: bool = True) -> tuple[RoutingDecision, str | None]:
        """One leg, while much has to be done on these engines; why it went where it did, and whom it was told of."""
        facts, instance = self.begun(tokens, busy)
        source = self.prefixes.peer_source(facts) if plan_asks else None
        own = max(self.engines[instance.id].look(tokens, None), self.memory[instance.id].look(tokens, None))
        found = own if source is None else max(own, self.memory[source[0].id].look(tokens, None))
        assert source is None or source[1] == f"{source[0].id}:7400"
        self.clock.pass_time(0.01 + 1e-4 * (len(tokens) - found) + 1e-6 * (found - own))
        self.engines[instance.id].keep(tokens, None)
        self.memory[instance.id].keep(tokens, None)
        told = f"{instance.id}:7400" if self.reads else None
        decision = self.prefixes.record_report(facts, len(tokens), found, told)
        assert not plan_asks or self.prefixes.peer_source(facts) == source
        self.fleet.release(instance, facts)
        assert self.prefixes.peer_source(facts) is None
        assert decision is not None
        return decision, None if source is None else source[0].id


def test_a_conversation_that_goes_elsewhere_reads_what_the_engine_before_has() -> None:
    site, tokens = PeerSite([None, None, None]), prompt(1, 3201)
    for id in site.engines:  # each has said once that it reads from others
        others = [each for each in site.engines if each != id]
        assert site.ask_at(prompt(10 + int(id[1]), 641), *others)[1] is None
    first, source = site.ask_at(tokens, "p1", "p2")
    assert (first.chosen.id, source, first.expected.fetched_tokens) == ("p0", None, 0)
    second, source = site.ask_at(tokens, "p0", "p2")
    assert (second.chosen.id, source) == ("p1", "p0")
    assert (second.expected.cached_tokens, second.expected.fetched_tokens, second.expected.computed_tokens) == (
        0,
        3200,
        1,
    )
    site.fleet.record_probe(site.member("p0"), False, None)
    third, source = site.ask_at(tokens, "p1")
    assert (third.chosen.id, source, third.expected.fetched_tokens) == ("p2", "p1", 3200), (
        "p1 has it by now, p0 is not ready"
    )
    assert site.prefixes.prediction_stats.accuracy == 1.0
    assert site.idle


@pytest.mark.parametrize(("groups", "reads"), [((None, None), False), (("a", "b"), True)])
def test_who_does_not_read_from_others_or_is_of_another_group_reads_nothing(
    groups: tuple[str | None, str | None], reads: bool
) -> None:
    """The control."""
    site, tokens = PeerSite(groups, reads=reads), prompt(1, 3201)
    for id, other in (("p0", "p1"), ("p1", "p0")):
        site.ask_at(prompt(10 + int(id[1]), 641), other)
    site.ask_at(tokens, "p1")
    second, source = site.ask_at(tokens, "p0")
    assert (second.chosen.id, source, second.expected.fetched_tokens, second.expected.computed_tokens) == (
        "p1",
        None,
        0,
        3201,
    )


def test_an_engine_that_was_started_anew_has_nothing_for_others() -> None:
    site, tokens = PeerSite([None, None]), prompt(1, 3201)
    for id, other in (("p0", "p1"), ("p1", "p0")):
        site.ask_at(prompt(10 + int(id[1]), 641), other)
    site.ask_at(tokens, "p1")
    site.fleet.record_probe(site.member("p0"), False, None)
    site.fleet.record_probe(site.member("p0"), True, None)
    second, source = site.ask_at(tokens, "p0")
    assert (second.chosen.id, source, second.expected.fetched_tokens) == ("p1", None, 0)


@pytest.mark.parametrize("plan_asks", [True, False])
def test_a_memory_that_has_it_no_longer_is_not_counted_on_again(plan_asks: bool) -> None:
    """The control is a plan that asks for no source: its engine has been nowhere, so that it says nothing of it."""
    site = PeerSite([None, None])
    old = [prompt(seed, 6401) for seed in range(6)]
    for tokens in (prompt(10, 641), *old):
        site.ask_at(tokens, "p1")
    site.ask_at(prompt(11, 641), "p0")
    site.memory["p0"].cached.clear()
    assert site.ask_at(old[-1], "p0", plan_asks=plan_asks)[0].expected.fetched_tokens > 0, "nobody knows yet"
    decision, source = site.ask_at(old[0], "p0")
    found = (source, decision.expected.fetched_tokens)
    assert found == ((None, 0) if plan_asks else ("p0", 6400)), "what was used longer ago has gone, too"
    assert site.idle
