"""Tests the open-loop and closed-loop load generators against engines whose delays are known."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import open_loop
from benchmarks.load_client import Target
from benchmarks.open_loop import ClosedLoop, OpenLoop, run_closed_loop, run_open_loop
from tests.support import stub_engine
from tests.support.stub_engine import Delays, StubEngines
from tests.system.benchmarks.scripted_server import OK, chunked, scripted_server

STALL_S = 0.2
BODY = b'{"prompt": "@@@@@@@@", "max_tokens": 4}'
STREAM_BODY = b'{"prompt": "@@@@@@@@", "max_tokens": 4, "stream": true}'
ONCE = ClosedLoop(concurrency=1, requests=1, limit_s=5)


def target(port: int) -> Target:
    return Target(port=port, path="/v1/completions", body=BODY)


def stream_target(port: int, events: int | None = None) -> Target:
    return Target(port=port, path="/v1/completions", body=STREAM_BODY, stream=True, events=events)


def stalls_once() -> Callable[[], float]:
    """How long an answer must wait on a server that stands still once: from the first request on that comes 300 ms
    after the very first one, whenever that is."""
    first_s: float | None = None
    goes_on_s: float | None = None

    def delay_s() -> float:
        nonlocal first_s, goes_on_s
        now_s = time.monotonic()
        first_s = now_s if first_s is None else first_s
        if goes_on_s is None and now_s >= first_s + 0.3:
            goes_on_s = now_s + STALL_S
        return 0.0 if goes_on_s is None else max(0.0, goes_on_s - now_s)

    return delay_s


async def test_an_open_loop_charges_a_stall_to_every_request_scheduled_meanwhile() -> None:
    async with scripted_server(OK, delay_s=stalls_once()) as port:
        report = await run_open_loop(target(port), OpenLoop(rate_per_s=500, duration_s=1, arrivals="fixed"))
    assert report.e2e is not None
    assert (report.requests, report.right, report.errors) == (500, 500, {})
    # A fifth of the arrivals fell into the stall and waited between 0 and 200 ms.
    assert report.e2e.p99 > 0.9 * STALL_S * 1e3
    assert report.e2e.mean > 0.8 * 0.2 * STALL_S * 1e3 / 2


async def test_a_closed_loop_hides_the_same_stall() -> None:
    async with scripted_server(OK, delay_s=stalls_once()) as port:
        report = await run_closed_loop(target(port), ClosedLoop(concurrency=1, requests=100_000, limit_s=1))
    assert report.e2e is not None
    assert report.e2e.max > 0.9 * STALL_S * 1e3  # one request was there to see it
    assert report.e2e.p99 < 0.5 * STALL_S * 1e3


async def test_the_clock_starts_at_the_scheduled_arrival_even_if_the_generator_itself_is_late() -> None:
    class BusyTarget(Target):
        def request(self, serial: int) -> bytes:
            until_s = time.monotonic() + (STALL_S if serial == 10 else 0)
            while time.monotonic() < until_s:
                pass
            return super().request(serial)

    async with scripted_server(OK) as port:
        busy = BusyTarget(port=port, path="/", body=BODY)
        report = await run_open_loop(busy, OpenLoop(rate_per_s=500, duration_s=1, arrivals="fixed"))
    assert report.lag is not None
    assert report.e2e is not None
    assert report.lag.p99 > 0.9 * STALL_S * 1e3
    assert report.e2e.p99 > 0.9 * STALL_S * 1e3


async def test_the_arrivals_keep_their_pace() -> None:
    async with scripted_server(OK) as port:
        report = await run_open_loop(target(port), OpenLoop(rate_per_s=400, duration_s=0.5, arrivals="fixed"))
    assert report.requests == report.right == 200
    assert 0.49 <= report.wall_s <= 1.5


async def test_requests_of_the_warm_up_are_checked_but_not_timed() -> None:
    plan = OpenLoop(rate_per_s=100, duration_s=0.3, warm_up_s=0.2, arrivals="fixed")
    async with scripted_server(OK) as port:
        report = await run_open_loop(target(port), plan)
    assert report.e2e is not None
    assert (report.requests, report.right, report.e2e.count) == (50, 50, 30)


async def test_what_is_never_answered_is_an_error_whose_wait_is_in_the_percentiles() -> None:
    async with scripted_server(None) as port:
        plan = OpenLoop(rate_per_s=50, duration_s=0.2, arrivals="fixed", drain_s=0.2)
        report = await run_open_loop(target(port), plan)
    assert report.e2e is not None
    assert (report.right, report.errors) == (0, {"unanswered": 10})
    assert report.e2e.max >= 390


async def test_connections_are_opened_as_the_plan_needs_them_and_used_again() -> None:
    async with scripted_server(OK, delay_s=lambda: 0.1) as port:
        report = await run_open_loop(target(port), OpenLoop(rate_per_s=200, duration_s=0.5, arrivals="fixed"))
    # 200/s for 100 ms each: about 20 at once, of 100 requests.
    assert report.right == 100
    assert 15 <= report.connections < 100


async def test_every_event_is_seen_however_it_is_cut() -> None:
    events = b'data: {"text":"a"}\n\ndata: {"text":"b"}\n\ndata: {"text":"c"}\n\ndata: [DONE]\n\n'
    for size in range(1, len(events) + 1):
        answer = chunked(*(events[at : at + size] for at in range(0, len(events), size)))
        async with scripted_server(answer) as port:
            report = await run_closed_loop(stream_target(port, events=4), ONCE)
        assert report.errors == {}, size
        assert report.itl is not None
        assert report.itl.count == 3


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (chunked(b"data: 1\n\n", b"data: [DONE]\n\n"), "2 events instead of 4"),
        (chunked(b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n", b"data: 4\n\n"), "no [DONE]"),
        (chunked(b"data: [DONE]\n\n")[:-7], "connection lost"),
        (OK.replace(b"200 OK", b"503 Service Unavailable"), "status 503"),
        (b"not HTTP at all\r\n\r\n", "malformed answer"),
        (b"", "connection lost"),
    ],
)
async def test_a_wrong_answer_is_an_error_with_a_name_and_in_no_percentile(answer: bytes, error: str) -> None:
    async with scripted_server(answer, close=True) as port:
        report = await run_closed_loop(stream_target(port, events=4), ONCE)
    assert (report.right, report.errors, report.e2e) == (0, {error: 1}, None)


async def test_nobody_listening_is_an_error_too() -> None:
    async with scripted_server(OK) as port:
        pass
    report = await run_closed_loop(target(port), ONCE)
    assert report.right == 0
    assert [error.startswith("connect: ") for error in report.errors] == [True]


async def test_a_connection_closed_while_idle_costs_one_more_try_and_no_error() -> None:
    async with scripted_server(OK, close=True) as port:
        report = await run_closed_loop(target(port), ClosedLoop(concurrency=2, requests=20, limit_s=5))
    assert (report.right, report.errors) == (20, {})


async def test_times_to_the_first_token_and_between_tokens_are_those_of_the_engine() -> None:
    async with await StubEngines.start(prefill=[], decode=[0], delays=Delays(ttft_ms=50, itl_ms=20)) as stub:
        plan = ClosedLoop(concurrency=2, requests=4, limit_s=5)
        report = await run_closed_loop(stream_target(stub.engines[0].port, events=5), plan)
    assert report.errors == {}
    assert report.ttft is not None
    assert report.itl is not None
    assert report.e2e is not None
    # A busy machine may add to these, nothing takes away from them (but what a timer of whole milliseconds rounds).
    assert 48 <= report.ttft.p50 <= 200
    assert 0.25 * 3 * 19 <= report.itl.mean <= 100  # four gaps, the last one (to [DONE]) of nothing
    assert 48 + 3 * 19 <= report.e2e.p50 <= 500


def test_the_command_prints_one_document_and_fails_if_an_answer_was_wrong(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_bytes(BODY)
    stub_command = [sys.executable, stub_engine.__file__, "--decode", "0"]
    with subprocess.Popen(stub_command, stdout=subprocess.PIPE, text=True) as stub:
        assert stub.stdout is not None
        port = json.loads(stub.stdout.readline())["decode"][0]

        def load(*options: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, open_loop.__file__, "--port", str(port), "--body", str(body), *options]
            return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)

        good = load("--rate", "200", "--duration", "0.2")
        bad = load("--path", "/nowhere", "--concurrency", "2", "--requests", "4")
        stub.terminate()
        assert stub.wait(10) == 0
    assert (good.returncode, json.loads(good.stdout)["errors"]) == (0, {})
    assert (bad.returncode, json.loads(bad.stdout)["errors"]) == (1, {"status 404": 4})
