"""Tests that Prometheus metrics are right, are readable, and cannot be filled by a client."""

import asyncio
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from kvparams.instances import Instance, RequestFacts, Role, RoundRobin
from kvparams.routing.admission import RoleLimits
from kvparams.routing.plan import KVLease
from kvparams.routing.request_lifecycle import TRANSITIONS, LifecycleState, RequestLifecycle
from kvparams_proxy.config.sharing import share_directory, write_exchange_key
from kvparams_proxy.fleet.fleet import Fleet
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.requests.body import BodyBudget
from kvparams_proxy.secret import Secret
from kvparams_proxy.telemetry.exposition import MetricsExposition
from kvparams_proxy.telemetry.histogram import Histogram
from kvparams_proxy.telemetry.loop_lag import LoopLag
from kvparams_proxy.telemetry.metrics import FAILURE_KINDS, Metrics
from kvparams_proxy.telemetry.proxy_gauges import InstanceGauges, ProxyGauges
from kvparams_proxy.telemetry.request_record import RequestRecord
from kvparams_proxy.tokenization.tokenizer_choice import TokenizationMethod
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.types import UpstreamLimits
from kvparams_proxy.workers.metrics_hub import WorkerGauges
from tests.support.proxy.acting import Actor, Fault, leg_limit_s
from tests.support.proxy.metrics import metric_becomes
from tests.support.virtual_loop import VirtualLoop

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
NAME = re.compile(r"(?:kvparams_proxy_|vllm:)\w+")
PAGE = Path(__file__).parents[4] / "proxy" / "METRICS.md"
PROMPT = "Who is there?"
BODY: dict[str, Any] = {"model": "stub", "prompt": PROMPT, "max_tokens": 8}
STREAM: dict[str, Any] = BODY | {"stream": True, "stream_options": {"include_usage": True}}


class Stage:
    """A proxy before an engine or two of each role."""

    def __init__(self, running: Any, prefill: list[Actor], decode: list[Actor]) -> None:
        self.running = running
        self.prefill, self.decode = prefill, decode

    async def ask(self, **more: Any) -> Any:
        return await self.running.client.post("/v1/completions", json=BODY | more)

    async def value(self, name: str) -> float:
        return await self.running.metric(f"kvparams_proxy_{name}")

    async def becomes(self, name: str, value: float) -> None:
        """Wait, bounded, until a metric has this value."""
        await metric_becomes(self.running, f"kvparams_proxy_{name}", value)


StartStage = Callable[..., Awaitable[Stage]]


@pytest.fixture
def stage(stack: AsyncExitStack, proxy: Any) -> StartStage:
    async def start(engines: int = 1, dialect: str = "nixl", **changes: object) -> Stage:
        prefill, decode = ([Actor(role) for _ in range(engines)] for role in ("prefill", "decode"))
        for actor in (*prefill, *decode):
            await actor.begin()
            stack.callback(actor.end)
        urls = [[actor.url for actor in actors] for actors in (prefill, decode)]
        return Stage(await proxy(*urls, dialect, **changes), prefill, decode)

    return start


async def test_a_request_is_seen_in_every_state_with_its_lengths_and_times(stage: StartStage) -> None:
    seen = await stage()
    assert (await seen.ask()).status_code == 200
    assert (await seen.ask(**STREAM)).status_code == 200
    for state, visits in {"created": 2, "queued": 0, "prefill": 2, "result": 2, "decode": 2, "first_byte": 2}.items():
        assert await seen.value(f'state_seconds_count{{state="{state}"}}') == visits, state
    assert await seen.value('transitions_total{from="decode",to="first_byte"}') == 2
    for role in (Role.PREFILL, Role.DECODE):
        assert await seen.value(f'leg_time_to_first_token_seconds_count{{role="{role}"}}') == 2
        assert await seen.value(f'leg_seconds_count{{role="{role}"}}') == 2
        assert await seen.value(f'legs_total{{instance="{role}-0",role="{role}"}}') == 2
        assert await seen.value(f'queue_seconds_count{{role="{role}"}}') == 2  # nobody waited: two zeros
        assert await seen.value(f'queue_seconds_sum{{role="{role}"}}') == 0
        assert await seen.value(f'engine_connections{{instance="{role}-0"') >= 1
    assert await seen.value("time_to_first_byte_seconds_count") == 2
    assert await seen.value("time_per_output_token_seconds_count") == 1  # of the stream
    assert await seen.value("prompt_tokens_sum") == 2 * len(PROMPT)
    assert await seen.value("completion_tokens_sum") == 2 * 8
    assert await seen.value("answer_bytes_total") > 500
    assert await seen.running.metric("process_open_fds") > 3
    assert await seen.running.metric("process_resident_memory_bytes") > 1 << 20


async def test_the_bytes_of_an_answer_are_those_that_the_client_got(stage: StartStage) -> None:
    seen = await stage()
    got = [await seen.ask(), await seen.ask(**STREAM), await seen.ask(max_tokens=0)]
    assert [answer.status_code for answer in got] == [200, 200, 400]
    executed = sum(len(answer.content) for answer in got[:2])  # a refusal in front of it all is no answer
    assert await seen.value("answer_bytes_total") == executed
    assert await seen.value('refusals_total{status="400"}') == 1


async def test_a_stream_whose_client_has_not_asked_for_usage_has_a_length_too(stage: StartStage) -> None:
    seen = await stage()
    assert (await seen.ask(stream=True)).status_code == 200
    assert await seen.value("stream_events_count") == 1
    assert await seen.value("stream_events_sum") == 8
    assert await seen.value("completion_tokens_count") == 0  # nobody has said it
    assert (await seen.ask(**STREAM)).status_code == 200
    assert await seen.value("stream_events_sum") == 2 * 8  # the event with the usage is none of them
    assert await seen.value("completion_tokens_sum") == 8
    assert (await seen.ask()).status_code == 200
    assert await seen.value("stream_events_count") == 2  # it was no stream


async def test_cached_tokens_are_those_that_prefill_found(stubbed: Any) -> None:
    for _ in range(3):
        await stubbed.client.post("/v1/completions", json=BODY)
    assert await stubbed.metric("kvparams_proxy_cached_prompt_tokens_total") == 3 * 7


async def test_pending_prefilling_and_decoding_are_told_apart_and_end_at_nought(stage: StartStage) -> None:
    seen = await stage(limits={Role.PREFILL: RoleLimits(requests=2)})
    (prefill,), (decode,) = seen.prefill, seen.decode
    prefill.held, decode.held = asyncio.Event(), asyncio.Event()
    asked = [asyncio.create_task(seen.ask(stream=number % 2 == 0)) for number in range(3)]
    await seen.becomes("requests_prefilling", 2)
    await seen.becomes("requests_pending", 1)
    assert await seen.value('waiting{role="prefill"}') == 1
    assert await seen.value('in_flight{instance="prefill-0"') == 2
    prefill.held.set()
    await seen.becomes("requests_decoding", 3)
    assert await seen.value("requests_pending") == await seen.value("requests_prefilling") == 0
    decode.held.set()
    assert [got.status_code for got in await asyncio.gather(*asked)] == [200] * 3
    assert await seen.value("requests_decoding") == await seen.value("in_flight") == 0
    assert await seen.value('queue_seconds_count{role="prefill"}') == 3
    assert await seen.value('queue_seconds_sum{role="prefill"}') > 0
    assert await seen.value('queue_seconds_bucket{le="0.005",role="prefill"}') >= 2  # those that did not wait


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("reset", "broken"),
        ("500", "error"),
        ("garbage", "garbage"),
        ("not http", "broken"),
        ("silent", "timeout"),
        ("refusal", "refused"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leg_that_fails_is_counted_by_role_and_kind(
    stage: StartStage, role: str, fault: Fault, kind: str
) -> None:
    seen = await stage(retries=0, **{f"{role}_timeout_s": leg_limit_s(fault)})
    (seen.prefill if role == "prefill" else seen.decode)[0].fails(fault)
    got = await seen.ask()
    assert got.status_code >= 400
    assert await seen.value(f'leg_failures_total{{kind="{kind}",role="{role}"}}') == 1
    assert await seen.value("leg_failures_total") == 1
    assert await seen.value(f'refusals_total{{status="{got.status_code}"}}') == 1
    outcome = "refused" if got.status_code < 500 else "failed"
    assert await seen.value(f'requests_total{{outcome="{outcome}"}}') == 1


async def test_an_engine_that_is_not_there_is_unreachable(stage: StartStage) -> None:
    seen = await stage(retries=0)
    seen.prefill[0].end()
    assert (await seen.ask()).status_code == 503
    assert await seen.value('leg_failures_total{kind="unreachable",role="prefill"}') == 1
    assert await seen.value('ready{instance="prefill-0"') == 0


async def test_the_breaker_of_an_engine_that_fails_is_seen(stage: StartStage) -> None:
    seen = await stage(retries=0)
    assert await seen.value('breaker_state{instance="prefill-0"') == 0
    seen.prefill[0].fails("500")
    for _ in range(5):
        await seen.ask()
    assert await seen.value('breaker_state{instance="prefill-0"') == 2
    assert await seen.value('ready{instance="prefill-0"') == 0
    assert await seen.value('instances{role="prefill",state="broken"}') == 1


async def test_retries_that_were_allowed_and_denied(stage: StartStage) -> None:
    seen = await stage(engines=2, retries=1)
    seen.prefill[0].fails("500", times=1)
    assert (await seen.ask()).status_code == 200
    assert await seen.value('retries_total{allowed="yes"}') == 1
    for actor in seen.prefill:
        actor.fails("500", times=5)
    assert (await seen.ask()).status_code == 502
    assert await seen.value('retries_total{allowed="yes"}') == 2
    assert await seen.value('retries_total{allowed="no"}') == 1


async def test_a_stream_that_another_engine_went_on_with_is_a_continuation(stage: StartStage) -> None:
    seen = await stage(engines=2, continuation=True)
    seen.decode[0].breaks_after = 3
    assert (await seen.ask(stream=True)).text.endswith("data: [DONE]\n\n")
    assert await seen.value("continuations_total") == 1
    assert await seen.value("stream_events_sum") == 8  # all of its parts
    assert await seen.value('requests_total{outcome="ok"}') == 1
    assert await seen.value('leg_failures_total{kind="broken",role="decode"}') == 1


async def test_kv_that_nobody_will_fetch_is_released(stage: StartStage) -> None:
    seen = await stage(limits={Role.DECODE: RoleLimits(requests=1)})
    seen.decode[0].held = asyncio.Event()
    first = asyncio.create_task(seen.ask())
    await seen.becomes("requests_decoding", 1)
    second = asyncio.create_task(seen.ask())
    await seen.becomes("requests_pending", 1)  # its prefill is done: its blocks wait for a decode engine
    assert (
        await seen.value('leases{instance="prefill-0",role="prefill"}') == 2
    )  # the first one's may not be fetched yet
    second.cancel()
    await seen.becomes("transfers_released_total", 1)
    assert await seen.value('leases{instance="prefill-0",role="prefill"}') == 1
    seen.decode[0].held.set()
    assert (await first).status_code == 200
    assert await seen.value('leases{instance="prefill-0",role="prefill"}') == 0
    assert await seen.value("transfers_orphaned_total") == 0
    assert await seen.value("releases_running") == 0
    assert await seen.value('requests_total{outcome="gone"}') == 1


async def test_kv_that_nobody_can_be_told_of_is_orphaned(stage: StartStage) -> None:
    seen = await stage(retries=0)
    seen.decode[0].fails("500", times=1)  # it may have begun to fetch: it is not asked for the same blocks again
    assert (await seen.ask()).status_code == 502
    await seen.becomes("transfers_orphaned_total", 1)
    assert await seen.value("transfers_released_total") == 0


async def test_kv_that_a_failed_decode_was_to_fetch_is_orphaned_though_the_client_leaves_later(
    stage: StartStage,
) -> None:
    seen = await stage(engines=2, retries=1)
    for actor in seen.decode:
        actor.fails("500", times=1)
    held = asyncio.Event()
    seen.prefill[1].held = held  # the second attempt's
    asking = asyncio.create_task(seen.ask())
    await seen.becomes('retries_total{allowed="yes"}', 1)
    await seen.becomes("requests_prefilling", 1)
    asking.cancel()
    await seen.becomes('requests_total{outcome="gone"}', 1)
    held.set()
    await seen.becomes("transfers_orphaned_total", 1)


async def test_a_client_fills_no_labels(stage: StartStage) -> None:
    seen = await stage()
    before = (await seen.running.client.get("/metrics")).text
    for number in range(20):
        headers = {"x-request-id": f"invented-{number}", "x-invented": "invented"}
        invented = BODY | {"model": f"invented-{number}", "user": "invented", "cache_salt": f"invented-{number}"}
        await seen.running.client.post("/v1/completions", json=invented, headers=headers)
        await seen.running.client.post(f"/invented-{number}", json=invented)
    after = (await seen.running.client.get("/metrics")).text
    assert "invented" not in after
    assert len(after.splitlines()) == len(before.splitlines()) + 1  # the one new status


# in both formats


@pytest.mark.parametrize("accept", [OPENMETRICS, "text/plain", "", "*/*;q=0.1"])
async def test_both_formats_can_be_read(stubbed: Any, accept: str) -> None:
    await stubbed.client.post("/v1/completions", json=STREAM)
    got = await stubbed.client.get("/metrics", headers={"accept": accept})
    assert got.status_code == 200
    newer = accept.startswith("application/openmetrics-text")
    assert got.headers["content-type"].startswith("application/openmetrics-text" if newer else "text/plain")
    families = {family.name: family for family in (_openmetrics(got.text) if newer else plain(got.text))}
    legs = families["kvparams_proxy_leg_seconds"]
    assert {s.labels["role"] for s in legs.samples} == set(Role)
    assert families["kvparams_proxy_requests"].type == "counter"
    for family in families.values():
        names = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
        assert len(names) == len(set(names)), family.name
        assert family.documentation


@pytest.mark.parametrize("accept", [f"{OPENMETRICS}x", "application/openmetrics-text;=;,;", "\xff"])
async def test_an_accept_header_that_makes_no_sense_gets_plain_or_openmetrics_text(stubbed: Any, accept: str) -> None:
    got = await stubbed.client.get("/metrics", headers={b"accept": accept.encode("latin-1")})
    assert got.status_code == 200
    assert "kvparams_proxy_in_flight" in got.text


def _openmetrics(text: str) -> Iterator[Metric]:
    found = openmetrics.text_string_to_metric_families(text)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return cast("Iterator[Metric]", found)


def documented() -> dict[str, tuple[str, set[str]]]:
    row = rf"^\| `({NAME.pattern})` \| (\w+) \| ([\w, ]*?) ?\|"
    rows = re.findall(row, PAGE.read_text(), re.MULTILINE)
    return {name: (kind, {label for label in labels.split(", ") if label}) for name, kind, labels in rows}


async def test_the_page_names_what_there_is_and_nothing_else(stage: StartStage, tmp_path: Path) -> None:
    write_exchange_key(tmp_path)
    seen = await stage(
        retries=0,
        policy="cache_aware",
        tokenizers={None: TokenizationMethod.BYTES},
        admin_token=Secret("token"),
        sharing=share_directory(tmp_path),
    )
    await seen.ask()
    await seen.ask(**STREAM)
    await seen.ask(max_tokens=0)
    told = {"id": "told", "url": seen.prefill[0].url, "role": "prefill", "kv_events": "tcp://127.0.0.1:1"}
    added = await seen.running.client.post("/admin/instances", json=told, headers={"authorization": "Bearer token"})
    assert added.status_code == 201
    got = await seen.running.client.get("/metrics", headers={"accept": OPENMETRICS})
    found: dict[str, tuple[str, set[str]]] = {}
    for family in _openmetrics(got.text):
        if NAME.match(family.name) or family.type == "info":
            suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            found[family.name + suffix] = family.type, labels
    for family in WorkerGauges().collect():  # the supervisor of several workers has these
        found[family.name + {"counter": "_total"}.get(family.type, "")] = family.type, set()
    assert documented() == found


def test_the_page_is_read_at_all() -> None:
    """The control."""
    assert documented()["kvparams_proxy_requests_total"] == ("counter", {"outcome"})
    assert len(documented()) > 25


def test_what_is_usually_asked_can_be_answered() -> None:
    """Among it all that production-stack's roadmap wants (issue 26 there)."""
    section = PAGE.read_text().partition("## What is usually asked")[2].partition("\n# ")[0]
    rows = dict(re.findall(r"^\| ([^`|]+?) \| (.*) \|$", section, re.MULTILINE))
    for words in (
        "requests per second",
        "mean queueing delay before prefill",
        "requests that wait, prefill, decode now",
        "mean prefill length",
        "mean decode length of all streams, in events",
        "mean time to first token of a prefill leg",
        "transfers that nobody fetched and nobody freed, per second",
    ):
        assert words in rows
    names = {re.sub("_(sum|count|bucket)$", "", name) for query in rows.values() for name in NAME.findall(query)}
    assert len(names) > 10
    assert names <= documented().keys()


def test_the_page_names_every_kind_of_failure_and_every_state() -> None:
    text = PAGE.read_text()
    assert all(f"`{word}`" in text for word in (*FAILURE_KINDS, *TRANSITIONS))


# counting


@given(st.lists(st.floats(0, 1e6)), st.lists(st.floats(0, 1e6)), st.integers(0, 5))
def test_a_histogram_counts_what_is_at_most_its_bound(first: list[float], second: list[float], zeros: int) -> None:
    bounds = (0.5, 1.0, 1000.0)
    one, other = Histogram(bounds), Histogram(bounds)
    for value in first:
        one.observe(value)
    for value in second:
        other.observe(value)
    one.add(other)
    one.add_zeros(zeros)
    every = [*first, *second, *[0.0] * zeros]
    expected = Counter(bisect_left(bounds, value) for value in every)
    family = HistogramMetricFamily("x", "x", labels=())
    one.add_to(family)
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name == "x_bucket"}
    assert buckets["0.5"] == expected[0] == sum(value <= 0.5 for value in every)
    assert buckets["1000.0"] == sum(value <= 1000 for value in every)
    assert buckets["+Inf"] == one.count == len(every)
    (total,) = [s.value for s in family.samples if s.name == "x_sum"]
    assert total == pytest.approx(sum(every))


@given(st.lists(st.lists(st.integers(0, 5), max_size=12), max_size=8))
def test_how_many_are_in_a_state(lives: list[list[int]]) -> None:
    metrics = Metrics()
    now = Counter[LifecycleState]()
    facts = RequestFacts("r", "t", None, 1, 1, None, None)
    for choices in lives:
        life = RequestLifecycle(time.perf_counter)
        metrics.request_began(life)
        for choice in choices:
            ways = sorted(TRANSITIONS[life.state] - {"done"})
            life.enter(ways[choice % len(ways)])
        if choices and choices[-1] == 5:
            life.finish("gone")
            metrics.ended(RequestRecord(facts, "/v1/completions", False, life, [], None))
        now[life.state] += 1
    for state in ("queued", "prefill", "result", "decode", "first_byte"):
        assert metrics.count_in_states(state) == now[state]
    assert metrics.count_in_states("decode", "first_byte") == now["decode"] + now["first_byte"]


def test_a_late_event_loop_is_seen() -> None:
    metrics = Metrics()
    loop = VirtualLoop()
    lag = LoopLag(loop, metrics.loop_lag)
    loop.run_until(loop.time() + 0.2)
    loop.hold_up(0.15)
    loop.run_until(loop.time() + 1.0)
    assert metrics.loop_lag.count
    lag.close()
    family = HistogramMetricFamily("x", "x", labels=())
    metrics.loop_lag.add_to(family)
    (total,) = [s.value for s in family.samples if s.name == "x_sum"]
    assert 0.05 < total < 0.16
    seen = metrics.loop_lag.count
    loop.run_until(loop.time() + 10.0)
    assert metrics.loop_lag.count == seen  # closed


class _Nobody:
    """No transfers."""

    released = 0
    orphaned = 0

    def __len__(self) -> int:
        return 0

    def leases(self) -> Iterable[KVLease]:
        return ()


async def test_with_many_instances_requests_go_on_between_two_metrics() -> None:
    loop = asyncio.get_running_loop()
    instances = [Instance(f"p{number}", "b", Role.PREFILL, "http://127.0.0.1:1", "nixl") for number in range(100)]
    fleet = Fleet(instances, {role: RoundRobin() for role in Role}, loop.time, loop.call_later)
    pools = UpstreamPools(lambda instance: UpstreamConnectionPool(instance.url, UpstreamLimits()))
    for member in fleet.members:
        pools.joined(member)
    metrics = Metrics()
    exposition = MetricsExposition(
        metrics,
        ProxyGauges(metrics, fleet, _Nobody(), None, BodyBudget(1)),
        gauges=[InstanceGauges(metrics, fleet, pools, _Nobody())],
    )
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    text, _ = await exposition.text("")
    task.cancel()
    assert text.count(b"kvparams_proxy_ready{") == 100
    assert turns > 20
    fleet.close()
    pools.close()
