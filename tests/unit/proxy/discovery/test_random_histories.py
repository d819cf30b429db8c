"""Tests that the fleet follows any history of a Kubernetes API, whatever goes wrong on the way."""

import asyncio
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvparams.instances import Role, RoundRobin
from kvparams_proxy.config.discovery_url import KubernetesSource
from kvparams_proxy.discovery.kubernetes_api import KubernetesAPI
from kvparams_proxy.discovery.kubernetes_provider import KubernetesProvider
from kvparams_proxy.discovery.object_watcher import ObjectWatcher
from kvparams_proxy.discovery.watched_objects import WatchedObjects
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.registry.instance_spec import SpecRules
from kvparams_proxy.fleet.registry.registry import Registry
from tests.support.kubernetes.object_history import ObjectHistory
from tests.support.kubernetes.simulated_api import SimulatedAPI
from tests.support.virtual_loop import VirtualLoop

_SELECTOR = "app=vllm"
_NAMES = [f"pod-{number}" for number in range(8)]
_SETTLE_S = 2.0
_RULES = SpecRules(frozenset(("nixl",)))


class Site:
    """A registry that follows a simulated API."""

    def __init__(self, seed: int = 0) -> None:
        self.loop = VirtualLoop()
        self.history = ObjectHistory()
        self.api = SimulatedAPI(self.history, _SELECTOR, Random(seed))
        self.deleted_at: dict[str, float] = {}
        fleet = Fleet((), {role: RoundRobin() for role in Role}, self.loop.time, self.loop.call_later)
        self.registry = Registry(fleet, _RULES)
        self.provider = KubernetesProvider(
            KubernetesSource(_SELECTOR), cast("KubernetesAPI", cast("object", self.api)), _RULES
        )
        self.task = self.loop.create_task(self.provider.watch(self.registry))

    def put(
        self, name: str, *, ready: bool = True, terminating: bool = False, labels: dict[str, str] | None = None
    ) -> None:
        """Creates or changes a pod."""
        conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
        address = f"10.0.0.{_NAMES.index(name) + 1}"
        self.history.put(
            name,
            {"app": "vllm", "kvparams.io/role": "decode"} if labels is None else labels,
            metadata={"deletionTimestamp": "now"} if terminating else {},
            status={"podIP": address, "phase": "Running", "conditions": conditions},
        )
        self.deleted_at.pop(name, None)

    def delete(self, name: str) -> None:
        """Deletes a pod."""
        self.history.delete(name)
        self.deleted_at[name] = self.loop.time()

    def after(self, seconds: float) -> None:
        """Lets time pass, and checks what must hold at every moment."""
        end_s = self.loop.time() + seconds
        while self.loop.time() < end_s:
            self.loop.run(asyncio.sleep(min(end_s - self.loop.time(), 0.1)))
            assert not self.loop.faults
            assert not self.task.done()

    def close(self) -> None:
        """Ends the provider."""
        self.task.cancel()
        self.loop.run(asyncio.wait([self.task]))

    @property
    def fleet(self) -> dict[str, tuple[str, bool]]:
        """What the registry has: the uid of each, and whether it is drained."""
        return {id: (owned.spec.uid or "", owned.spec.drain) for id, owned in self.registry.owned.items()}

    @property
    def wanted(self) -> dict[str, tuple[str, bool]]:
        """What a fresh list says."""
        wanted: dict[str, tuple[str, bool]] = {}
        for pod in self.history.objects(_SELECTOR):
            facts = pod["metadata"]
            is_ready = pod["status"]["conditions"][0]["status"] == "True"
            wanted[facts["name"]] = facts["uid"], not is_ready or "deletionTimestamp" in facts
        return wanted


def _names() -> st.SearchStrategy[str]:
    return st.sampled_from(_NAMES)


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), _names(), st.booleans(), st.booleans()),
        st.tuples(st.just("delete"), _names(), st.none(), st.none()),
        st.tuples(st.just("relabel"), _names(), st.none(), st.none()),
        st.tuples(st.just("wait"), st.floats(0.0, 1.0), st.none(), st.none()),
        st.tuples(st.just("forget"), st.none(), st.none(), st.none()),
        st.tuples(st.just("others"), st.integers(1, 1000), st.none(), st.none()),
        st.tuples(st.just("away"), st.booleans(), st.none(), st.none()),
        st.tuples(st.just("forbidden"), st.booleans(), st.none(), st.none()),
        st.tuples(st.just("empty"), st.none(), st.none(), st.none()),
        st.tuples(st.just("cut"), st.floats(0.0, 0.5), st.none(), st.none()),
        st.tuples(st.just("repeat"), st.floats(0.0, 0.5), st.none(), st.none()),
    ),
    max_size=40,
)


def _do(site: Site, step: tuple[Any, ...]) -> None:
    kind, value, ready, terminating = step
    if kind == "put":
        site.put(value, ready=ready, terminating=terminating)
    elif kind == "delete":
        site.delete(value)
    elif kind == "relabel":
        site.put(value, labels={"app": "vllm", "kvparams.io/role": "prefill"})
    elif kind == "wait":
        before = set(site.fleet)
        site.after(value)
        is_wanted = before & set(site.wanted)
        assert is_wanted <= set(site.fleet), "an engine that is there is never taken away"
    elif kind == "forget":
        site.history.others_change()
        site.history.forget()
    elif kind == "others":
        site.history.others_change(value)
    elif kind == "away":
        site.api.is_away = value
    elif kind == "forbidden":
        site.api.is_forbidden = value
    elif kind == "empty":
        site.api.is_next_empty = True
    elif kind == "cut":
        site.api.cut_chance = value
    else:
        site.api.repeat_chance = value


@settings(deadline=None)
@given(_STEPS, st.integers(0, 1 << 30))
def test_the_fleet_is_what_a_fresh_list_says_two_seconds_after_the_last_event(
    steps: list[tuple[Any, ...]], seed: int
) -> None:
    _follow(steps, seed)


@pytest.mark.slow
def test_so_it_is_after_thousands_of_histories(
    effort: Callable[[int, int], int], record: Callable[[dict[str, Any]], None]
) -> None:
    count = effort(2_000, 10_000)
    known = [HealthCheck.too_slow, HealthCheck.data_too_large]
    settings(deadline=None, max_examples=count, suppress_health_check=known)(
        given(_STEPS, st.integers(0, 1 << 30))(_follow)
    )()
    record({"histories of a Kubernetes API": count})


def _follow(steps: list[tuple[Any, ...]], seed: int) -> None:
    site = Site(seed)
    for name in _NAMES[:3]:
        site.put(name)
    site.after(1.0)
    for step in steps:
        _do(site, step)
    was_away = site.api.is_away or site.api.is_forbidden
    site.api.is_away = site.api.is_forbidden = False
    site.api.cut_chance = 0.0
    if was_away:
        site.after(10.0)  # the longest back-off
    site.after(_SETTLE_S)
    assert site.fleet == site.wanted
    site.close()


@pytest.fixture
def site() -> Iterator[Site]:
    """Returns a site with two engines that are known."""
    site = Site()
    site.put("pod-0")
    site.put("pod-1")
    site.after(1.0)
    assert set(site.fleet) == {"pod-0", "pod-1"}
    yield site
    site.close()


def test_a_pod_that_is_deleted_while_a_watch_is_cut_is_gone_within_two_seconds(site: Site) -> None:
    site.api.is_away = True
    site.after(0.1)
    site.delete("pod-0")
    site.history.others_change()
    site.history.forget()
    site.api.is_away = False
    site.after(_SETTLE_S)
    assert set(site.fleet) == {"pod-1"}


def test_a_pod_of_the_same_name_is_another_incarnation(site: Site) -> None:
    before = site.registry.owned["pod-0"].spec.uid
    site.delete("pod-0")
    site.put("pod-0")
    site.after(_SETTLE_S)
    assert site.registry.owned["pod-0"].spec.uid != before


def test_one_empty_list_changes_nothing_and_two_do(site: Site) -> None:
    site.api.is_next_empty = True
    site.history.others_change()
    site.history.forget()
    site.put("pod-1", ready=False)
    site.after(_SETTLE_S)
    assert set(site.fleet) == {"pod-0", "pod-1"}
    site.api.is_away = True
    site.after(0.1)
    for name in ("pod-0", "pod-1"):
        site.delete(name)
    site.history.others_change()
    site.history.forget()
    site.api.is_away = False
    site.after(2 * _SETTLE_S)
    assert site.fleet == {}


@pytest.mark.parametrize("how", ["is_away", "is_forbidden"])
def test_ten_minutes_without_the_api_change_nothing_and_are_said(site: Site, how: str) -> None:
    setattr(site.api, how, True)
    site.after(600.0)
    assert set(site.fleet) == {"pod-0", "pod-1"}
    state = site.registry.sources[site.provider.source]
    assert state.unreachable is not None
    assert state.unreachable.startswith("the API server")
    setattr(site.api, how, False)
    site.after(12.0)
    assert state.unreachable is None


async def _believe_at_once(watcher: ObjectWatcher) -> None:
    found = await watcher._api.list()  # pyright: ignore[reportPrivateUsage]
    watcher.watched.replace(found.objects, found.version)
    watcher._changed(watcher.watched)  # pyright: ignore[reportPrivateUsage]


def test_control_without_the_second_list_an_empty_one_empties_the_fleet(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectWatcher, "_list", _believe_at_once)
    site.api.is_next_empty = True
    site.history.others_change()
    site.history.forget()
    site.put("pod-1", ready=False)
    site.after(0.2)
    assert site.fleet == {}


def test_control_a_watch_that_starts_anew_without_a_list_keeps_what_was_deleted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As lightkube's own watch does, and production-stack's did."""

    def keep(self: WatchedObjects, objects: Any, version: str) -> None:
        for each in objects:
            self.apply("ADDED", each)
        self.version = version

    monkeypatch.setattr(WatchedObjects, "replace", keep)
    site.api.is_away = True
    site.after(0.1)
    site.delete("pod-0")
    site.history.others_change()
    site.history.forget()
    site.api.is_away = False
    site.after(_SETTLE_S)
    assert "pod-0" in site.fleet
