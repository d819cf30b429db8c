"""Tests the load generator, in closed and open loops, against servers whose delays are known."""

import asyncio
import signal
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import native_build
from benchmarks.load_process import Ask, LoadError, Report, closed, load_command, open_at, read_report
from benchmarks.native_build import compiled
from tests.support.processes import StartError
from tests.support.stub_engine import Delays, StubEngines
from tests.system.benchmarks.scripted_server import OK, chunked, scripted_server

STALL_S = 0.2
BODY = b'{"prompt": "@@@@@@@@", "max_tokens": 4}'
STREAM_BODY = b'{"prompt": "@@@@@@@@", "max_tokens": 4, "stream": true}'


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """A request for a whole answer."""
    (tmp_path / "body.json").write_bytes(BODY)
    return Ask(tmp_path / "body.json")


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """The body of a request for a stream."""
    (tmp_path / "stream.json").write_bytes(STREAM_BODY)
    return tmp_path / "stream.json"


async def at_fixed_times(
    port: int, ask: Ask, rate_per_s: float, duration_s: float, *, warm_up_s: float = 0.0, drain_s: float = 10.0
) -> Report:
    return await asyncio.to_thread(
        open_at,
        port,
        ask,
        rate_per_s=rate_per_s,
        duration_s=duration_s,
        warm_up_s=warm_up_s,
        arrivals="fixed",
        drain_s=drain_s,
        strict=False,
    )


async def in_turn(port: int, ask: Ask, concurrency: int = 1, requests: int = 1, limit_s: float = 5) -> Report:
    return await asyncio.to_thread(
        closed, port, ask, concurrency=concurrency, requests=requests, limit_s=limit_s, strict=False
    )


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


async def test_an_open_loop_charges_a_stall_to_every_request_scheduled_meanwhile(ask: Ask) -> None:
    async with scripted_server(OK, delay_s=stalls_once()) as port:
        report = await at_fixed_times(port, ask, 500, 1)
    assert report.e2e is not None
    assert (report.requests, report.right, report.errors) == (500, 500, {})
    # A fifth of the arrivals fell into the stall and waited between 0 and 200 ms.
    assert report.e2e.p99 > 0.9 * STALL_S * 1e3
    assert report.e2e.mean > 0.8 * 0.2 * STALL_S * 1e3 / 2


async def test_a_closed_loop_hides_the_same_stall(ask: Ask) -> None:
    async with scripted_server(OK, delay_s=stalls_once()) as port:
        report = await in_turn(port, ask, requests=100_000, limit_s=1)
    assert report.e2e is not None
    assert report.e2e.max > 0.9 * STALL_S * 1e3  # one request was there to see it
    assert report.e2e.p99 < 0.5 * STALL_S * 1e3


async def test_the_clock_starts_at_the_scheduled_arrival_even_if_the_generator_itself_is_late(ask: Ask) -> None:
    offsets = array("d", (each / 500 for each in range(500)))
    async with scripted_server(OK) as port:
        command = load_command(port, ask, ["--arrivals", len(offsets)])
        pipe = asyncio.subprocess.PIPE
        generator = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert generator.stdin is not None
        generator.stdin.write(offsets.tobytes())
        await generator.stdin.drain()
        await asyncio.sleep(0.2)  # somewhere in the second that it takes
        generator.send_signal(signal.SIGSTOP)
        await asyncio.sleep(STALL_S)
        generator.send_signal(signal.SIGCONT)
        report = read_report((await generator.communicate())[0])
    assert report.lag is not None
    assert report.e2e is not None
    assert report.lag.max > 0.9 * STALL_S * 1e3
    assert report.e2e.max > 0.9 * STALL_S * 1e3


async def test_the_arrivals_keep_their_pace(ask: Ask) -> None:
    async with scripted_server(OK) as port:
        report = await at_fixed_times(port, ask, 400, 0.5)
    assert report.requests == report.right == 200
    assert 0.49 <= report.wall_s <= 1.5


async def test_requests_of_the_warm_up_are_checked_but_not_timed(ask: Ask) -> None:
    async with scripted_server(OK) as port:
        report = await at_fixed_times(port, ask, 100, 0.3, warm_up_s=0.2)
    assert report.e2e is not None
    assert (report.requests, report.right, report.e2e.count) == (50, 50, 30)


async def test_what_is_never_answered_is_an_error_whose_wait_is_in_the_percentiles(ask: Ask) -> None:
    async with scripted_server(None) as port:
        report = await at_fixed_times(port, ask, 50, 0.2, drain_s=0.2)
    assert report.e2e is not None
    assert (report.right, report.errors) == (0, {"unanswered": 10})
    assert report.e2e.max >= 370  # 200 ms after the last arrival, which was at 180 ms


async def test_connections_are_opened_as_the_plan_needs_them_and_used_again(ask: Ask) -> None:
    async with scripted_server(OK, delay_s=lambda: 0.1) as port:
        report = await at_fixed_times(port, ask, 200, 0.5)
    # 200/s for 100 ms each: about 20 at once, of 100 requests.
    assert report.right == 100
    assert 15 <= report.connections < 100


async def test_every_event_is_seen_however_it_is_cut(stream: Path) -> None:
    events = b'data: {"text":"a"}\n\ndata: {"text":"b"}\n\ndata: {"text":"c"}\n\ndata: [DONE]\n\n'
    for size in range(1, len(events) + 1):
        answer = chunked(*(events[at : at + size] for at in range(0, len(events), size)))
        async with scripted_server(answer) as port:
            report = await in_turn(port, Ask(stream, events=4))
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
        (OK.replace(b"length: 2", b"length: 0")[:-2], "empty answer"),
        (b"not HTTP at all\r\n\r\n", "malformed answer"),
        (chunked(b"data: [DONE]\n\n").replace(b"\r\ne\r\n", b"\r\nx\r\n"), "malformed answer"),
        (b"", "connection lost"),
    ],
)
async def test_a_wrong_answer_is_an_error_with_a_name_and_in_no_percentile(
    stream: Path, answer: bytes, error: str
) -> None:
    async with scripted_server(answer, close=True) as port:
        report = await in_turn(port, Ask(stream, events=4))
    assert (report.right, report.errors, report.e2e) == (0, {error: 1}, None)


async def test_a_run_with_a_wrong_answer_is_no_measurement(stream: Path) -> None:
    async with scripted_server(chunked(b"data: [DONE]\n\n")) as port:
        with pytest.raises(LoadError, match="1 events instead of 4"):
            await asyncio.to_thread(closed, port, Ask(stream, events=4), concurrency=1, requests=1, limit_s=5)


async def test_nobody_listening_is_an_error_too(ask: Ask) -> None:
    async with scripted_server(OK) as port:
        pass
    report = await in_turn(port, ask)
    assert report.right == 0
    assert [error.startswith("connect: ") for error in report.errors] == [True]


async def test_a_connection_closed_while_idle_costs_one_more_try_and_no_error(ask: Ask) -> None:
    async with scripted_server(OK, close=True) as port:
        report = await in_turn(port, ask, concurrency=2, requests=20)
    assert (report.right, report.errors) == (20, {})


async def test_times_to_the_first_token_and_between_tokens_are_those_of_the_engine(stream: Path) -> None:
    async with await StubEngines.start(prefill=[], decode=[0], delays=Delays(ttft_ms=50, itl_ms=20)) as stub:
        report = await in_turn(stub.engines[0].port, Ask(stream, events=5), concurrency=2, requests=4)
    assert report.errors == {}
    assert report.ttft is not None
    assert report.itl is not None
    assert report.e2e is not None
    # A busy machine may add to these, nothing takes away from them (but what a timer of whole milliseconds rounds).
    assert 48 <= report.ttft.p50 <= 200
    assert 0.25 * 3 * 19 <= report.itl.mean <= 100  # four gaps, the last one (to [DONE]) of nothing
    assert 48 + 3 * 19 <= report.e2e.p50 <= 500


def test_an_open_loop_without_an_arrival_is_refused(ask: Ask) -> None:
    with pytest.raises(ValueError, match="ask for more"):
        open_at(1, ask, rate_per_s=0.001, duration_s=0.1)


def test_a_machine_without_a_compiler_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "_BINARIES", tmp_path)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(StartError, match="install gcc or clang"):
        compiled("load_generator")


def test_a_program_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "_BINARIES", tmp_path)
    first = compiled("load_generator")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert compiled("load_generator") == first
