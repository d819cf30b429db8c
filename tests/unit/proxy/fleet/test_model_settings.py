"""Tests that a fleet chooses and limits by what is set for the model, and as for all models where nothing is."""

from collections.abc import Mapping

import pytest

from kvparams.instances import Instance, RequestFacts, Role, RoundRobin
from kvparams.routing.admission import QueueLimits, RoleLimits
from kvparams.routing.model_settings import ModelSettings, SettingsByModel
from kvparams.routing.policies.cache_aware import CacheAware
from kvparams.routing.policies.least_load import LeastLoad
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel
from tests.support.proxy.clock import Clock
from tests.support.proxy.shared_site import Waiter

_DECODE = Role.DECODE


def limited(requests: int) -> ModelSettings:
    return ModelSettings(limits={_DECODE: RoleLimits(requests)})


class Site:
    """Decode engines of models `a` and `b`, two of each; `a0` and `a1` have an adapter `poems`."""

    def __init__(
        self,
        entries: Mapping[str, ModelSettings],
        *,
        usual: int | None = None,
        policies: Mapping[str, object] | None = None,
        role: Role = _DECODE,
        queue: QueueLimits | None = None,
    ) -> None:
        self.clock = Clock()
        self.models = SettingsByModel(entries)
        self.prefixes = PrefixCacheModel(self.clock.now, seed=1)
        self.fleet = Fleet(
            (),
            {each: RoundRobin() for each in Role},
            self.clock.now,
            self.clock.call_later,
            limits={role: RoleLimits(usual)},
            queue=queue,
            slow_start_s=0.0,
            prefixes=self.prefixes if policies and "cached" in policies else None,
            models=self.models,
            model_policies={role: policies or {}},  # pyright: ignore[reportArgumentType]
        )
        self.role = role
        for model in ("a", "b"):
            for number in range(2):
                member = self.fleet.add(Instance(f"{model}{number}", "1", role, "http://h:1", "nixl"))
                self.serve(member, model, *(["poems"] if model == "a" else []))

    def serve(self, member: Member, base: str, *adapters: str) -> None:
        models = frozenset((base, *adapters))
        self.fleet.record_probe(member, True, models, base=base, adapters=adapters)

    def member(self, id: str) -> Member:
        return next(each for each in self.fleet.members if each.instance.id == id)

    def take(self, model: str | None, count: int = 1, tokens: int = 10) -> list[str]:
        """The engines of so many legs that begin; "" for one that waits."""
        found: list[str] = []
        for _ in range(count):
            asked = RequestFacts("r", f"t{self.clock.now()}", model, 1, 1, None, None, prompt_tokens=tokens)
            self.last = Waiter(asked)
            instance = self.fleet.acquire(self.role, asked, (), self.last)
            found.append("" if instance is None else instance.id)
        return found


def test_each_model_has_its_policy_and_its_turns() -> None:
    site = Site({"a": ModelSettings("least_load")}, policies={"a": LeastLoad()})
    site.member("a0").in_flight = site.member("b0").in_flight = 5
    assert site.take("a", 3) == ["a1"] * 3
    assert site.take("b", 4) == ["b0", "b1"] * 2, "the control: everyone in turn, whatever the load"
    assert site.take("poems") == ["a1"], "an adapter follows its base model"
    for id in ("b0", "b1"):
        site.serve(site.member(id), "b", "poems")
    for id in ("a0", "a1"):
        site.serve(site.member(id), "a")
    assert site.take("poems", 2) == ["b0", "b1"], "engines of another model serve it now"
    turns = Site({"a": ModelSettings("round_robin")}, policies={"a": RoundRobin()})
    assert [turns.take(model)[0] for model in "abab"] == ["a0", "b0", "a1", "b1"]


def test_only_models_whose_policy_looks_at_caches_are_in_the_books() -> None:
    entries = {"a": ModelSettings("cache_aware"), "cached": ModelSettings("cache_aware")}
    site = Site(entries, policies={"a": CacheAware(), "cached": CacheAware()}, role=Role.PREFILL)
    assert site.take("b") == ["b0"]
    assert len(site.prefixes) == 0
    asked = RequestFacts("r", "t", "a", 1, 1, None, None, prompt_tokens=10)
    instance = site.fleet.acquire(Role.PREFILL, asked, (), Waiter(asked))
    assert instance is not None
    assert len(site.prefixes) == 1
    assert site.fleet.explain(Role.PREFILL, asked).by_cache is not None
    assert site.fleet.explain(Role.PREFILL, asked._replace(model="b")).by_cache is None
    site.fleet.release(instance, asked)
    assert len(site.prefixes) == 0


@pytest.mark.parametrize("usual", [None, 3])
def test_each_engine_has_the_limit_of_its_model(usual: int | None) -> None:
    site = Site({"a": limited(1)}, usual=usual)
    assert site.take("a", 3) == ["a0", "a1", ""]
    assert site.take("poems") == [""], "an adapter takes the room of its engine"
    control = site.take("b", 7)
    assert control[:6] == ["b0", "b1"] * 3
    assert control[6] == ("b0" if usual is None else "")
    explained = site.fleet.explain(_DECODE, site.last.facts._replace(model="a"))
    assert explained.waits
    assert set(explained.excluded.values()) <= {"no room"}
    assert site.fleet.explain(_DECODE, site.last.facts).waits is (usual is not None), "whoever waits for others"
    assert [site.fleet.limits_of(site.member(id)).requests for id in ("a0", "b0")] == [1, usual]


def test_a_higher_limit_than_that_for_all_holds() -> None:
    site = Site({"a": limited(2)}, usual=1)
    assert site.take("a", 5) == ["a0", "a1", "a0", "a1", ""]
    assert site.take("b", 3) == ["b0", "b1", ""]


def test_a_full_queue_refuses_only_who_would_wait() -> None:
    site = Site({"a": limited(1)}, queue=QueueLimits(waiting=1))
    assert site.take("a", 3) == ["a0", "a1", ""]
    with pytest.raises(ProxyError, match="queue is full"):
        site.take("a")
    assert site.take("b", 2) == ["b0", "b1"]
    assert site.take(None) != [""], "one that names no model finds room where there is some"


def test_an_engine_that_serves_another_model_has_its_limit() -> None:
    site = Site({"a": limited(1), "b": limited(4), "poems": limited(2)})
    assert site.fleet.limits_of(site.member("a0")).requests == 1
    site.serve(site.member("a0"), "b")
    assert site.fleet.limits_of(site.member("a0")).requests == 4
    site.serve(site.member("a0"), "b", "poems")
    assert site.fleet.limits_of(site.member("a0")).requests == 2
    site.serve(site.member("a0"), "other")
    assert site.fleet.limits_of(site.member("a0")).requests is None


def test_a_fleet_without_limits_may_get_some() -> None:
    site = Site({})
    assert "" not in site.take("a", 5)
    site.models.replace({"b": limited(1)})
    site.fleet.model_settings_changed()
    assert sorted(site.take("b", 3)) == ["", "b0", "b1"]
    assert "" not in site.take("a", 2)


def test_limits_may_change_and_who_waits_hears_of_it() -> None:
    site = Site({"a": limited(1)})
    assert site.take("a", 3) == ["a0", "a1", ""]
    waiting = site.last
    site.models.replace({"a": limited(2)})
    site.fleet.model_settings_changed()
    assert waiting.instance is not None
    assert [id != "" for id in site.take("a", 2)] == [True, False]
    last = site.last
    site.models.replace({})
    site.fleet.model_settings_changed()
    assert last.instance is not None
    assert "" not in site.take("a", 5), "no limit is left"
    site.models.replace({"b": limited(1)})
    site.fleet.model_settings_changed()
    assert site.take("b", 3) == ["b0", "b1", ""]
    assert "" not in site.take("a", 2)
