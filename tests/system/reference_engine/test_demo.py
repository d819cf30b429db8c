"""Tests the demo as a user runs it: it proves its claims, notices faults, and leaves nothing running."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import httpx
import pytest

from demo.client import ask, new_client
from demo.control import damage_unchecked, damage_verified
from demo.conversations import Fleet, hold_conversations
from demo.display import Display
from demo.processes import SERVE_PORTS, ProcessError, Processes, Server, free_port, free_port_block
from demo.stores import KINDS
from tests.support.waiting import wait_until

COMMAND = [sys.executable, "-u", "-m", "demo"]
WAIT_S = 100.0
URL = re.compile(r"is ready at (http://\S+)")


def unreachable(output: str) -> bool:
    """Whether none of the servers that the demo named answers any more; guarded against naming none."""
    urls = URL.findall(output)
    assert len(urls) == 6
    for url in urls:
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", trust_env=False)
    return True


def read_until(lines: IO[str], found: Callable[[str], bool]) -> str:
    """What was written up to the line that is looked for."""
    output = ""
    for line in lines:
        output += line
        if found(line):
            return output
    raise AssertionError(f"the output ended: {output}")


CHEAP = ("file", "valkey")
"""Where stores are, tests elsewhere see to them; that each demonstration runs is seen at full length."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind if kind in CHEAP else pytest.param(kind, marks=pytest.mark.soak) for kind in KINDS]
)
def test_the_demo_proves_its_point_on_each_store_and_ends(kind: str) -> None:
    command = [*COMMAND, "--turns", "2", "--store", kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  yes\n") == 6
    assert done.stdout.count("ok: ") == 6
    assert "WRONG" not in done.stdout
    assert unreachable(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGTERM])
def test_serve_prints_a_request_that_works_and_stops_when_told(way: signal.Signals) -> None:
    port = free_port_block(SERVE_PORTS)
    command = [*COMMAND, "--serve", "--port", str(port), "--traffic", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as demo:
        assert demo.stdout is not None
        try:
            output = read_until(demo.stdout, lambda line: "Ctrl-C" in line)
            printed = re.search(r"^  (curl .*)$", output, re.MULTILINE)
            assert printed is not None
            tried = subprocess.run(["sh", "-c", printed[1]], capture_output=True, text=True, timeout=WAIT_S, check=True)
            assert tried.stdout.count("data: ") > 3
            assert tried.stdout.endswith("data: [DONE]\n\n")
            (promised,) = re.findall(r"tried it: (\d+) tokens", output)
            usage = json.loads(tried.stdout.split("data: ")[-2])["usage"]
            assert usage["completion_tokens"] == int(promised)
            page = re.search(r"look at it: (http://127\.0\.0\.1:(\d+))/ui#token=(\S+)$", output, re.MULTILINE)
            assert page is not None
            assert page[2] == str(port)
            headers = {"authorization": f"Bearer {page[3]}"}
            with httpx.Client(base_url=page[1], headers=headers, timeout=WAIT_S, trust_env=False) as client:
                instances = client.get("/admin/instances").json()["data"]
                assert [one["url"][-5:] for one in instances] == [f"{port + number:05}" for number in (1, 2, 3, 4)]
                ok = 'kvparams_proxy_requests_total{outcome="ok"}'

                def answered() -> float:
                    text = client.get("/metrics").text
                    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(ok))

                before = answered()
                wait_until(lambda: answered() >= before + 3, WAIT_S)  # nobody has asked but the light traffic
        finally:
            demo.send_signal(way)
        output += demo.stdout.read()
        assert demo.wait(WAIT_S) == 130
    assert unreachable(output)


@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGTERM])
def test_the_demo_can_be_stopped_while_it_starts(way: signal.Signals) -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as demo:
        assert demo.stdout is not None
        read_until(demo.stdout, lambda line: "starting 2 prefill engines" in line)
        demo.send_signal(way)
        rest = demo.stdout.read()
        assert demo.wait(WAIT_S) == 130
    assert re.fullmatch(r"\[.*\] stopped\n", rest)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--store", "file:{folder}/kv?size=1MiB"], "too small.*size=4MiB or more"),
        (["--store", "memory:?size=8MiB"], "not shared between processes"),
        (["--store", "mamory:"], "known: file, .*memory"),
        (["--store", "file:{folder}/kv?sise=8MiB"], "did you mean size"),
        (["--port", "99999"], "from 1 to 65535"),
        (["--port", "0"], "from 1 to 65535"),
    ],
)
def test_what_the_demo_cannot_run_with_is_refused_in_one_line(
    arguments: list[str], why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [*COMMAND, *(argument.format(folder=tmp_path) for argument in arguments)]
    assert subprocess.run(command, timeout=WAIT_S, check=False).returncode == 2
    output, errors = capfd.readouterr()
    assert output == ""
    assert re.fullmatch(f"demo: .*{why}.*\n", errors)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("more", [["--serve"], []], ids=["of an engine", "of the proxy"])
def test_a_port_that_is_taken_is_said_at_once(more: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever answers there would be taken for the one that was started."""
    port = free_port_block(SERVE_PORTS)
    with socket.create_server(("127.0.0.1", port + 3 if more else port)) as taken:
        command = [*COMMAND, *more, "--port", str(port)]
        assert subprocess.run(command, timeout=WAIT_S, check=False).returncode == 2
        assert capfd.readouterr().err.startswith(f"demo: port {taken.getsockname()[1]} is in use")


def test_a_server_that_has_ended_is_not_ready_although_something_answers(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        server = processes.start("gone", sys.executable, "-c", "raise SystemExit('no port')", port=free_port())
        server.process.wait(WAIT_S)
        with pytest.raises(ProcessError, match="ended with status 1: no port"):
            processes.wait_until(server, lambda: True)


@pytest.mark.slow
def test_an_engine_whose_port_is_taken_says_so_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port: int = taken.getsockname()[1]
        command = [sys.executable, "-m", "reference_engine", "--port", str(port)]
        assert subprocess.run(command, timeout=WAIT_S, check=False).returncode == 1
    wanted = f"reference_engine: cannot listen on 127.0.0.1 port {port}: .*; choose another --port\n"
    assert re.fullmatch(wanted, capfd.readouterr().err)


@pytest.mark.slow
async def test_a_prompt_that_decode_computes_itself_is_noticed(processes: Processes, tmp_path: Path) -> None:
    """Although its answer is right, and other decode engines use what prefill has computed."""
    url = f"file://{tmp_path}/kv?size=32MiB"
    prefill = processes.engine("p0", "prefill", url)
    decode = processes.engine("d0", "decode", url), processes.engine("d1", "decode", f"file://{tmp_path}/o?size=32MiB")
    single = processes.engine("single")
    proxy = processes.proxy([prefill], decode)
    processes.wait_ready(prefill, *decode, single, proxy)
    display = Display()
    async with new_client() as client:
        await hold_conversations(client, Fleet((prefill,), decode, single, proxy), display, 1)
    processes.stop(prefill, *decode, single, proxy)

    (failure,) = display.failures
    assert re.match("[12] of 3 prompts were handed to decode", failure)


@pytest.mark.slow
async def test_the_controls_notice_when_they_do_not_hold(
    processes: Processes, servers: dict[str, Server], store_url: str, tmp_path: Path
) -> None:
    """Negative control of the negative control: each is run where its claim is false."""
    url = f"file://{tmp_path}/kv?size=32MiB"
    careless = processes.engine("careless-p", "prefill", url, "--no-verify")
    other = processes.engine("careless-d", "decode", url, "--no-verify")
    processes.wait_ready(careless, other)
    unverified, verified = Display(), Display()
    async with new_client() as client:
        await damage_verified(client, careless, other, servers["single"], url, unverified)
        await damage_unchecked(client, servers["prefill"], servers["decode"], servers["single"], store_url, verified)
    processes.stop(careless, other)

    assert len(unverified.failures) == 3
    assert len(verified.failures) == 1


@pytest.mark.slow
def test_a_server_that_cannot_start_is_reported_with_its_own_words(processes: Processes) -> None:
    engine = processes.engine("wrong", "both", "file:///nowhere/at/all/kv?size=32MiB")

    with pytest.raises(ProcessError, match="nowhere"):
        processes.wait_ready(engine)


@pytest.mark.slow
async def test_an_engine_that_is_told_to_end_finishes_what_it_began(
    processes: Processes, servers: dict[str, Server]
) -> None:
    body: dict[str, object] = {"prompt": "Once", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    engine = processes.engine("leaving", "both")
    processes.wait_ready(engine)
    async with new_client() as client:
        asked = {**body, "stream": True}
        async with client.stream("POST", f"{engine.url}/v1/completions", json=asked) as response:
            lines = response.aiter_lines()
            await anext(lines)
            engine.process.send_signal(signal.SIGTERM)
            rest = [line async for line in lines if line]
        assert len(rest) >= 299
        assert rest[-1] == "data: [DONE]"
        assert engine.process.wait(WAIT_S) is not None
        assert (await ask(client, servers["single"].url, "/v1/completions", body)).count("completion_tokens") == 300
