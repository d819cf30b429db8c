"""Tests proxies that share a fleet: loads, prefill legs, caches, failures, and what happens when messages are lost."""

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from kvparams.index.block_hashes import BlockHashes
from kvparams.instances import Instance, RequestFacts, Role
from kvparams.kv_events.model import BlockLocation, BlockRemoved, BlockStored, EventBatch, EventSource
from kvparams.replication.entries import BlocksRouted
from kvparams.routing.breaker import BreakerState
from kvparams.routing.policies.least_load import LeastLoad
from kvparams_proxy.coordination import prefix_sync
from kvparams_proxy.coordination.exchange import HEARTBEAT_S, LEASE_S
from tests.support.proxy.memory_network import MemoryNetwork
from tests.support.proxy.shared_site import SharedProxy, facts
from tests.support.virtual_loop import VirtualLoop

_SOON_S = 0.05
_PROMPT = list(range(5000, 6000))
_OTHER_PROMPT = list(range(7000, 8000))


def _engines(count: int = 2) -> list[Instance]:
    roles = (Role.PREFILL, Role.DECODE)
    return [Instance(f"{role}-{n}", "1", role, f"http://{role}-{n}", "nixl") for role in roles for n in range(count)]


class Site:
    """Some proxies."""

    def __init__(self, proxies: int, policy: Callable[..., SharedProxy] = SharedProxy) -> None:
        self.loop = VirtualLoop()
        self.network = MemoryNetwork(self.loop)
        self._numbers = count()
        self.proxies = [self.start() for _ in range(proxies)]
        self.after(3.0)

    def start(self, **settings: object) -> SharedProxy:
        """Starts another proxy."""
        return SharedProxy(self.network, next(self._numbers), _engines(), **settings)  # pyright: ignore[reportArgumentType]

    def after(self, seconds: float = _SOON_S) -> None:
        """Lets time pass."""
        self.loop.run_until(self.loop.time() + seconds)
        assert not self.loop.faults


@pytest.fixture
def site() -> Iterator[Site]:
    """Returns three proxies that know each other."""
    site = Site(3)
    assert [len(each.shared.exchange.siblings) for each in site.proxies] == [2, 2, 2]
    yield site
    assert not any(each.shared.exchange.refused for each in site.proxies)


def _load(proxy: SharedProxy, id: str) -> tuple[int, int, int]:
    member = proxy.member(id)
    return member.in_flight, member.tokens, member.own_in_flight


def test_load_of_all_counts_for_each(site: Site) -> None:
    a, b, c = site.proxies
    ask = facts("one", tokens=100)
    instance = a.acquire(Role.DECODE, ask)
    site.after()
    for other in (b, c):
        assert _load(other, instance.id) == (1, 100, 0)
        assert other.acquire(Role.DECODE, facts("other", tokens=7)).id != instance.id  # the least loaded one
    assert _load(a, instance.id) == (1, 100, 1)
    a.fleet.release(instance, ask)
    site.after()
    assert _load(b, instance.id)[0] == 0


def test_proxies_that_share_nothing_choose_the_same_engine() -> None:
    site = Site(0)
    alone = [SharedProxy(site.network, number, _engines(), is_alone=True) for number in range(2)]
    chosen = {each.acquire(Role.DECODE, facts("one", tokens=9)).id for each in alone}
    assert len(chosen) == 1


def test_a_proxy_that_is_killed_is_subtracted_when_its_lease_ends(site: Site) -> None:
    a, b, _ = site.proxies
    instance = a.acquire(Role.DECODE, facts("one", tokens=100))
    site.after()
    a.transport.vanish()
    site.after(LEASE_S - HEARTBEAT_S - 2 * _SOON_S)
    assert _load(b, instance.id)[0] == 1
    site.after(HEARTBEAT_S + 0.1 + 2 * _SOON_S)
    assert _load(b, instance.id) == (0, 0, 0)


def test_one_that_says_goodbye_is_subtracted_at_once(site: Site) -> None:
    a, b, _ = site.proxies
    instance = a.acquire(Role.DECODE, facts("one", tokens=100))
    site.after()
    site.loop.create_task(a.shared.close())
    site.after()
    assert _load(b, instance.id)[0] == 0
    assert len(b.shared.exchange.siblings) == 1


def test_lost_messages_are_made_good_by_the_next_heartbeat(site: Site) -> None:
    a, b, _ = site.proxies
    site.network.is_lost = lambda: True
    ask = facts("one", tokens=100)
    instance = a.acquire(Role.DECODE, ask)
    site.after()
    assert _load(b, instance.id)[0] == 0
    site.network.is_lost = lambda: False
    site.after(HEARTBEAT_S)
    assert _load(b, instance.id)[0] == 1
    site.network.is_lost = lambda: True
    a.fleet.release(instance, ask)
    site.after()
    site.network.is_lost = lambda: False
    site.after(HEARTBEAT_S)
    assert _load(b, instance.id)[0] == 0
    assert b.shared.exchange.gaps >= 2


def test_an_engine_that_joins_later_has_the_load_that_was_told(site: Site) -> None:
    a, b, _ = site.proxies
    late = Instance("decode-9", "1", Role.DECODE, "http://decode-9", "nixl")
    a.join(late)
    for number in range(5):
        a.acquire(Role.DECODE, facts(f"leg {number}", tokens=10))
    site.after()
    assert _load(a, "decode-9")[0] >= 1
    b.join(late)
    assert _load(b, "decode-9")[:2] == _load(a, "decode-9")[:2]
    other = Instance("decode-9", "1", Role.DECODE, "http://another", "nixl")
    site.proxies[2].join(other)
    assert _load(site.proxies[2], "decode-9")[0] == 0  # another engine of the same name


def test_prefill_legs_wait_at_all_proxies_and_teach_all(site: Site) -> None:
    a, b, c = site.proxies
    ask = facts("one", _PROMPT)
    instance = a.acquire(Role.PREFILL, ask)
    site.after(0.01)
    waits = [each.member(instance.id).backlog.wait_s for each in site.proxies]
    assert min(waits) > 0
    assert max(waits) - min(waits) < 0.02
    assert b.prefixes.cached_tokens(facts("two", _PROMPT))[b.member(instance.id).instance] >= 896
    site.after(0.5)
    a.prefixes.record_report(ask, len(_PROMPT), 0)
    a.fleet.release(instance, ask)
    site.after()
    samples = {each.member(instance.id).backlog.cost_model.predict_s(1000, 1000) for each in site.proxies}
    assert max(samples) - min(samples) < 0.05 * max(samples)
    assert 0.3 < min(samples) < 0.7  # what it took, not the first guess
    for proxy in (a, b, c):
        assert proxy.member(instance.id).backlog.wait_s == 0
        assert not len(proxy.prefixes)


def test_corrections_are_shared(site: Site) -> None:
    a, b, _ = site.proxies
    first = facts("one", _PROMPT)
    instance = a.acquire(Role.PREFILL, first)
    a.prefixes.record_report(first, len(_PROMPT), 0)
    a.fleet.release(instance, first)
    site.after()
    assert b.prefixes.cached_tokens(facts("x", _PROMPT))
    second = facts("two", _PROMPT)
    again = a.acquire(Role.PREFILL, second)
    assert again.id == instance.id
    a.prefixes.record_report(second, len(_PROMPT), 0)  # the engine has evicted it meanwhile
    a.fleet.release(again, second)
    site.after()
    assert a.prefixes.blocks == b.prefixes.blocks


def test_a_failed_leg_leaves_nothing_behind(site: Site) -> None:
    a, b, _ = site.proxies
    ask = facts("one", _PROMPT)
    instance = a.acquire(Role.PREFILL, ask)
    site.after()
    assert b.prefixes.blocks
    a.fleet.release(instance, ask)
    site.after()
    assert (a.prefixes.blocks, b.prefixes.blocks) == (0, 0)
    assert not len(b.prefixes)


def test_after_a_gap_the_legs_of_that_proxy_are_forgotten(site: Site) -> None:
    a, b, _ = site.proxies
    ask = facts("one", _PROMPT)
    instance = a.acquire(Role.PREFILL, ask)
    site.after()
    assert len(b.prefixes) == 1
    site.network.is_lost = lambda: True
    a.fleet.release(instance, ask)
    site.after()
    site.network.is_lost = lambda: False
    assert len(b.prefixes) == 1
    site.after(HEARTBEAT_S)
    assert len(b.prefixes) == 0
    assert b.member(instance.id).backlog.wait_s == 0


def test_what_is_told_to_nobody_is_a_gap_for_those_who_hear_it_all_the_same(site: Site) -> None:
    """A proxy that hears nobody tells nobody that its legs end. Its siblings have heard it all the time."""
    a, b, _ = site.proxies
    ask = facts("one", _PROMPT)
    instance = a.acquire(Role.PREFILL, ask)
    site.after()
    assert len(b.prefixes) == 1
    a.transport.is_deaf = True
    site.after(LEASE_S + 1.0)
    assert not a.shared.exchange.siblings.alive
    assert len(b.prefixes) == 1
    _end(a, instance, ask)
    computed = _compute(a, "two", _OTHER_PROMPT)
    assert not _cached(b, _OTHER_PROMPT)
    a.transport.is_deaf = False
    site.after(3 * HEARTBEAT_S)
    assert len(b.prefixes) == 0
    assert b.member(instance.id).backlog.wait_s == 0.0
    site.after(3.0)
    assert _cached(b, _OTHER_PROMPT)[computed] == 896, "what it told nobody is asked for"


def test_a_new_proxy_gets_a_snapshot(site: Site) -> None:
    a = site.proxies[0]
    for number in range(40):
        ask = facts(f"leg {number}", [number * 10_000 + token for token in range(700)])
        instance = a.acquire(Role.PREFILL, ask)
        a.prefixes.record_report(ask, 700, 0)
        a.fleet.release(instance, ask)
    site.after()
    new = site.start()
    assert not new.prefixes.blocks
    site.after(1.5)
    assert new.prefixes.blocks == a.prefixes.blocks
    for number in range(40):
        ask = facts("look", [number * 10_000 + token for token in range(700)])
        held = [{i.id: n for i, n in each.prefixes.cached_tokens(ask).items()} for each in (a, new)]
        assert held[0] == held[1]


def test_a_leg_that_runs_during_a_snapshot_says_nothing_of_what_fits() -> None:
    """Its blocks are in the snapshot already, and its engine reports that it had none of them."""
    site = Site(1)
    (a,) = site.proxies
    for number in range(100):
        _compute(a, f"earlier {number}", [10_000_000 + number * 1_000 + token for token in range(300)])
    new: SharedProxy | None = None
    running = deque[tuple[Instance, RequestFacts]]()
    for number in range(2000):  # the snapshot is asked for a second after the start, when the first legs still run
        if number == 10:
            new = site.start()
        ask = facts(f"leg {number}", [number * 1_000 + token for token in range(300)])
        running.append((a.acquire(Role.PREFILL, ask), ask))
        if len(running) > 1500:
            _end(a, *running.popleft())
        site.after(0.001)
    while running:
        _end(a, *running.popleft())
    site.after(0.5)
    assert new is not None
    assert new.prefixes.blocks == a.prefixes.blocks == 4200


def test_a_leg_that_begins_during_a_snapshot_is_told_before_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(1)
    (a,) = site.proxies
    for number in range(100):
        _compute(a, f"earlier {number}", [number * 1_000 + token for token in range(300)])
    begun: list[tuple[Instance, RequestFacts]] = []
    contents = a.prefixes.contents

    def begin_and_tell() -> Iterator[tuple[Instance, int, BlockHashes, BlockHashes]]:
        for number in range(2):  # one on each engine
            ask = facts(f"leg {number}", [1_000_000 + number * 1_000 + token for token in range(300)])
            begun.append((a.acquire(Role.PREFILL, ask), ask))
            if not number:
                a.shared.exchange.flush()  # the next leg waits in its batch, then
        yield from contents()

    monkeypatch.setattr(a.prefixes, "contents", begin_and_tell)
    new = site.start()
    site.after(1.5)
    assert len(begun) == 2
    for instance, ask in begun:
        _end(a, instance, ask)
    site.after()
    assert new.prefixes.blocks == a.prefixes.blocks == 204


def _end(proxy: SharedProxy, instance: Instance, ask: RequestFacts) -> None:
    """Ends a prefill leg whose engine had nothing in its cache."""
    proxy.prefixes.record_report(ask, ask.prompt_tokens, 0)
    proxy.fleet.release(instance, ask)


def _compute(proxy: SharedProxy, name: str, ids: list[int]) -> str:
    """Runs a prefill leg to its end, and returns its engine."""
    ask = facts(name, ids)
    instance = proxy.acquire(Role.PREFILL, ask)
    proxy.prefixes.record_report(ask, len(ids), 0)
    proxy.fleet.release(instance, ask)
    return instance.id


def _separate_all(site: Site) -> None:
    numbers = range(len(site.proxies))
    site.network.separated |= {frozenset((a, b)) for a in numbers for b in numbers if a != b}


def _cached(proxy: SharedProxy, ids: list[int]) -> dict[str, int]:
    return {instance.id: n for instance, n in proxy.prefixes.cached_tokens(facts("look", ids)).items()}


def test_proxies_that_were_separated_tell_each_other_what_they_have_missed(site: Site) -> None:
    _separate_all(site)
    site.after(LEASE_S + 1.0)
    prompts = [[number * 10_000 + token for token in range(700)] for number in range(3)]
    engines = [_compute(proxy, "one", ids) for proxy, ids in zip(site.proxies, prompts, strict=True)]
    ask = facts("running", _PROMPT)
    running = site.proxies[0].acquire(Role.PREFILL, ask)
    site.after(30.0)
    assert not _cached(site.proxies[1], prompts[0])
    assert site.proxies[1].member(running.id).backlog.wait_s == 0
    site.network.separated.clear()
    site.after(3.0)
    for proxy in site.proxies:
        for engine, ids in zip(engines, prompts, strict=True):
            assert _cached(proxy, ids).get(engine) == 640
        assert _cached(proxy, _PROMPT).get(running.id) == 896
        assert len(proxy.prefixes) == 1
    site.proxies[0].fleet.release(running, ask)
    site.after()
    assert [len(proxy.prefixes) for proxy in site.proxies] == [0, 0, 0]


def test_only_what_was_missed_is_told_again(site: Site) -> None:
    a, b, _ = site.proxies
    old, new = ([number * 10_000 + token for token in range(128_000)] for number in (1, 2))
    _compute(a, "old", old)
    site.after(30.0)
    _separate_all(site)
    site.after(LEASE_S + 1.0)
    engine = _compute(a, "new", new)
    site.after(1.0)
    before = a.shared.exchange.sent_bytes
    site.network.separated.clear()
    site.after(3.0)
    assert _cached(b, new)[engine] > 100_000
    assert a.shared.exchange.sent_bytes - before < 1.5 * 8 * len(new) / 128 + 6000  # heartbeats are some of these


def test_what_is_remembered_for_those_who_missed_it_is_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts without a whole block take no room at all, and short ones not without end."""
    a = site.proxies[0]

    def told() -> int:
        return sum(isinstance(each, BlocksRouted) for each in a.shared.recent(1e9))

    for number in range(50):
        _compute(a, f"shorter than a block {number}", [number] * 100)
    assert told() == 0
    monkeypatch.setattr(prefix_sync, "_MOST_PROMPTS", 20)
    for number in range(50):
        _compute(a, f"of one block {number}", [number] * 200)
    assert told() == 20


def test_what_an_engine_had_before_it_restarted_is_not_told_again(site: Site) -> None:
    a, b, _ = site.proxies
    _separate_all(site)
    site.after(LEASE_S + 1.0)
    engine = _compute(a, "one", _PROMPT)
    member = a.member(engine)
    a.fleet.record_probe(member, False, None)
    a.fleet.record_probe(member, True, None)
    site.after(1.0)
    assert not _cached(a, _PROMPT)
    site.network.separated.clear()
    site.after(3.0)
    assert not _cached(b, _PROMPT)


def test_proxies_that_have_never_heard_each_other_tell_what_they_know() -> None:
    site = Site(0)
    site.network.is_lost = lambda: True
    a, b = (site.start(), site.start())
    site.after(3.0)
    engine = _compute(a, "one", _PROMPT)
    site.after(3.0)
    assert not _cached(b, _PROMPT)
    site.network.is_lost = lambda: False
    site.after(3.0)
    assert _cached(b, _PROMPT)[engine] == 896


def test_how_much_fits_is_not_believed_that_was_learnt_without_the_others(site: Site) -> None:
    """Most of what filled a cache meanwhile was unknown, so it seemed to be smaller than it is."""
    b = site.proxies[1]
    prompts = [[number * 100_000 + token for token in range(40_000)] for number in range(12)]

    def smallest() -> int:
        return min(capacity for _, capacity, _, _ in b.prefixes.contents())

    _separate_all(site)
    site.after(LEASE_S + 1.0)
    for ids in (*prompts, *reversed(prompts)):  # the second time, nothing is there any more
        _compute(b, "one", ids)
    assert smallest() < 12 * 40_000 / 128
    site.network.separated.clear()
    site.after(3.0)
    assert smallest() > 12 * 40_000 / 128


def test_what_was_missed_is_asked_for_until_it_is_told(site: Site) -> None:
    """A sibling may be heard again before it hears this proxy."""
    a, b, _ = site.proxies
    _separate_all(site)
    site.after(LEASE_S + 1.0)
    engine = _compute(a, "one", _PROMPT)
    a.transport.is_deaf = True
    site.network.separated.clear()
    site.after(2.0)
    assert not _cached(b, _PROMPT)
    a.transport.is_deaf = False
    site.after(3.0)
    assert _cached(b, _PROMPT)[engine] == 896
    sent = a.shared.exchange.sent_messages
    site.after(10.0)
    assert a.shared.exchange.sent_messages - sent <= 10.0 / HEARTBEAT_S + 1  # and not after that


def test_a_snapshot_is_asked_for_again_where_the_sibling_has_ended(site: Site) -> None:
    for proxy in site.proxies:
        ask = facts("one", _PROMPT)
        instance = proxy.acquire(Role.PREFILL, ask)
        proxy.prefixes.record_report(ask, 1000, 0)
        proxy.fleet.release(instance, ask)
    site.after()
    new = site.start()
    site.after(HEARTBEAT_S - 0.01)
    site.network.is_lost = lambda: True  # the request, or the answer
    site.after(0.1)
    site.network.is_lost = lambda: False
    assert not new.prefixes.blocks
    site.after(6.0)
    assert new.prefixes.blocks == site.proxies[0].prefixes.blocks


def test_a_snapshot_that_nobody_asked_for_is_refused() -> None:
    site = Site(2)
    a, b = site.proxies
    ask = facts("one", _PROMPT)
    a.acquire(Role.PREFILL, ask)
    site.after()
    a.shared.exchange._begin_snapshot(next(iter(a.shared.exchange.siblings.alive.values())))  # pyright: ignore[reportPrivateUsage]
    site.after()
    assert b.shared.exchange.refused["unasked"] >= 1


def test_an_engine_that_fails_at_one_proxy_is_avoided_by_all(site: Site) -> None:
    a, b, _ = site.proxies
    for number in range(10):
        a.fleet.record_failure(a.member("decode-0").instance, connected=True, why=f"500, the {number}. time")
    site.after()
    assert a.member("decode-0").breaker.state is BreakerState.OPEN
    assert b.member("decode-0").breaker.state is BreakerState.OPEN
    assert b.acquire(Role.DECODE, facts("x", tokens=1)).id == "decode-1"


def test_an_engine_that_one_proxy_cannot_reach_is_probed_by_the_others(site: Site) -> None:
    a, b, _ = site.proxies
    a.fleet.record_failure(a.member("decode-0").instance, connected=False, why="connection refused")
    site.after()
    assert not a.member("decode-0").ready
    assert b.member("decode-0").ready  # it may be out of that proxy's reach alone
    assert [member.instance.id for member in b.probed] == ["decode-0"]


def test_a_restart_that_one_proxy_sees_empties_the_cache_for_all(site: Site) -> None:
    a, b, _ = site.proxies
    ask = facts("one", _PROMPT)
    instance = a.acquire(Role.PREFILL, ask)
    a.prefixes.record_report(ask, 1000, 0)
    a.fleet.release(instance, ask)
    site.after()
    before = b.member(instance.id).instance
    assert b.prefixes.cached_tokens(facts("x", _PROMPT))
    member = a.member(instance.id)
    a.fleet.record_probe(member, False, None)
    a.fleet.record_probe(member, True, None)
    site.after()
    assert not b.prefixes.cached_tokens(facts("x", _PROMPT))
    assert b.member(instance.id).instance is not before
    after = b.member(instance.id).instance
    c = site.proxies[2]
    c.fleet.record_probe(c.member(instance.id), False, None)
    c.fleet.record_probe(c.member(instance.id), True, None)
    site.after()
    assert b.member(instance.id).instance is after  # the same restart, told again


def test_proxies_with_other_keys_do_not_believe_each_other() -> None:
    site = Site(1)
    stranger = site.start(secret=b"x" * 32)
    site.after(1.0)
    stranger.acquire(Role.DECODE, facts("one", tokens=100))
    site.after(1.0)
    a = site.proxies[0]
    assert not len(a.shared.exchange.siblings)
    assert a.shared.exchange.refused["authentication"] > 0
    assert all(member.in_flight == 0 for member in a.fleet.members)


def test_another_policy_is_told_to_the_operator(caplog: pytest.LogCaptureFixture) -> None:
    site = Site(1)
    site.start(policy=LeastLoad)
    site.after(2.0)
    told = [record for record in caplog.records if "--policy" in record.getMessage()]
    assert len(told) == 2  # once at each
    assert "LeastLoad" in told[0].getMessage()


def test_other_settings_for_models_are_told_once_they_have_lasted(caplog: pytest.LogCaptureFixture) -> None:
    def told() -> int:
        return sum("`models`" in record.getMessage() for record in caplog.records)

    site = Site(2)
    a, b = (each.shared for each in site.proxies)
    for mark in ("1", "2"):  # a changed file reaches one proxy after the other
        a.describe_models(mark)
        site.after(3.0)
        b.describe_models(mark)
        site.after(3.0)
    assert told() == 0
    a.describe_models("")
    site.after(10.0)
    assert told() == 2  # once at each
    b.describe_models("")
    site.after(3.0)
    b.describe_models("3")
    site.after(10.0)
    assert told() == 4


def test_clocks_may_differ() -> None:
    site = Site(1)
    site.start(clock_offset_s=45.0)
    late = site.start(clock_offset_s=-90.0)
    site.after(1.0)
    a = site.proxies[0]
    assert len(a.shared.exchange.siblings) == 1
    assert a.shared.exchange.refused["format"] > 0
    assert not len(late.shared.exchange.siblings)


def test_a_proxy_that_is_cut_off_goes_on_and_says_so(site: Site) -> None:
    a, b, _ = site.proxies
    b.transport.is_connected = False
    site.after(LEASE_S + HEARTBEAT_S)
    assert b.shared.health() == {"reachable": False, "alive": 0}
    assert a.shared.health() == {"reachable": True, "alive": 1}
    ask = facts("one", _PROMPT)
    instance = b.acquire(Role.PREFILL, ask)
    b.transport.reconnect()
    site.after(2 * HEARTBEAT_S)
    assert b.shared.health() == {"reachable": True, "alive": 2}
    assert _load(a, instance.id)[0] == 1


def test_without_siblings_nothing_is_kept() -> None:
    site = Site(1)
    a = site.proxies[0]
    for number in range(100):
        a.acquire(Role.PREFILL, facts(f"leg {number}", _PROMPT))
    assert not a.shared.exchange._batch  # pyright: ignore[reportPrivateUsage]


def test_settings_reach_everybody_even_if_a_message_is_lost(site: Site) -> None:
    a, b, c = site.proxies
    used: list[tuple[str, object]] = []
    b.shared.settings.apply = lambda name, value: used.append((name, value))
    a.shared.settings.write("drain/decode-0", True)
    site.after()
    assert used == [("drain/decode-0", True)]
    site.network.is_lost = lambda: True
    a.shared.settings.write("drain/decode-0", False)
    site.after()
    site.network.is_lost = lambda: False
    site.after(5 * HEARTBEAT_S)
    assert used[-1] == ("drain/decode-0", False)
    assert a.shared.settings.digest == b.shared.settings.digest == c.shared.settings.digest
    sent = a.shared.exchange.sent_messages
    site.after(10 * HEARTBEAT_S)
    assert a.shared.exchange.sent_messages - sent <= 11  # heartbeats, and nothing is repeated
    new = site.start()
    site.after(1.5)
    assert new.shared.settings.digest == a.shared.settings.digest


def test_each_engine_is_listened_to_by_one_proxy(site: Site) -> None:
    called: list[int] = []
    for number, proxy in enumerate(site.proxies):
        proxy.shared.reassign = lambda number=number: called.append(number)

    def owners(id: str) -> list[int]:
        return [number for number, each in enumerate(site.proxies) if each.shared.owns(each.member(id))]

    ids = [engine.id for engine in _engines()]
    before = {id: owners(id) for id in ids}
    assert all(len(owner) == 1 for owner in before.values())
    (lost,) = before[ids[0]]
    site.proxies.pop(lost).transport.vanish()
    site.after(LEASE_S + HEARTBEAT_S)
    assert len(owners(ids[0])) == 1
    assert sorted(set(called) - {lost}) == sorted({0, 1, 2} - {lost})


def test_what_one_proxy_hears_of_an_engine_all_know(site: Site) -> None:
    a, b, c = site.proxies
    ask = facts("x", _PROMPT)._replace(model="m")

    def known(proxy: SharedProxy) -> int:
        return proxy.prefixes.cached_tokens(ask).get(proxy.member("prefill-0").instance, 0)

    member = a.member("prefill-0")
    stored = BlockStored(
        BlockLocation("device"),
        b"".join(number.to_bytes(8, "big") for number in (1, 2, 3, 4)),
        8,
        tokens=array("I", _PROMPT[: 4 * 128]).tobytes(),
        block_size=128,
    )
    a.prefixes.event_sources.apply(member, EventBatch(EventSource("vllm"), (stored,)), "m")
    site.after()
    assert [known(each) for each in (a, b, c)] == [512, 512, 512]
    gone = BlockRemoved(BlockLocation("device"), (4).to_bytes(8, "big"), 8)
    a.prefixes.event_sources.apply(member, EventBatch(EventSource("vllm"), (gone,)), "m")
    site.after()
    assert [known(each) for each in (a, b, c)] == [384, 384, 384]
    new = site.start()
    site.after(1.5)
    assert known(new) == 384
    a.prefixes.event_sources.apply(member, None, "m")
    site.after()
    assert [known(each) for each in (a, b, c, new)] == [0, 0, 0, 0]


def test_a_fault_costs_one_message(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b, _ = site.proxies
    with monkeypatch.context() as faulty:
        faulty.setattr(b.shared, "apply_entry", None)
        a.acquire(Role.DECODE, facts("one", tokens=100))
        site.after()
    assert b.shared.exchange.refused.pop("fault") == 1
    assert "could not be processed" in caplog.text
    instance = a.acquire(Role.DECODE, facts("two", tokens=100))
    site.after()
    assert _load(b, instance.id)[0] == _load(a, instance.id)[0]


def test_a_proxy_with_other_block_hashes_listens_to_nobody_for_this_one() -> None:
    site = Site(1)
    site.start(policy=LeastLoad)
    site.after(1.0)
    a = site.proxies[0]
    assert len(a.shared.exchange.siblings) == 1
    assert all(a.shared.owns(member) for member in a.fleet.members)


def _serve_adapters(proxy: SharedProxy) -> None:
    for member in proxy.fleet.members:
        models = frozenset(("m", "a", "b"))
        proxy.fleet.record_probe(member, True, models, None, None, "m", ("a", "b"))
        assert member.adapter_slots is not None
        member.adapter_slots.forget(member.adapter_slots.loaded)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_an_adapter_stays_where_any_proxy_has_used_it(site: Site, role: Role) -> None:
    a, b, c = site.proxies
    for proxy in (a, b, c):
        _serve_adapters(proxy)
    ask = facts("one", tokens=100)._replace(model="a")
    used = a.acquire(role, ask)
    site.after()
    a.fleet.release(used, ask)
    site.after()
    for number, proxy in enumerate((b, c, b, c)):
        request = facts(f"more-{number}", tokens=100)._replace(model="a")
        again = proxy.acquire(role, request)
        assert again.id == used.id
        proxy.fleet.release(again, request)
        site.after()
    assert [proxy.fleet.adapter_legs(role, loaded=False) for proxy in (a, b, c)] == [1, 0, 0]
    site.after(HEARTBEAT_S)
    late = site.start()
    _serve_adapters(late)
    slots = late.member(used.id).adapter_slots
    assert slots is not None
    assert "a" not in slots  # the control
    site.after(3.0)
    assert "a" in slots


def test_what_another_proxys_leg_took_to_load_is_not_taken_for_computing(site: Site) -> None:
    a, b, _ = site.proxies
    for proxy in site.proxies:
        _serve_adapters(proxy)

    def leg(number: int, model: str, seconds: float) -> None:
        ask = facts(f"{model}-{number}", tokens=1000)._replace(model=model)
        instance = a.acquire(Role.PREFILL, ask)
        site.after(seconds)
        a.prefixes.record_report(ask, 1000, 0)
        a.fleet.release(instance, ask)
        site.after()

    a.fleet.drain("prefill-1")
    for number in range(20):
        leg(number, "m", 0.2)
        slots = a.member("prefill-0").adapter_slots
        assert slots is not None
        slots.forget(("a",))
        leg(number, "a", 1.2)
    for proxy in (a, b):
        speed = proxy.member("prefill-0").backlog.cost_model
        assert speed.predict_s(1000, 1000) == pytest.approx(0.2, rel=0.1)
        assert speed.adapter_load_s > 0.9
