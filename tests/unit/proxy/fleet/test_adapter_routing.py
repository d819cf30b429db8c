"""Tests where a fleet sends requests for LoRA adapters, and what it believes of engines' slots."""

from array import array
from itertools import count

import pytest

from kvparams.instances import DataParallelRank, Instance, RequestFacts, Role, RoundRobin, SchedulingPolicy
from kvparams.routing.adapter_metrics import AdapterMetrics
from kvparams.routing.adapter_slots import DEFAULT_SLOTS
from kvparams.routing.policies.cache_aware import CacheAware
from kvparams.routing.policies.least_load import LeastLoad
from kvparams.routing.policies.random_choice import RandomChoice
from kvparams.routing.policies.session_affinity import SessionAffinity
from kvparams.routing.policies.two_choices import TwoChoices
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.fleet.adapter_loads import correct_slots
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel
from kvparams_proxy.fleet.probe_answers import ProbeResult, interpret_answer, parse_answer, parse_long_answer
from kvparams_proxy.upstream.types import ResponseHead
from tests.support.proxy.clock import Clock
from tests.support.proxy.shared_site import Waiter

_NUMBERS = count(1)
_ADAPTERS = ("a", "b", "c", "d")
_POLICIES: list[type[SchedulingPolicy]] = [
    CacheAware,
    LeastLoad,
    RandomChoice,
    RoundRobin,
    SessionAffinity,
    TwoChoices,
]


class Site:
    """Engines of one role that serve the base model and four adapters, with two slots each."""

    def __init__(self, policy: type[SchedulingPolicy], engines: int = 2, role: Role = Role.PREFILL) -> None:
        self.clock = Clock()
        self.role = role
        self.prefixes = PrefixCacheModel(self.clock.now, seed=1) if policy is CacheAware else None
        self.fleet = Fleet(
            [Instance(f"e{number}", "1", role, f"http://e{number}", "nixl") for number in range(engines)],
            {role: policy() for role in Role},
            self.clock.now,
            self.clock.call_later,
            slow_start_s=0.0,
            prefixes=self.prefixes,
        )
        self.members = list(self.fleet.members)
        for member in self.members:
            self.probe(member)
            assert member.adapter_slots is not None
            member.adapter_slots.forget(member.adapter_slots.loaded)
            correct_slots(member, AdapterMetrics(2, frozenset()))

    def probe(self, member: Member, *adapters: str) -> None:
        found = adapters or _ADAPTERS
        self.fleet.record_probe(member, True, frozenset(("base", *found)), None, None, "base", found)

    def begin(self, model: str, tokens: list[int] | None = None) -> tuple[Instance, RequestFacts]:
        name = f"r{next(_NUMBERS)}"
        ids = None if tokens is None else array("I", tokens)
        request = RequestFacts(name, name, model, 1, 1, ids, None, prompt_tokens=len(tokens or range(100)))
        instance = self.fleet.acquire(self.role, request, (), Waiter(request))
        assert instance is not None
        return instance, request

    def ask(self, model: str, tokens: list[int] | None = None) -> str:
        instance, request = self.begin(model, tokens)
        self.clock.pass_time(0.1)
        if self.prefixes is not None:
            self.prefixes.record_report(request, len(tokens or range(100)), None)
        self.fleet.release(instance, request)
        return instance.id

    def loads(self, *, loaded: bool = False) -> int:
        return self.fleet.adapter_legs(self.role, loaded=loaded)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize(("policy", "most"), [(CacheAware, 4), (LeastLoad, 4), (RoundRobin, 80)])
def test_an_adapter_stays_where_it_is_loaded(policy: type[SchedulingPolicy], most: int, role: Role) -> None:
    """Four adapters fit into two engines with two slots. Round robin is the control: it stays what it is."""
    site = Site(policy, role=role)
    for _ in range(20):
        for adapter in ("a", "b", "c", "d", "d", "c"):
            site.ask(adapter)
    assert site.loads() + site.loads(loaded=True) == 120
    assert site.loads() == 4 if most == 4 else site.loads() >= most


def test_it_spills_when_waiting_takes_longer_than_loading() -> None:
    site = Site(CacheAware)
    first = site.ask("a")
    running = [site.begin("a") for _ in range(40)]
    went = [instance.id for instance, _ in running]
    assert went[:4] == [first] * 4  # there is little to wait for
    assert len(set(went)) == 2
    assert site.loads() == 2
    for instance, request in running:
        site.fleet.release(instance, request)


def test_decode_spills_at_twice_the_legs() -> None:
    site = Site(CacheAware, role=Role.DECODE)
    first = site.ask("a")
    went = [site.begin("a")[0].id for _ in range(2)]
    assert went[0] == first
    assert went[1] == first  # one leg more than nothing twice
    assert site.begin("a")[0].id != first


def test_the_base_model_and_unknown_models_are_routed_as_ever() -> None:
    site = Site(LeastLoad)
    site.ask("a")
    assert {site.ask("base") for _ in range(64)} == {"e0", "e1"}
    assert site.loads() + site.loads(loaded=True) == 1
    with pytest.raises(ProxyError, match="serves this model"):
        site.ask("unknown")


@pytest.mark.parametrize("policy", _POLICIES)
def test_an_engine_whose_slots_are_all_needed_is_asked_last(policy: type[SchedulingPolicy]) -> None:
    """A request there would wait until the answers of others have ended, whatever the policy."""
    site = Site(policy, role=Role.DECODE)
    slots = site.members[0].adapter_slots
    assert slots is not None
    for adapter in ("a", "b"):
        slots.begin(adapter)
    assert {site.ask("c") for _ in range(6)} == {"e1"}
    slots.end("b")
    assert {site.ask("base") for _ in range(64)} == {"e0", "e1"}  # the control: it is not left out for itself


@pytest.mark.parametrize("policy", [CacheAware, LeastLoad])
def test_what_the_metrics_say_is_believed(policy: type[SchedulingPolicy]) -> None:
    site = Site(policy)
    here = site.ask("a")
    other = next(each for each in site.members if each.instance.id != here)
    correct_slots(other, AdapterMetrics(2, frozenset({"b"})))  # others' requests
    assert {site.ask("b") for _ in range(4)} == {other.instance.id}
    correct_slots(other, AdapterMetrics(3, frozenset({"never", "heard"})))
    assert other.adapter_slots is not None
    assert (other.adapter_slots.capacity, other.adapter_slots.loaded) == (3, ["b"])


def test_what_is_loaded_at_run_time_is_in_a_slot_and_what_is_unloaded_is_not() -> None:
    site = Site(LeastLoad)
    first, second = site.members
    site.probe(second, *_ADAPTERS, "new")
    assert {site.ask("new") for _ in range(3)} == {"e1"}  # the other one does not serve it
    assert site.loads() == 0  # vLLM loads an adapter when it is told of it
    site.probe(first, *_ADAPTERS, "new")
    assert {site.ask("new") for _ in range(3)} == {"e0", "e1"}
    for member in (first, second):
        site.probe(member)
    assert not site.fleet.may_serve_model("new")
    assert all(member.adapter_slots is not None and "new" not in member.adapter_slots for member in site.members)


def test_a_restarted_engine_has_loaded_what_it_serves_as_after_its_first_start() -> None:
    site = Site(LeastLoad)
    site.ask("a")
    (member,) = (each for each in site.members if each.adapter_slots is not None and "a" in each.adapter_slots)
    running, request = site.begin("a")
    assert member.instance is running
    for ready in (False, True):
        site.fleet.record_probe(member, ready, member.models, None, None, None, _ADAPTERS)
    assert member.adapter_slots is not None
    assert member.adapter_slots.loaded == list(_ADAPTERS[-DEFAULT_SLOTS:])
    member.adapter_slots.begin("b")
    loaded = member.adapter_slots.loaded
    site.fleet.release(running, request)  # a leg of the earlier incarnation changes nothing
    assert member.adapter_slots.loaded == loaded
    site.fleet.record_probe(member, True, frozenset(("base",)), None, None, "base", ())
    assert member.adapter_slots is None


def test_only_a_probe_says_that_an_engine_has_lost_an_adapter() -> None:
    site = Site(LeastLoad)
    probed: list[Member] = []
    site.fleet.probe = probed.append
    first, second = site.members
    assert site.fleet.check_adapter(first.instance, "a") == ("e0",)
    assert probed == [first]
    assert "a" in first.adapters  # that a leg was told so is no evidence
    site.probe(first, "b", "c", "d")
    assert {site.ask("a") for _ in range(4)} == {"e1"}
    assert {site.ask("base") for _ in range(64)} == {"e0", "e1"}
    assert site.fleet.has_candidates(Role.PREFILL, "a", ("e0",))
    assert not site.fleet.has_candidates(Role.PREFILL, "a", ("e1",))  # nobody else has it
    site.probe(second, "b", "c", "d")
    assert not site.fleet.may_serve_model("a")
    site.probe(first)
    assert {site.ask("a") for _ in range(2)} == {"e0"}


def test_an_adapter_is_looked_for_on_all_ranks_behind_a_url() -> None:
    site = Site(LeastLoad)
    ranks = [DataParallelRank(number, 3) for number in range(3)]
    for rank in ranks:
        spec = Instance(f"r{rank.index}", "1", Role.PREFILL, "http://r", "nixl", rank=rank)
        site.probe(site.fleet.add(spec))
    probed: list[Member] = []
    site.fleet.probe = probed.append
    member = next(each for each in site.fleet.members if each.instance.id == "r1")
    assert site.fleet.check_adapter(member.instance, "a") == ("r0", "r1", "r2")
    assert [each.instance.id for each in probed] == ["r0", "r1", "r2"]


@pytest.mark.parametrize("model", ["base", "unknown", None])
def test_a_base_model_is_not_taken_for_lost(model: str | None) -> None:
    site = Site(LeastLoad)
    probed: list[Member] = []
    site.fleet.probe = probed.append
    assert site.fleet.check_adapter(site.members[0].instance, model) == ()
    stranger = Instance("e0", "other", Role.PREFILL, "http://e0", "nixl")
    assert site.fleet.check_adapter(stranger, "a") == ()
    assert not probed


def test_adapters_share_no_prefixes() -> None:
    site = Site(CacheAware)
    assert site.prefixes is not None
    tokens = list(range(1000))

    def cached(model: str) -> int:
        facts = RequestFacts("r", "r", model, 1, 1, array("I", tokens), None, prompt_tokens=len(tokens))
        assert site.prefixes is not None
        return max(site.prefixes.cached_tokens(facts).values(), default=0)

    site.ask("a", tokens)
    assert cached("a") > 900  # the control: the same adapter has them
    assert (cached("b"), cached("base")) == (0, 0)
    site.ask("base", tokens)
    assert cached("base") > 900
    assert cached("b") == 0


def test_the_time_to_load_is_learnt_and_no_other_time_with_it() -> None:
    """Computing a token takes 0.1 ms, loading 2 s: the first guess is 0.5 s."""
    site = Site(CacheAware, engines=1)
    (member,) = site.members
    tokens = list(range(3000))
    for step in range(120):
        request = RequestFacts(f"r{step}", f"r{step}", "base", 1, 1, None, None, prompt_tokens=3000)
        model = _ADAPTERS[step % 3] if step % 2 else "base"  # three adapters and two slots: each has to be loaded
        request = request._replace(model=model)
        instance = site.fleet.acquire(Role.PREFILL, request, (), Waiter(request))
        assert instance is not None
        site.clock.pass_time(0.3 + (2.0 if step % 2 else 0.0))
        assert site.prefixes is not None
        site.prefixes.record_report(request, len(tokens), 0)
        site.fleet.release(instance, request)
    speed = member.backlog.cost_model
    assert speed.adapter_load_s == pytest.approx(2.0, rel=0.05)
    assert speed.predict_s(3000, 3000) == pytest.approx(0.3, rel=0.05)


# what engines say


def probed(body: bytes) -> list[ProbeResult]:
    """Returns what a list of models says, read at once and in steps."""
    member = Site(LeastLoad).members[0]
    steps = parse_long_answer(body)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        long = end.value
    return [interpret_answer(ResponseHead(200), each, None, member, False) for each in (parse_answer(body), long)]


def test_adapters_are_models_with_a_parent() -> None:
    body = (
        b'{"data":[{"id":"base","root":"/m","parent":null,"owned_by":"vllm"},{"id":"sql","root":"/l","parent":"base",'
        b'"owned_by":"vllm"},{"id":"alias","owned_by":"vllm"},{"id":"chat","root":"/k","parent":"base"},{"id":7}]}'
    )
    for said in probed(body):
        assert said.models == {"base", "sql", "alias", "chat"}
        assert said.adapters is not None
        assert list(said.adapters) == ["sql", "chat"]
        assert said.base == "base"


def test_an_adapter_of_sglang_has_the_name_by_which_requests_ask_for_it() -> None:
    body = b'{"data":[{"id":"m","owned_by":"sglang"},{"id":"sql","root":"/l","parent":"m","owned_by":"sglang"}]}'
    for said in probed(body):
        assert said.models == {"m", "m:sql"}
        assert said.adapters is not None
        assert list(said.adapters) == ["m:sql"]
