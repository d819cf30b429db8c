"""Tests gauges under production-stack's names: means of the last minute, on a test's own clock."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.instances import Instance, RequestFacts, Role, RoundRobin
from kvparams.routing.request_lifecycle import LifecycleState, RequestLifecycle, RequestOutcome
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.telemetry.instance_stats import InstanceStats, InstanceTotals, SlidingWindow
from kvparams_proxy.telemetry.metrics import Metrics
from kvparams_proxy.telemetry.production_stack_gauges import ProductionStackGauges
from kvparams_proxy.telemetry.request_record import RequestRecord
from tests.support.proxy.clock import Clock
from tests.support.proxy.stage import StartStage

# the window


def test_what_is_older_than_a_minute_is_not_in_it() -> None:
    window = SlidingWindow(0.0)
    for now in range(15, 121, 15):  # a scrape every 15 s, one leg between two
        seconds, added = window.observe(now, {"p": InstanceTotals(legs=now // 15, legs_s=now)})
        assert seconds == min(now, 60)
        assert added["p"] == InstanceTotals(legs=min(now, 60) // 15, legs_s=min(now, 60))


def test_a_scrape_that_comes_late_has_all_since_the_one_before() -> None:
    window = SlidingWindow(0.0)
    assert window.observe(300.0, {"p": InstanceTotals(legs=5)}) == (300.0, {"p": InstanceTotals(legs=5)})
    assert window.observe(900.0, {"p": InstanceTotals(legs=6)}) == (600.0, {"p": InstanceTotals(legs=1)})


def test_who_comes_later_has_done_nothing_before_and_who_left_is_forgotten() -> None:
    window = SlidingWindow(0.0)
    window.observe(10.0, {"a": InstanceTotals(legs=100)})
    assert window.observe(20.0, {"a": InstanceTotals(legs=101), "b": InstanceTotals(legs=3)}).added[
        "b"
    ] == InstanceTotals(legs=3)
    assert window.observe(70.0, {"b": InstanceTotals(legs=3)}) == (60.0, {"b": InstanceTotals(legs=3)})
    assert window.observe(75.0, {"a": InstanceTotals(legs=102)}) == (
        65.0,
        {"a": InstanceTotals(legs=102)},
    )  # another one


@given(st.lists(st.tuples(st.floats(0.01, 40), st.integers(0, 3), st.booleans()), max_size=200))
def test_it_is_what_was_added_in_a_minute_or_little_more(steps: list[tuple[float, int, bool]]) -> None:
    """Whoever looks, and how often."""
    window, now, legs = SlidingWindow(0.0), 0.0, 0
    added: list[tuple[float, int]] = []
    looks = [0.0]
    for pause, more, look in steps:
        now += pause
        legs += more
        added.append((now, more))
        if not look:
            continue
        seconds, found = window.observe(now, {"p": InstanceTotals(legs=legs)})
        since = now - seconds
        assert any(abs(since - at) < 1e-6 for at in looks)
        assert found["p"].legs == sum(number for at, number in added if at > since + 1e-6)
        old = [at for at in looks if at <= now - 60]
        assert since >= (max(old) if old else 0.0) - 5 - 1e-6  # those that come too close together are left out
        assert since <= (now - 60 if old else 0.0) + 1e-6
        assert len(window) <= 60 / 5 + 3
        looks.append(now)


def test_a_window_that_is_looked_at_without_end_stays_small() -> None:
    window = SlidingWindow(0.0)
    for number in range(10_000):
        assert 60 <= window.observe(number / 10, {"p": InstanceTotals()}).seconds < 66 or number <= 600
    assert len(window) <= 60 / 5 + 3


def test_a_tally_and_its_sums_have_the_same_members() -> None:
    assert {*InstanceStats.__slots__, "begun"} == set(InstanceTotals._fields)
    tally = InstanceStats()
    for number, name in enumerate(InstanceStats.__slots__, 2):
        setattr(tally, name, number)
    assert tally.totals(1)._asdict() == {
        **{n: getattr(tally, n) for n in InstanceStats.__slots__},
        "begun": tally.legs + 1,
    }
    assert tally.totals(1).minus(tally.totals(1)) == InstanceTotals()


# what is summed of a request


def over(
    metrics: Metrics,
    steps: list[tuple[LifecycleState, str, float]],
    outcome: RequestOutcome = "ok",
    stream: bool = True,
    **told: Any,
) -> None:
    """A request that was so long in each of these states."""
    at = 100.0
    life = RequestLifecycle(lambda: at)
    metrics.request_began(life)
    for state, who, seconds in steps:
        life.enter(state, who)
        at += seconds
    life.finish(outcome)
    account = RequestRecord(RequestFacts("r", "t", None, 1, 1, None, None), "/v1/completions", stream, life, [], None)
    for name, value in told.items():
        setattr(account, name, value)
    metrics.ended(account)


SPLIT: list[tuple[LifecycleState, str, float]] = [
    ("queued", "", 2.0),
    ("prefill", "p0", 1.0),
    ("result", "p0", 0.0),
    ("decode", "d0", 0.5),
    ("first_byte", "", 7.0),
]


def test_waits_prompts_and_answers_are_those_of_the_instances_that_did_them() -> None:
    metrics = Metrics()
    over(metrics, SPLIT, prompt_tokens=30, completion_tokens=8, stream_events=9)
    assert metrics.instance_totals("p0", 0) == InstanceTotals(waits=1, waits_s=2.0, prompts=1, prompt_tokens=30)
    assert metrics.instance_totals("d0", 0) == InstanceTotals(waits=1, answers=1, answer_tokens=8, gaps=7, gaps_s=7.0)
    over(metrics, SPLIT, prompt_tokens=30, stream_events=15)  # its client has not asked for usage
    assert metrics.instance_totals("d0", 0) == InstanceTotals(
        waits=2, answers=2, answer_tokens=23, gaps=21, gaps_s=14.0
    )
    over(metrics, SPLIT, stream=False, completion_tokens=4)
    assert metrics.instance_totals("d0", 0) == InstanceTotals(
        waits=3, answers=3, answer_tokens=27, gaps=21, gaps_s=14.0
    )


def test_a_leg_that_failed_has_computed_and_answered_nothing() -> None:
    metrics = Metrics()
    over(
        metrics,
        [("prefill", "p0", 1.0), ("prefill", "p1", 1.0), ("result", "p1", 0.0), ("decode", "d0", 1.0)],
        "failed",
        prompt_tokens=30,
    )
    assert metrics.instance_totals("p0", 0) == InstanceTotals(waits=1)
    assert metrics.instance_totals("p1", 0) == InstanceTotals(waits=1, prompts=1, prompt_tokens=30)
    assert metrics.instance_totals("d0", 0) == InstanceTotals(waits=1)


# what is said


class Scene:
    """Metrics, a fleet of two and a clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        instances = [
            Instance(f"{role}-0", "b", role, "http://127.0.0.1:1", "nixl") for role in (Role.PREFILL, Role.DECODE)
        ]
        policies = {role: RoundRobin() for role in Role}
        self.fleet = Fleet(instances, policies, self.clock.now, self.clock.call_later)
        self.metrics = Metrics()
        self.gauges = ProductionStackGauges(self.metrics, self.fleet, self.clock.now)
        self.prefill, self.decode = instances

    def scrape(self) -> dict[str, dict[str, float]]:
        families = list(self.gauges.collect())
        assert all(family.type == "gauge" for family in families)
        assert all(sample.labels.keys() == {"server"} for family in families for sample in family.samples)
        return {each.name: {sample.labels["server"]: sample.value for sample in each.samples} for each in families}


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.fleet.close()


def test_without_requests_there_are_no_means_and_no_invented_ones(scene: Scene) -> None:
    said = scene.scrape()
    assert said["vllm:current_qps"] == {"prefill-0": 0.0, "decode-0": 0.0}
    assert said["vllm:healthy_pods_total"] == {"prefill-0": 1.0, "decode-0": 1.0}
    assert said["vllm:num_prefill_requests"] == {"prefill-0": 0.0}
    assert said["vllm:num_decoding_requests"] == {"decode-0": 0.0}
    for name in (
        "avg_prefill_length",
        "avg_decoding_length",
        "avg_latency",
        "avg_itl",
        "router_queueing_delay_seconds",
    ):
        assert said[f"vllm:{name}"] == {}
    assert "vllm:num_requests_swapped" not in said


def test_means_and_rates_are_of_the_last_minute(scene: Scene) -> None:
    steps: list[tuple[LifecycleState, str, float]] = [
        (state, {"p0": "prefill-0", "d0": "decode-0"}.get(who, ""), seconds) for state, who, seconds in SPLIT
    ]
    said: dict[str, dict[str, float]] = {}
    for number in range(6):
        scene.metrics.leg_ended(scene.prefill, 1.0)
        scene.metrics.leg_ended(scene.decode, 7.5)
        over(scene.metrics, steps, prompt_tokens=100 * (number + 1), stream_events=8)
        scene.clock.pass_time(30)
        said = scene.scrape()
    assert said["vllm:current_qps"] == {"prefill-0": 2 / 60, "decode-0": 2 / 60}
    assert said["vllm:avg_prefill_length"] == {"prefill-0": 550}
    assert said["vllm:avg_decoding_length"] == {"decode-0": 8}
    assert said["vllm:avg_latency"] == {"prefill-0": 1.0, "decode-0": 7.5}
    assert said["vllm:avg_itl"] == {"decode-0": 1.0}
    assert said["vllm:router_queueing_delay_seconds"] == {"prefill-0": 2.0, "decode-0": 0.0}
    scene.clock.pass_time(61)
    assert scene.scrape()["vllm:avg_itl"] == {}


def test_what_runs_is_said_by_role_and_counts_for_the_rate_at_once(scene: Scene) -> None:
    member = next(each for each in scene.fleet.members if each.instance is scene.prefill)
    member.in_flight += 3
    scene.clock.pass_time(10)
    said = scene.scrape()
    assert said["vllm:num_requests_running"] == {"prefill-0": 3, "decode-0": 0}
    assert said["vllm:num_prefill_requests"] == {"prefill-0": 3}
    assert said["vllm:current_qps"]["prefill-0"] == 3 / 10
    member.in_flight -= 3  # taken back before they were sent
    scene.clock.pass_time(10)
    assert scene.scrape()["vllm:current_qps"]["prefill-0"] == 0


def test_an_instance_that_does_not_answer_probes_is_not_healthy(scene: Scene) -> None:
    next(iter(scene.fleet.members)).ready = False
    assert sum(scene.scrape()["vllm:healthy_pods_total"].values()) == 1


def test_instances_that_leave_leave_the_metrics(scene: Scene) -> None:
    scene.scrape()
    scene.fleet.remove("decode-0")
    assert all(found.keys() <= {"prefill-0"} for found in scene.scrape().values())


# with engines


async def test_a_dashboard_of_production_stack_finds_its_gauges(stage: StartStage) -> None:
    seen = await stage(engines=1)
    begun = time.monotonic()
    assert (await seen.ask(stream=True)).status_code == 200
    assert (await seen.ask()).status_code == 200
    value = seen.running.metric
    text = (await seen.running.client.get("/metrics")).text
    assert "127.0.0.1" not in text
    assert await value('vllm:avg_decoding_length{server="decode-0"}') == 8
    assert await value('vllm:avg_prefill_length{server="prefill-0"}') == len("Who is there?")
    for server in ("prefill-0", "decode-0"):
        assert await value(f'vllm:current_qps{{server="{server}"}}') >= 2 / (time.monotonic() - begun + 60)
        assert 0 < await value(f'vllm:avg_latency{{server="{server}"}}') < 5
        assert await value(f'vllm:healthy_pods_total{{server="{server}"}}') == 1
        assert await value(f'vllm:router_queueing_delay_seconds{{server="{server}"}}') == 0
        assert await value(f'vllm:num_requests_running{{server="{server}"}}') == 0
    assert await value("vllm:num_prefill_requests") == await value("vllm:num_decoding_requests") == 0
    assert 0 < await value('vllm:avg_itl{server="decode-0"}') < 5
