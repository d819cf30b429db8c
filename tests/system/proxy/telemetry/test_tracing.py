"""Tests traces: the parent of each leg, what an engine is told, and what arrives at a collector."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvparams.errors import PluginError
from kvparams.instances import Instance, RequestFacts, Role
from kvparams.jsontext.document import JSONLimits
from kvparams.routing.request_lifecycle import TRANSITIONS, LifecycleState, RequestLifecycle, RequestOutcome
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.api_keys_file import create_api_key, edit_api_keys
from kvparams_proxy.server.app import create_app
from kvparams_proxy.telemetry.request_record import RefusedRequest, RequestRecord
from kvparams_proxy.telemetry.spans import RequestSpanExporter
from kvparams_proxy.telemetry.tracing import TraceContext, Tracer
from tests.support.proxy.fixtures import Scripted
from tests.support.waiting import until

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
BODY: dict[str, Any] = {"model": "stub", "prompt": "the secret of the prompt", "max_tokens": 4}
ANSWER = (
    b'{"id":"x","choices":[{"index":0,"text":"abcd","finish_reason":"length"}],'
    b'"usage":{"prompt_tokens":24,"completion_tokens":4,"total_tokens":28},'
    b'"kv_transfer_params":{"remote_engine_id":"e","remote_block_ids":[[1]],"remote_host":"127.0.0.1","remote_port":1}}'
)


def tracer(ratio: float = 1.0) -> Tracer:
    return Tracer(ratio, Random(5))


def line(value: str) -> bytes:
    return b"traceparent: %b\r\n" % value.encode("latin-1")


# whose child


@given(
    st.integers(1, (1 << 128) - 1),
    st.integers(1, (1 << 64) - 1),
    st.integers(0, 255),
    st.one_of(st.just("00"), st.tuples(st.integers(1, 254), st.sampled_from(["", "-", "-more-of it"]))),
)
def test_a_clients_trace_is_joined_and_its_decision_kept(
    trace_id: int, parent: int, flags: int, version: str | tuple[int, str]
) -> None:
    number, more = ("00", "") if isinstance(version, str) else (f"{version[0]:02x}", version[1])
    state = b"tracestate: a=b\r\n"
    given = line(f"{number}-{trace_id:032x}-{parent:016x}-{flags:02x}{more}")
    trace, kept = tracer(0.5).begin([given, state])
    assert kept == [state]
    assert trace.trace_id == trace_id
    assert trace.parent_id == parent
    assert trace.sampled is bool(flags & 1)
    legs = [trace.leg_traceparent_header(), trace.leg_traceparent_header()]
    told = [leg.decode().removeprefix("traceparent: ").strip().split("-") for leg in legs]
    assert all(version == "00" and int(t, 16) == trace_id for version, t, _, _ in told)
    assert all(int(f, 16) & 1 == flags & 1 for _, _, _, f in told)
    spans = [int(span, 16) for _, _, span, _ in told]
    if trace.sampled:
        assert spans == trace.legs
        assert len({*spans, parent, trace.span_id}) == 4
    else:
        assert spans == [parent, parent]  # nobody of us is in this trace
        assert trace.traceparent_header() == legs[0]


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [line("")],
        [line("00-1-2-3")],
        [line(f"00-{TRACE.upper()}-{PARENT}-01")],
        [line(f"00-{'0' * 32}-{PARENT}-01")],
        [line(f"00-{TRACE}-{'0' * 16}-01")],
        [line(f"ff-{TRACE}-{PARENT}-01")],
        [line(f"00-{TRACE}-{PARENT}-01-more")],
        [line(f"00-{TRACE}-{PARENT}-1")],
        [line(f"00-{TRACE}-{PARENT}-01"), line(f"00-{TRACE}-{PARENT}-01")],
        [line(f"00-{TRACE}-{PARENT}-01\xff")],
        [line("0" * 10_000)],
    ],
)
def test_what_is_no_trace_context_begins_a_new_one(lines: list[bytes]) -> None:
    trace, kept = tracer().begin([*lines, b"tracestate: a=b\r\n", b"x-other: 1\r\n"])
    assert kept == [b"x-other: 1\r\n"]
    assert trace.parent_id is None
    assert trace.trace_id not in (0, int(TRACE, 16))
    assert trace.sampled


def test_the_share_that_is_sampled_is_the_share_that_was_asked_for() -> None:
    some = tracer(0.25)
    sampled = sum(some.begin([])[0].sampled for _ in range(4000))
    assert 850 < sampled < 1150
    assert not any(tracer(0.0).begin([])[0].sampled for _ in range(100))
    assert len({some.begin([])[0].trace_id for _ in range(100)}) == 100


# spans


def lived(states: list[tuple[LifecycleState, str]], outcome: RequestOutcome, trace: TraceContext) -> RequestRecord:
    """A request that has gone through these states, one in each tenth of a second; each leg began in time."""
    ticks = iter(number / 10 for number in range(100))
    life = RequestLifecycle(lambda: next(ticks))
    for state, who in states:
        life.enter(state, who)
        if state in ("prefill", "decode"):
            trace.leg_traceparent_header()
    life.finish(outcome)
    facts = RequestFacts("request-1", "transfer-1", "m" * 5000, 1, 1, None, None)
    route = [Instance("p0", "b", Role.PREFILL, "http://h", "x")]
    account = RequestRecord(facts, "/v1/completions", True, life, route, trace)
    account.ended_s = time.time()
    return account


async def exported(account: RequestRecord) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    spans = RequestSpanExporter(exporter)
    spans.ended(account)
    await spans.close()
    return list(exporter.get_finished_spans())


def named(spans: list[ReadableSpan]) -> list[str]:
    return [span.name for span in spans]


def ms(span: ReadableSpan) -> tuple[int, int]:
    """Begin and end, since the request began (a tenth of a second before its first step)."""
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time // 1_000_000, span.end_time // 1_000_000


async def test_a_request_has_a_span_for_each_wait_and_each_leg() -> None:
    trace, _ = tracer().begin([line(f"00-{TRACE}-{PARENT}-01")])
    way: list[tuple[LifecycleState, str]] = [
        ("queued", ""),
        ("prefill", "p0"),
        ("result", "p0"),
        ("queued", ""),
        ("decode", "d0"),
        ("first_byte", ""),
    ]
    before = time.time_ns()
    spans = await exported(lived(way, "ok", trace))
    assert named(spans) == ["queue", "prefill", "queue", "decode", "POST /v1/completions"]
    *children, server = spans
    assert server.context is not None
    assert server.parent is not None
    assert (server.context.trace_id, server.context.span_id) == (int(TRACE, 16), trace.span_id)
    assert (server.parent.span_id, server.parent.is_remote) == (int(PARENT, 16), True)
    assert all(child.parent is not None and child.parent.span_id == trace.span_id for child in children)
    legs = [child for child in children if child.kind is SpanKind.CLIENT]
    assert [leg.context.span_id for leg in legs if leg.context is not None] == trace.legs
    assert [(leg.attributes or {})["kvparams.instance"] for leg in legs] == ["p0", "d0"]
    assert len({span.context.span_id for span in spans if span.context is not None}) == 5

    begun, ended = ms(server)
    assert server.end_time is not None
    assert 0 <= server.end_time - before < 5_000_000_000
    assert 699 <= ended - begun <= 701
    assert [round((ms(child)[0] - begun) / 100) for child in children] == [1, 2, 4, 5]
    assert [round((ms(child)[1] - begun) / 100) for child in children] == [2, 3, 5, 7]  # decode, to its end
    (event,) = children[3].events
    assert event.name == "first_byte"
    assert round((event.timestamp // 1_000_000 - begun) / 100) == 6
    assert all(span.status.status_code is StatusCode.UNSET for span in spans)
    steps = [
        ("created", None),
        ("queued", None),
        ("prefill", "p0"),
        ("result", "p0"),
        ("queued", None),
        ("decode", "d0"),
        ("first_byte", None),
        ("done", None),
    ]
    assert [(event.name, (event.attributes or {}).get("kvparams.instance")) for event in server.events] == steps
    assert [round((event.timestamp // 1_000_000 - begun) / 100) for event in server.events] == list(range(8))
    assert (server.events[0].timestamp, server.events[-1].timestamp) == (server.start_time, server.end_time)
    attributes = server.attributes or {}
    assert attributes["gen_ai.request.model"] == "m" * 200
    assert attributes["kvparams.request_id"] == "request-1"
    assert attributes["http.response.status_code"] == 200


@pytest.mark.parametrize(
    ("way", "outcome", "well"),
    [
        ([("prefill", "p0"), ("prefill", "p1"), ("result", "p1"), ("decode", "d0"), ("first_byte", "")], "ok", "-++ +"),
        ([("prefill", "p0")], "failed", "- -"),
        ([("prefill", "p0")], "gone", "+ +"),
        ([("prefill", "p0")], "refused", "- +"),
        ([("queued", "")], "failed", "- -"),
        ([("prefill", "p0"), ("result", ""), ("decode", "d0"), ("decode", "d1"), ("first_byte", "")], "ok", "+-+ +"),
        ([("prefill", "p0"), ("result", ""), ("decode", "d0"), ("first_byte", "")], "midway", "+- -"),
        ([("decode", "d0"), ("first_byte", ""), ("queued", ""), ("decode", "d1"), ("first_byte", "")], "ok", "-++ +"),
        ([], "refused", " +"),
    ],
)
async def test_what_failed_is_marked(way: list[tuple[LifecycleState, str]], outcome: RequestOutcome, well: str) -> None:
    trace, _ = tracer().begin([])
    spans = await exported(lived(way, outcome, trace))
    marks = ["-" if span.status.status_code is StatusCode.ERROR else "+" for span in spans]
    assert "".join(marks[:-1]) + " " + marks[-1] == well
    assert spans[-1].parent is None


@given(st.lists(st.integers(0, 5), max_size=12), st.integers(0, 2))
def test_every_step_of_every_life_is_an_event_of_its_span(choices: list[int], end: int) -> None:
    trace, _ = tracer().begin([])
    way: list[tuple[LifecycleState, str]] = []
    state: LifecycleState = "created"
    for choice in choices:
        ways = sorted(TRANSITIONS[state] - {"done"})
        state = ways[choice % len(ways)]
        way.append((state, "an instance" if state in ("prefill", "result", "decode") else ""))
    begun: list[RequestOutcome] = ["ok", "midway", "gone"]
    not_begun: list[RequestOutcome] = ["refused", "failed", "gone"]
    account = lived(way, (begun if ("first_byte", "") in way else not_begun)[end], trace)
    server = asyncio.run(exported(account))[-1]
    assert [event.name for event in server.events] == ["created", *(state for state, _ in way), "done"]
    assert [event.timestamp for event in server.events] == sorted(event.timestamp for event in server.events)


async def test_what_is_not_sampled_leaves_nothing() -> None:
    trace, _ = tracer(0.0).begin([])
    assert await exported(lived([("decode", "d0"), ("first_byte", "")], "ok", trace)) == []


def refusal(trace: TraceContext | None, error: ProxyError) -> RefusedRequest:
    return RefusedRequest("request-1", "/v1/completions", error, "team-a", "m" * 5000, trace)


@pytest.mark.parametrize(
    ("error", "outcome", "status", "name"),
    [
        (ProxyError(404, "not_found_error", "a secret", code="model_not_found"), "refused", "UNSET", "model_not_found"),
        (ProxyError(400, "invalid_request_error", "a secret"), "refused", "UNSET", "invalid_request_error"),
        (ProxyError(503, "service_unavailable", "a secret"), "failed", "ERROR", "service_unavailable"),
    ],
)
async def test_a_request_that_is_refused_before_it_is_executed_has_a_span(
    error: ProxyError, outcome: str, status: str, name: str
) -> None:
    trace, _ = tracer().begin([line(f"00-{TRACE}-{PARENT}-01")])
    exporter = InMemorySpanExporter()
    spans = RequestSpanExporter(exporter)
    spans.refused(refusal(trace, error))
    spans.refused(refusal(None, error))
    spans.refused(refusal(tracer(0.0).begin([])[0], error))
    await spans.close()
    (span,) = exporter.get_finished_spans()
    assert span.name == "POST /v1/completions"
    assert span.context is not None
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (int(TRACE, 16), int(PARENT, 16))
    assert span.kind is SpanKind.SERVER
    assert span.start_time == span.end_time
    assert [event.name for event in span.events] == ["done"]
    assert span.status.status_code is StatusCode[status]
    attributes = span.attributes or {}
    assert attributes["http.response.status_code"] == error.status
    assert (attributes["error.type"], attributes["kvparams.outcome"]) == (name, outcome)
    assert attributes["gen_ai.request.model"] == "m" * 200
    assert "secret" not in str(dict(attributes))


@pytest.mark.slow
async def test_a_collector_that_is_not_there_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    trace, _ = tracer().begin([])
    spans = RequestSpanExporter()
    spans.ended(lived([("decode", "d0"), ("first_byte", "")], "ok", trace))
    begun = time.monotonic()
    await spans.close()
    assert time.monotonic() - begun < 4


# end to end


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        """The service's name, and the span."""
        taken = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    names = [
                        each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
                    ]
                    taken.extend((names[0], span) for scope in resource.scope_spans for span in scope.spans)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    async def wait(self, count: int) -> list[Any]:
        await until(lambda: len(self.spans) >= count)
        return [span for _, span in self.spans]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield made
    made.close()


StartEngines = Callable[..., Awaitable[tuple[Any, Scripted, Scripted]]]


@pytest.fixture
def engines(scripted: Any, proxy: Any) -> StartEngines:
    async def well(body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % len(ANSWER) + ANSWER)

    async def start(**changes: object) -> tuple[Any, Scripted, Scripted]:
        prefill, decode = await scripted(well), await scripted(well)
        return await proxy([prefill.url], [decode.url], **changes), prefill, decode

    return start


def told(engine: Scripted) -> list[str]:
    """The traceparents of the last request."""
    lines = engine.heads[-1].decode().split("\r\n")
    return [each.partition(": ")[2] for each in lines if each.lower().startswith("traceparent:")]


async def test_engines_are_told_the_span_of_their_leg_and_the_collector_gets_all(
    collector: Collector, engines: StartEngines
) -> None:
    running, prefill, decode = await engines(trace=0.0)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1", "x-request-id": "mine"}
    got = await running.client.post("/v1/completions", json=BODY, headers=headers)
    assert got.status_code == 200
    spans = {span.name: span for span in await collector.wait(3)}
    assert set(spans) == {"prefill", "decode", "POST /v1/completions"}
    server = spans["POST /v1/completions"]
    assert server.parent_span_id.hex() == PARENT
    for name, engine in (("prefill", prefill), ("decode", decode)):
        assert told(engine) == [f"00-{TRACE}-{spans[name].span_id.hex()}-01"]
        assert b"tracestate: vendor=1\r\n" in engine.heads[-1]
        assert spans[name].parent_span_id == server.span_id
        assert spans[name].start_time_unix_nano <= spans[name].end_time_unix_nano
    assert prefill.heads[-1] != decode.heads[-1]
    known = {each.key: each.value for each in server.attributes}
    assert known["kvparams.request_id"].string_value == "mine"
    assert known["gen_ai.usage.input_tokens"].int_value == 24
    assert known["gen_ai.usage.output_tokens"].int_value == 4
    assert {service for service, _ in collector.spans} == {"kvparams-proxy"}
    everything = "".join(span.SerializeToString().decode("latin-1") for span in spans.values())
    for hushed in ("secret", "abcd", "127.0.0.1", str(prefill.port), str(decode.port)):
        assert hushed not in everything


async def test_every_refusal_at_the_door_is_a_span_of_its_clients_trace(
    collector: Collector, engines: StartEngines, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.jsonl"
    key, record = create_api_key("team-a", datetime.now(UTC))
    with edit_api_keys(keys) as records:
        records[record.id] = record
    running, prefill, _ = await engines(trace=0.0, client_keys=keys, body=JSONLimits(max_bytes=1000))
    known = {"authorization": f"Bearer {key}"}
    asked: list[tuple[int, dict[str, str], bytes]] = [
        (401, {}, json.dumps(BODY).encode()),
        (400, known, b"{"),
        (404, known, json.dumps(BODY | {"model": "other"}).encode()),
        (413, known, b"x" * 2000),
        (415, known | {"content-encoding": "gzip"}, b"x"),
    ]
    for number, (status, headers, body) in enumerate(asked, 1):
        for flags in ("00", "01"):
            more = {"traceparent": f"00-{TRACE}-{number:016x}-{flags}"}
            got = await running.client.post("/v1/completions", content=body, headers=headers | more)
            assert got.status_code == status
    spans = await collector.wait(len(asked))
    assert [int(span.parent_span_id.hex(), 16) for span in spans] == [1, 2, 3, 4, 5]
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    statuses = [each.value.int_value for s in spans for each in s.attributes if each.key == "http.response.status_code"]
    assert statuses == [status for status, _, _ in asked]
    assert not prefill.bodies
    got = await running.client.post("/v1/completions", json=BODY, headers=known)  # the control: it is served
    assert got.status_code == 200
    assert len(collector.spans) == len(asked)


async def test_the_share_decides_where_the_client_has_not(collector: Collector, engines: StartEngines) -> None:
    running, prefill, decode = await engines(trace=1.0)
    await running.client.post("/v1/completions", json=BODY, headers={"tracestate": "vendor=1"})
    spans = await collector.wait(3)
    (trace_id,) = {span.trace_id.hex() for span in spans}
    for engine in (prefill, decode):
        assert told(engine)[0].startswith(f"00-{trace_id}-")
        assert told(engine)[0].endswith("-03")
        assert b"tracestate" not in engine.heads[-1]  # it belongs to no traceparent


async def test_engines_are_told_what_is_not_sampled(collector: Collector, engines: StartEngines) -> None:
    running, prefill, decode = await engines(trace=0.0)
    await running.client.post("/v1/completions", json=BODY)
    assert told(prefill) == told(decode)
    assert told(prefill)[0].endswith("-02")  # not sampled, and a random id
    given = f"00-{TRACE}-{PARENT}-00"
    await running.client.post("/v1/completions", json=BODY, headers={"traceparent": given})
    assert told(prefill) == told(decode) == [given]
    sampled = {"traceparent": f"00-{TRACE}-{PARENT}-01"}  # the control: this one arrives, and alone
    await running.client.post("/v1/completions", json=BODY, headers=sampled)
    assert len(await collector.wait(3)) == 3


async def test_without_tracing_the_clients_context_passes_through_untouched(engines: StartEngines) -> None:
    running, prefill, decode = await engines()
    headers = {"traceparent": "whatever it is", "tracestate": "a=b"}
    await running.client.post("/v1/completions", json=BODY, headers=headers)
    for engine in (prefill, decode):
        assert told(engine) == ["whatever it is"]
        assert b"tracestate: a=b\r\n" in engine.heads[-1]


async def test_the_log_names_the_trace(
    collector: Collector, engines: StartEngines, capfd: pytest.CaptureFixture[str]
) -> None:
    running, _, _ = await engines(trace=0.0)
    await running.client.post("/v1/completions", json=BODY, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    await collector.wait(3)
    found: list[str] = []

    def is_logged() -> bool:
        found.append(capfd.readouterr().out)
        return TRACE in "".join(found)

    await until(is_logged)
    assert f'"trace_id":"{TRACE}"' in "".join(found)


async def test_the_log_names_the_trace_of_a_refusal(
    collector: Collector, engines: StartEngines, capfd: pytest.CaptureFixture[str]
) -> None:
    running, _, _ = await engines(trace=0.0)
    for flags in ("00", "01"):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
        await running.client.post("/v1/completions", content=b"{", headers=headers)
    found: list[str] = []

    def are_logged() -> bool:
        found.append(capfd.readouterr().out)
        return "".join(found).count("invalid_json") >= 2

    await until(are_logged)
    lines = [each for each in "".join(found).splitlines() if "invalid_json" in each]
    assert [json.loads(each)["trace_id"] for each in lines] == [None, TRACE]


# only where it is wanted


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "kvparams_proxy.telemetry.spans")
    with pytest.raises(PluginError, match=r"kvparams\[tracing\]"):
        create_app(Settings((), trace=0.5))
    create_app(Settings(()))  # the control


def test_without_tracing_nothing_of_it_is_imported() -> None:
    code = """
import sys
from kvparams_proxy.server.app import create_app
from kvparams_proxy.config.settings import Settings
create_app(Settings(()))
without = not any(name.startswith("opentelemetry") for name in sys.modules)
create_app(Settings((), trace=0.1))
sys.exit(7 if without and "opentelemetry.sdk" in sys.modules else 8)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 7


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_one(share: float) -> None:
    with pytest.raises(ValueError, match="trace"):
        Settings((), trace=share)


async def test_the_thread_that_sends_ends_with_the_app(
    collector: Collector, stack: AsyncExitStack, engines: StartEngines
) -> None:
    before = set(threading.enumerate())  # a test whose collector was away may have left one that still tries

    def sending() -> bool:
        return any(thread.name.startswith("OtelBatch") for thread in set(threading.enumerate()) - before)

    running, _, _ = await engines(trace=1.0)
    await running.client.post("/v1/completions", json=BODY)
    assert sending()
    await stack.aclose()
    assert not sending()
    assert len(collector.spans) == 3  # sent at the latest then
