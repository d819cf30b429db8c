"""Tests that proxies that share nothing choose one engine for a prompt, as long as load allows it."""

from array import array
from itertools import count

import pytest

from kvparams.instances import Instance, RequestFacts, Role
from kvparams.routing.policies.cache_aware import CacheAware
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel
from tests.support.proxy.clock import Clock
from tests.support.proxy.shared_site import Waiter

_NUMBERS = count()
_ENGINES = 6


class Proxy:
    """One of several proxies. Each has its own secret for block hashes and has routed other requests before."""

    def __init__(self, number: int, *, foreign: bool = True) -> None:
        self.clock = Clock()
        self.clock.pass_time(100.0)
        self.prefixes = PrefixCacheModel(self.clock.now, seed=number)
        engines = [Instance(f"p{each}", "1", Role.PREFILL, f"http://p{each}", "nixl") for each in range(_ENGINES)]
        policies = {role: CacheAware() for role in Role}
        self.fleet = Fleet(
            engines[number % _ENGINES :] + engines[: number % _ENGINES],
            policies,
            self.clock.now,
            self.clock.call_later,
            slow_start_s=0.0,
            prefixes=self.prefixes,
        )
        self.fleet.startup_complete()
        for member in self.fleet.members:
            self.fleet.set_foreign(member, 1 if foreign else 0, 1000, 0.001)
            self.fleet.set_foreign(member, 0, 0, 0.0)

    def route(self, tokens: list[int], cached: int = 0) -> str:
        """Routes a prompt, of which so many tokens turn out to be cached."""
        name = f"r{next(_NUMBERS)}"
        facts = RequestFacts(name, name, "m", 1, 1, array("I", tokens), None, prompt_tokens=len(tokens))
        instance = self.fleet.acquire(Role.PREFILL, facts, (), Waiter(facts))
        assert instance is not None
        self.clock.pass_time(0.02)
        self.prefixes.record_report(facts, len(tokens), cached)
        self.fleet.release(instance, facts)
        return instance.id


def prompt(number: int, length: int = 2000) -> list[int]:
    return [10_000 * number + each for each in range(length)]


def test_proxies_choose_one_engine_for_a_prompt_that_none_of_them_knows() -> None:
    proxies = [Proxy(number) for number in range(4)]
    chosen = [[proxy.route(prompt(number), 1984) for proxy in proxies] for number in range(20)]
    assert all(len(set(engines)) == 1 for engines in chosen)
    assert len({engines[0] for engines in chosen}) == _ENGINES


def test_without_foreign_load_a_proxy_spreads_prompts_in_its_own_order() -> None:
    """This is the control."""
    proxies = [Proxy(number, foreign=False) for number in range(4)]
    chosen = [[proxy.route(prompt(number), 1984) for proxy in proxies] for number in range(20)]
    assert any(len(set(engines)) > 1 for engines in chosen)


def test_proxies_that_have_seen_different_turns_of_a_conversation_agree() -> None:
    first, second = Proxy(1), Proxy(2)
    engine = first.route(prompt(1, 1000))
    assert second.route(prompt(1, 2000), 960) == engine
    assert first.route(prompt(1, 3000), 1984) == engine


def test_load_decides() -> None:
    usual = Proxy(1).route(prompt(1))
    proxy = Proxy(1)
    member = next(each for each in proxy.fleet.members if each.instance.id == usual)
    member.backlog.begin("load", 100.0)
    assert proxy.route(prompt(1)) != usual


@pytest.mark.parametrize("cached", [0, 1984])
def test_proxies_stop_agreeing_where_prompts_have_nothing_in_common(cached: int) -> None:
    proxies = [Proxy(number) for number in range(2)]
    for number in range(400):
        for proxy in proxies:
            proxy.route(prompt(number), cached)
    proxies[0].route(prompt(400), cached)
    alike = sum(len({proxy.route(prompt(number), cached) for proxy in proxies}) == 1 for number in range(500, 530))
    assert alike == (30 if cached else 0)


def test_predictions_are_judged_by_what_the_proxy_knows() -> None:
    proxy = Proxy(1)
    name = "r"
    facts = RequestFacts(name, name, "m", 1, 1, array("I", prompt(1)), None, prompt_tokens=2000)
    instance = proxy.fleet.acquire(Role.PREFILL, facts, (), Waiter(facts))
    assert instance is not None
    decision = proxy.prefixes.record_report(facts, 2000, 0)
    assert decision is not None
    assert decision.expected.cached_tokens == 0
    assert decision.expected.computed_tokens < 2000
    proxy.fleet.release(instance, facts)


@pytest.mark.parametrize("told", [0, _ENGINES - 1, _ENGINES])
def test_nothing_is_expected_where_all_engines_tell_what_they_hold(told: int) -> None:
    proxy = Proxy(1)
    for member in list(proxy.fleet.members)[:told]:
        proxy.prefixes.event_sources.add(member, lambda: None)
    facts = RequestFacts("r", "r", "m", 1, 1, array("I", prompt(1)), None, prompt_tokens=2000)
    instance = proxy.fleet.acquire(Role.PREFILL, facts, (), Waiter(facts))
    assert instance is not None
    decision = proxy.prefixes.record_report(facts, 2000, 0)
    assert decision is not None
    assert (decision.expected.computed_tokens == 2000) == (told == _ENGINES)
    proxy.fleet.release(instance, facts)
