"""Tests that proxies of a site agree which LoRA adapters engines have loaded, and how little they tell for that."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvparams.instances import Instance, RequestFacts, Role
from kvparams.replication.entries import AdapterUsed, Entry
from kvparams.routing.adapter_metrics import AdapterMetrics
from kvparams.routing.policies.least_load import LeastLoad
from kvparams_proxy.coordination.exchange import HEARTBEAT_S
from kvparams_proxy.fleet.adapter_loads import correct_slots
from tests.support.proxy.memory_network import MemoryNetwork
from tests.support.proxy.shared_site import SharedProxy, facts
from tests.support.virtual_loop import VirtualLoop

_ADAPTERS = ("a", "b", "c", "d")
_SOON_S = 0.05


class Site:
    """Two proxies in front of one decode engine with two slots."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self._network = MemoryNetwork(self.loop)
        self._numbers = count()
        engine = Instance("d", "1", Role.DECODE, "http://d", "nixl")
        self.proxies = [SharedProxy(self._network, at, [engine], policy=LeastLoad) for at in range(2)]
        self.after(3.0)
        for proxy in self.proxies:
            member = proxy.member("d")
            proxy.fleet.record_probe(member, True, frozenset(("m", *_ADAPTERS)), None, None, "m", _ADAPTERS)
            assert member.adapter_slots is not None
            member.adapter_slots.forget(member.adapter_slots.loaded)
            correct_slots(member, AdapterMetrics(2, frozenset()))

    def after(self, seconds: float = _SOON_S) -> None:
        """Lets time pass."""
        self.loop.run_until(self.loop.time() + seconds)
        assert not self.loop.faults

    def begin(self, proxy: int, model: str) -> RequestFacts:
        """Begins a leg."""
        ask = facts(f"r{next(self._numbers)}", tokens=10)._replace(model=model)
        self.proxies[proxy].acquire(Role.DECODE, ask)
        return ask

    def end(self, proxy: int, ask: RequestFacts) -> None:
        """Ends a leg."""
        fleet = self.proxies[proxy].fleet
        fleet.release(self.proxies[proxy].member("d").instance, ask)

    def loaded(self, proxy: int) -> list[str]:
        """Returns what a proxy believes to be loaded."""
        slots = self.proxies[proxy].member("d").adapter_slots
        assert slots is not None
        return slots.loaded

    def heard(self, proxy: int) -> list[str]:
        """Returns the list of adapters that a proxy will hear of."""
        heard: list[str] = []
        shared = self.proxies[proxy].shared
        apply = shared.apply_entry

        def hear(sibling: object, entry: Entry) -> None:
            if isinstance(entry, AdapterUsed):
                heard.append(entry.adapter)
            apply(sibling, entry)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

        shared.apply_entry = hear  # type: ignore[method-assign]
        return heard


def test_an_adapter_is_told_when_it_becomes_the_one_that_was_used_last() -> None:
    site = Site()
    heard = site.heard(1)
    legs = [site.begin(0, "a") for _ in range(10)]
    site.after()
    assert heard == ["a"]
    legs += [site.begin(0, each) for each in "bbb"]
    site.after()
    assert heard == ["a", "b"]
    for leg in legs[:10]:
        site.end(0, leg)
    site.after()
    assert heard == ["a", "b", "a"]  # it was in use until now
    assert site.loaded(0) == site.loaded(1) == ["b", "a"]
    site.begin(0, "m")
    site.after()
    assert len(heard) == 3


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(_ADAPTERS), st.booleans()), max_size=20))
def test_proxies_believe_the_same_of_legs_one_after_the_other(steps: list[tuple[int, str, bool]]) -> None:
    site = Site()
    for proxy, adapter, is_long in steps:
        leg = site.begin(proxy, adapter)
        if is_long:
            site.after()
        site.end(proxy, leg)
        site.after()
        assert site.loaded(0) == site.loaded(1)


@pytest.mark.parametrize("is_repeated", [True, False], ids=["repeated", "control-not yet"])
def test_what_a_proxy_has_missed_is_told_again(is_repeated: bool) -> None:
    site = Site()
    transport = site.proxies[1].transport
    transport.is_deaf = True
    site.after(2 * HEARTBEAT_S)
    site.end(0, site.begin(0, "c"))
    site.after(2 * HEARTBEAT_S)
    assert site.loaded(1) == []
    transport.is_deaf = False
    site.after(10 * HEARTBEAT_S if is_repeated else _SOON_S)
    assert site.loaded(1) == (["c"] if is_repeated else [])
