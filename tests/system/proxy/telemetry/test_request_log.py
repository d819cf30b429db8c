"""Tests the request log: it has one line per request, no private data, and does not delay the proxy."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.instances import Instance, RequestFacts, Role
from kvparams.jsontext.document import JSONLimits
from kvparams.routing.admission import QueueLimits, RoleLimits
from kvparams.routing.request_lifecycle import RequestLifecycle, RequestOutcome
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.requests.api_keys_file import create_api_key, edit_api_keys
from kvparams_proxy.telemetry.line_writer import STDOUT, LineWriter
from kvparams_proxy.telemetry.request_log import RequestLog
from kvparams_proxy.telemetry.request_record import RefusedRequest, RequestRecord
from tests.support.proxy.acting import Actor
from tests.support.proxy.metrics import metric_becomes
from tests.support.waiting import until

MEMBERS = [
    *("time", "request_id", "transfer_ids", "tenant", "model", "endpoint", "stream", "outcome", "status", "error"),
    *("route", "queued_ms", "encoded", "encode_ms", "prefill_ms", "result_ms", "decode_ms", "stream_ms", "total_ms"),
    *("prompt_tokens", "predicted_tokens", "cached_tokens", "completion_tokens", "retries", "answer_bytes", "trace_id"),
]
PROMPT = "the secret of the prompt"
BODY: dict[str, Any] = {"model": "stub", "prompt": PROMPT, "max_tokens": 8}
Lines = Callable[[int], Awaitable[list[dict[str, Any]]]]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


def raw(log: Path) -> bytes:
    return log.read_bytes() if log.exists() else b""


def parsed(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in raw(log).decode("ascii").splitlines()]


@pytest.fixture
def lines(log: Path) -> Lines:
    """Wait for so many lines; all that are there then."""

    async def read(count: int) -> list[dict[str, Any]]:
        await until(lambda: raw(log).count(b"\n") >= count)
        return parsed(log)

    return read


@pytest.fixture
async def stage(stack: AsyncExitStack, proxy: Any, log: Path) -> Callable[..., Awaitable[tuple[Any, Actor, Actor]]]:
    async def start(dialect: str = "nixl", **changes: object) -> tuple[Any, Actor, Actor]:
        prefill, decode = Actor("prefill"), Actor("decode")
        for actor in (prefill, decode):
            await actor.begin()
            stack.callback(actor.end)
        return await proxy([prefill.url], [decode.url], dialect, log_requests=str(log), **changes), prefill, decode

    return start


# what is in a line


async def test_every_request_is_one_line_with_the_same_members(stage: Any, lines: Lines) -> None:
    running, prefill, decode = await stage(retries=0)
    post = running.client.post
    whole = await post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    stream = await post("/v1/completions", json=BODY | {"stream": True, "stream_options": {"include_usage": True}})
    refused = await post("/v1/completions", content=b"{")
    prefill.fails("500", times=1)
    failed = await post("/v1/completions", json=BODY)
    decode.breaks_after = 2
    midway = await post("/v1/completions", json=BODY | {"stream": True})
    seen = await lines(5)
    assert len(seen) == 5
    assert all(list(line) == MEMBERS for line in seen)
    assert [line["outcome"] for line in seen] == ["ok", "ok", "refused", "failed", "midway"]
    assert [line["status"] for line in seen] == [200, 200, 400, 502, 200]
    assert [line["error"] for line in seen] == [None, None, "invalid_json", "prefill_failed", "decode_failed"]
    assert [line["stream"] for line in seen] == [False, True, None, False, True]
    assert [line["request_id"] for line in seen] == [
        got.headers["x-request-id"] for got in (whole, stream, refused, failed, midway)
    ]
    assert seen[0]["request_id"] == "mine"
    assert [line["route"] for line in seen] == [["prefill-0", "decode-0"]] * 2 + [[], ["prefill-0"]] + [
        ["prefill-0", "decode-0"]
    ]
    assert [line["answer_bytes"] for line in seen if line["outcome"] != "refused"] == [
        len(got.content) for got in (whole, stream, failed, midway)
    ]
    assert [line["prompt_tokens"] for line in seen] == [len(PROMPT), len(PROMPT), None, None, len(PROMPT)]
    assert [line["completion_tokens"] for line in seen] == [8, 8, None, None, None]
    assert len({transfer for line in seen for transfer in line["transfer_ids"]}) == 4
    for line in seen:
        parts = sum(line[name] for name in line if name.endswith("_ms") and name != "total_ms")
        assert 0 <= parts <= line["total_ms"] + 0.5


async def test_a_client_that_leaves_leaves_a_line(stage: Any, lines: Lines) -> None:
    running, _, decode = await stage()
    decode.held = asyncio.Event()
    task = asyncio.create_task(running.client.post("/v1/completions", json=BODY))
    await until(lambda: decode.open)
    task.cancel()
    (line,) = await lines(1)
    assert (line["outcome"], line["status"], line["answer_bytes"]) == ("gone", None, 0)
    assert line["route"] == ["prefill-0", "decode-0"]


async def test_retries_show_their_transfers_and_where_they_went(stage: Any, lines: Lines) -> None:
    running, prefill, _ = await stage()
    prefill.fails("500", times=1)
    assert (await running.client.post("/v1/completions", json=BODY)).status_code == 200
    (line,) = await lines(1)
    assert line["retries"] == 1
    assert len(set(line["transfer_ids"])) == 2
    assert line["route"] == ["prefill-0", "prefill-0", "decode-0"]


async def test_nothing_of_prompt_answer_key_or_address_is_in_it(stage: Any, log: Path, lines: Lines) -> None:
    running, prefill, decode = await stage(retries=0)
    headers = {"authorization": "Bearer sk-hush", "x-other": "hush", "user-agent": "hush"}
    more = {"user": "hush", "cache_salt": "hush", "metadata": {"a": "hush"}}
    answers = [await running.client.post("/v1/completions", json=BODY | more, headers=headers)]
    decode.fails("refusal", times=1)
    answers.append(await running.client.post("/v1/completions", json=BODY | more, headers=headers))
    assert [got.status_code for got in answers] == [200, 400]
    await lines(2)
    text = raw(log).decode()
    said = answers[0].json()["choices"][0]["text"]
    for hushed in (PROMPT, "secret", "hush", said, "127.0.0.1", str(prefill.port), str(decode.port), "too long"):
        assert hushed not in text


async def test_a_body_that_is_too_large_is_a_line_too(stage: Any, lines: Lines) -> None:
    running, _, _ = await stage(body=JSONLimits(max_bytes=100))
    got = await running.client.post("/v1/completions", json=BODY | {"prompt": "x" * 200})
    assert got.status_code == 413
    (line,) = await lines(1)
    assert (line["status"], line["endpoint"], line["outcome"]) == (413, "/v1/completions", "refused")
    assert await running.metric('kvparams_proxy_refusals_total{status="413"}') == 1


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A file of client keys, and headers with the one in it."""
    path = tmp_path / "keys.jsonl"
    key, record = create_api_key("team-a", datetime.now(UTC))
    with edit_api_keys(path) as records:
        records[record.id] = record
    return path, {"authorization": f"Bearer {key}"}


REFUSED: list[tuple[str, int, bytes | dict[str, Any], bool, str, str | None]] = [
    ("no key", 401, BODY, False, "", None),
    ("no json", 400, b"{", True, "team-a", None),
    ("not the model", 404, BODY | {"model": "other"}, True, "team-a", "other"),
    ("no number", 400, BODY | {"max_tokens": 0}, True, "team-a", "stub"),
    ("no prompt", 400, {"model": "stub"}, True, "team-a", "stub"),
    ("no name", 400, BODY | {"model": 7}, True, "team-a", None),
    ("long name", 400, BODY | {"model": "m" * 2000}, True, "team-a", "m" * 200),
    ("too large", 413, BODY | {"prompt": "x" * 9000}, True, "team-a", None),
]


async def test_a_refused_request_has_the_tenant_and_model_that_are_known(
    stage: Any, lines: Lines, keys: tuple[Path, dict[str, str]]
) -> None:
    path, headers = keys
    running, _, _ = await stage(client_keys=path, body=JSONLimits(max_bytes=8000))
    for what, status, body, known, _, _ in REFUSED:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        got = await running.client.post("/v1/completions", content=content, headers=headers if known else {})
        assert got.status_code == status, what
    seen = await lines(len(REFUSED))
    for line, (what, status, _, _, tenant, model) in zip(seen, REFUSED, strict=True):
        assert (line["status"], line["tenant"], line["model"]) == (status, tenant, model), what
        assert list(line) == MEMBERS


async def test_a_refusal_of_the_queue_has_tenant_and_model_too(
    stage: Any, lines: Lines, keys: tuple[Path, dict[str, str]]
) -> None:
    path, headers = keys
    limits = {Role.PREFILL: RoleLimits(requests=1)}
    running, prefill, _ = await stage(client_keys=path, limits=limits, queue=QueueLimits(per_tenant=1))
    prefill.held = asyncio.Event()
    tasks = [
        asyncio.create_task(running.client.post("/v1/completions", json=BODY, headers=headers)) for _ in range(3)
    ]  # one runs, one waits
    (refused,) = await lines(1)
    assert (refused["status"], refused["tenant"], refused["model"]) == (429, "team-a", "stub")
    prefill.held.set()
    assert sorted([got.status_code for got in await asyncio.gather(*tasks)]) == [200, 200, 429]


# by itself


def account(outcome: RequestOutcome = "ok", **facts: Any) -> RequestRecord:
    ticks = iter(number / 10 for number in range(100))
    life = RequestLifecycle(lambda: next(ticks))
    route: list[Instance] = []
    known: dict[str, Any] = {"request_id": "r", "transfer_id": "t", "model": "m", "prompts": 1, "choices": 1}
    known |= {"token_ids": None, "cache_salt": None, **facts}
    made = RequestRecord(RequestFacts(**known), "/v1/x", True, life, route, None)
    life.enter("queued")
    life.enter("prefill", "p")
    life.enter("result", "p")
    life.enter("queued")
    life.enter("decode", "d")
    if outcome in ("ok", "midway"):
        life.enter("first_byte")
    life.finish(outcome)
    made.ended_s = time.time()
    return made


async def journalled(log: Path, *accounts: RequestRecord) -> list[dict[str, Any]]:
    journal = RequestLog(asyncio.get_running_loop(), str(log))
    for each in accounts:
        journal.ended(each)
    journal.close()
    return parsed(log)


async def test_times_are_summed_over_all_visits(log: Path) -> None:
    (line,) = await journalled(log, account())
    got = {name: value for name, value in line.items() if name.endswith("_ms")}
    assert got == {
        "queued_ms": 200.0,
        "encode_ms": 0.0,
        "prefill_ms": 100.0,
        "result_ms": 100.0,
        "decode_ms": 100.0,
        "stream_ms": 100.0,
        "total_ms": 700.0,
    }


TEXT = st.text(st.characters(), max_size=300)


@given(TEXT, TEXT, TEXT, st.one_of(st.none(), TEXT))
def test_whatever_a_client_chooses_is_one_line_and_bounded(
    tmp_path_factory: pytest.TempPathFactory, request_id: str, tenant: str, code: str, model: str | None
) -> None:
    made = account("failed", request_id=request_id, tenant=tenant, model=model)
    made.code = code
    path = tmp_path_factory.mktemp("log") / "log"
    (line,) = asyncio.run(journalled(path, made))
    assert line["request_id"] == request_id
    assert line["tenant"] == tenant[:128]
    assert line["model"] == (None if model is None else model[:200])
    assert line["error"] == code[:128]


@pytest.mark.parametrize("given_by_engine", [-1, 2.5, "7", True, None, 1 << 60, [], {}])
def test_numbers_that_are_none_are_not_taken_over(given_by_engine: object) -> None:
    made = account()
    made.record_prefill({"usage": {"prompt_tokens": given_by_engine, "prompt_tokens_details": given_by_engine}})
    made.record_prefill({"usage": given_by_engine})
    made.record_decode({"completion_tokens": given_by_engine, "prompt_tokens": given_by_engine}, split=True)
    assert made.prompt_tokens is made.cached_tokens is made.completion_tokens is None


async def test_many_lines_are_written_at_once_and_few_soon(log: Path, lines: Lines) -> None:
    journal = RequestLog(asyncio.get_running_loop(), str(log))
    try:
        for _ in range(64):
            journal.ended(account())
        await until(lambda: raw(log).count(b"\n") == 64)  # without a timer: there were enough
        begun = time.monotonic()
        journal.refused(RefusedRequest("r", "/v1/x", ProxyError(401, "invalid_request_error", "no", code="k")))
        assert raw(log).count(b"\n") == 64
        assert len(await lines(65)) == 65
        assert time.monotonic() - begun < 2
    finally:
        journal.close()
    journal.close()  # twice is once
    assert journal.dropped == 0


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise SystemError", "loop.stop()"])
def test_the_last_lines_are_written_however_the_process_ends(log: Path, end: str) -> None:
    code = f"""
import asyncio, sys
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.telemetry.request_record import RefusedRequest
from kvparams_proxy.telemetry.request_log import RequestLog
loop = asyncio.new_event_loop()
journal = RequestLog(loop, {str(log)!r})
journal.refused(RefusedRequest("r", "/", ProxyError(400, "k", "m")))
{end}
"""
    subprocess.run([sys.executable, "-c", code], check=False, timeout=30, stderr=subprocess.DEVNULL)
    assert json.loads(log.read_text())["status"] == 400


# places that do not take lines


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[[str], LineWriter]]:
    made: list[LineWriter] = []

    def make(place: str) -> LineWriter:
        made.append(LineWriter(place))
        return made[-1]

    yield make
    for each in made:
        each.close(1)


async def test_a_pipe_that_nobody_reads_blocks_nobody_and_lines_are_counted(
    tmp_path: Path, writer: Callable[[str], LineWriter]
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    lines = writer(str(fifo))
    batch = b"x" * 65_535 + b"\n"
    begun = time.monotonic()
    for _ in range(200):
        lines.put(batch, 1)
    assert time.monotonic() - begun < 1
    assert 200 - 66 <= lines.dropped < 200
    given = 200 - lines.dropped
    os.set_blocking(reader, True)
    loop = asyncio.get_running_loop()
    got = b""
    while len(got) < given * len(batch):
        got += await loop.run_in_executor(None, os.read, reader, 1 << 20)
    assert got == batch * given  # whole, and in order
    lines.put(b"again\n", 1)
    assert await loop.run_in_executor(None, os.read, reader, 100) == b"again\n"
    os.close(reader)


async def test_a_pipe_that_is_never_read_does_not_hold_up_the_end(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    lines = LineWriter(str(fifo))
    lines.put(b"x" * (1 << 20), 1)
    begun = time.monotonic()
    lines.close(0.1)
    assert time.monotonic() - begun < 1
    os.close(reader)


async def test_a_full_disk_loses_lines_and_nothing_else(writer: Callable[[str], LineWriter]) -> None:
    lines = writer("/dev/full")
    for _ in range(3):
        lines.put(b"a\nb\n", 2)
    await until(lambda: lines.dropped == 6)


async def test_a_pipe_whose_reader_has_gone_loses_lines_and_nothing_else(
    tmp_path: Path, writer: Callable[[str], LineWriter]
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    lines = writer(str(fifo))
    os.close(reader)
    lines.put(b"a\n", 1)
    await until(lambda: lines.dropped == 1)


def test_what_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "unread")
    for place in (tmp_path, tmp_path / "no" / "where", tmp_path / "unread"):
        with pytest.raises(OSError, match=r"directory|No such device"):
            LineWriter(str(place))


async def test_a_file_that_is_moved_away_is_begun_anew(log: Path, writer: Callable[[str], LineWriter]) -> None:
    lines = writer(str(log))
    lines.put(b"one\n", 1)
    await until(lambda: raw(log) == b"one\n")
    old = log.with_suffix(".1")
    os.rename(log, old)
    lines.put(b"two\n", 1)
    await until(lambda: raw(log) == b"two\n")
    assert raw(old) == b"one\n"
    assert os.stat(log).st_mode & 0o777 == 0o640
    assert lines.dropped == 0


def test_a_closed_stdout_is_never_somebody_elses_socket() -> None:
    """The number 1 is free, and the next socket gets it."""
    code = f"""
import os, socket
from kvparams_proxy.telemetry.line_writer import LineWriter
os.close(1)
lines = LineWriter({STDOUT!r})
ours, theirs = socket.socketpair()
assert 1 in (ours.fileno(), theirs.fileno())
lines.put(b"a line\\n", 1)
lines.close(5)
for end in (ours, theirs):
    end.setblocking(False)
    try:
        assert not end.recv(100)
    except BlockingIOError:
        pass
os._exit(7 if lines.dropped == 1 else 8)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 7


async def test_where_the_log_is_full_requests_are_answered_and_lines_counted(stack: AsyncExitStack, proxy: Any) -> None:
    prefill, decode = Actor("prefill"), Actor("decode")
    for actor in (prefill, decode):
        await actor.begin()
        stack.callback(actor.end)
    running = await proxy([prefill.url], [decode.url], log_requests="/dev/full")
    for _ in range(3):
        assert (await running.client.post("/v1/completions", json=BODY)).status_code == 200
    await metric_becomes(running, "kvparams_proxy_log_lines_dropped_total", 3)


@pytest.mark.slow
@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
async def test_a_proxy_that_is_told_to_stop_writes_its_last_lines_to_stdout(signals: list[signal.Signals]) -> None:
    """The request has ended just before, its line is not written yet."""
    command = [sys.executable, "-m", "kvparams", "proxy", "--port", "0"]
    command += ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            up = (await process.stdout.readline()).decode()
            url = up.split()[2].rstrip(",")
            async with httpx.AsyncClient(base_url=url) as client:  # its connection stays open
                assert (await client.post("/v1/completions", json=BODY)).status_code == 503
                for each in signals:
                    with suppress(ProcessLookupError):  # it may have ended already
                        process.send_signal(each)
                    await until(partial(_is_stopping, process, int(url.rpartition(":")[2])))
                rest = await process.stdout.read()
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    (line,) = rest.decode().splitlines()
    assert json.loads(line)["status"] == 503


async def _is_stopping(process: asyncio.subprocess.Process, port: int) -> bool:
    """Whether a proxy has ended, or accepts no more connections."""
    if process.returncode is not None:
        return True
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return True
    writer.close()
    return False
