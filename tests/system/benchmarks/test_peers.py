"""Tests the comparison with other routers: its floors, its engines' counts, its clean-up, and its results."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import floor_relay, floor_starlette
from benchmarks.load_process import Ask, LoadError, closed
from benchmarks.native_build import compiled
from benchmarks.peers.__main__ import main
from benchmarks.peers.measure import Bench
from benchmarks.peers.routers import FLOORS, PEERS, PEERS_ENVIRONMENT, Router, floor, peer
from benchmarks.scenarios import SCENARIOS
from tests.support.processes import Processes, StartError, free_ports, http_get

TINY = ["--rounds", "1", "--share", "0.02"]


@pytest.mark.parametrize("program", [floor_relay, floor_starlette])
def test_a_floor_carries_both_legs_of_every_request_whole_and_streamed(tmp_path: Path, program: object) -> None:
    prefill, decode, relay = free_ports(3)
    roles = ["--prefill", str(prefill), "--decode", str(decode)]
    stub_url = f"http://127.0.0.1:{prefill}"
    with Processes(tmp_path) as processes:
        processes.start("stub", [str(compiled("stub_engine")), *roles], ready=[stub_url + "/health"])
        command = [sys.executable, str(getattr(program, "__file__", "")), "--port", str(relay), *roles]
        processes.start("floor", command, ready=[f"http://127.0.0.1:{relay}/health"])
        for name in ("ns-s-64", "chat-s-64", "stb-s-64"):
            body = tmp_path / "body.json"
            body.write_bytes(SCENARIOS[name].body)
            ask = Ask(body, SCENARIOS[name].path, events=SCENARIOS[name].events)
            assert closed(relay, ask, concurrency=8, requests=40, limit_s=20).right == 40
        stats = json.loads(http_get(stub_url + "/stats")[1])
    assert (stats[str(prefill)]["prefill"], stats[str(prefill)]["requests"]) == (120, 120)
    assert (stats[str(decode)]["decode_with_kv"], stats[str(decode)]["requests"]) == (120, 120)


def test_a_router_that_skips_a_leg_is_no_measurement(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        bench = Bench(processes, tmp_path)
        # It claims to be a router with two legs, and is an engine.
        (port,) = free_ports(1)
        command = (str(compiled("stub_engine")), "--decode", str(port))
        bench.start([Router("liar", port, command, (f"http://127.0.0.1:{port}/health",), "nixl")])
        with pytest.raises(LoadError, match=r"liar: the engines counted .*'requests': 0"):
            bench.closed("defaults", "liar", SCENARIOS["ns-s-64"], 0, 0.02)


def test_a_router_that_does_not_start_is_reported_with_its_log(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        bench = Bench(processes, tmp_path)
        command = (sys.executable, "-c", "raise SystemExit('this router has no port')")
        with pytest.raises(StartError, match="this router has no port"):
            bench.start([Router("broken", 1, command, ("http://127.0.0.1:1/health",), "nixl")])


def test_a_peer_that_is_not_installed_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.peers.routers.PEERS_ENVIRONMENT", tmp_path)
    with Processes(tmp_path) as processes, pytest.raises(StartError, match=r"smg is not installed.*make install-peers"):
        peer("smg", Bench(processes, tmp_path).engines)


def test_every_scenario_asks_for_what_its_name_says() -> None:
    for name, scenario in SCENARIOS.items():
        body = scenario.body
        assert body.count(b"@@@@@@@@") == 1
        assert body == scenario.body
        document = json.loads(body.replace(b"@@@@@@@@", b"00000001"))
        assert document["stream"] == name.startswith("st")
        prompt = document["messages"][1]["content"] if name.startswith("chat") else document["prompt"]
        words = prompt if name.startswith("ids") else prompt.split()
        counter = 0 if name.startswith("ids") else 1
        assert len(words) == (8000 if "-l-" in name else 200) + counter
        assert scenario.events == (document["max_tokens"] + 1 if scenario.stream else None)


def test_a_tiny_run_without_peers_measures_the_shipped_proxy_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--peers", "none", "--parts", "defaults", "--scenarios", "ns-s-64,stb-s-64", "--results", str(tmp_path)]
    assert main([*TINY, *options]) == 0
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert {row["router"] for row in rows} == {"direct", *FLOORS, "kvparams", "kvparams sglang"}
    assert {(row["scenario"], row["loop"]) for row in rows} == {
        ("ns-s-64", "closed"),
        ("ns-s-64", "open"),
        ("stb-s-64", "closed"),
    }
    assert all(row["rss_mb"] > 1 for row in rows if row["router"] != "direct")
    assert (tmp_path / "peers.svg").read_text().startswith("<svg ")
    table = capsys.readouterr().out
    assert "| kvparams / floor |" in table
    assert (tmp_path / "peers.md").read_text() in table


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_run_that_is_interrupted_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    options = ["--peers", "none", "--scenarios", "ns-s-64", "--rounds", "1000", "--share", "0.02"]
    command = [sys.executable, "-m", "benchmarks.peers", *options, "--results", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stderr is not None
        while "round 1/1000" not in bench.stderr.readline():
            assert bench.poll() is None
        started = [each for each in descendants(bench.pid) if "--port" in command_line(each)]
        assert len(started) >= 4
        bench.send_signal(number)
        assert "interrupted" in bench.communicate(timeout=90)[1]
    assert bench.returncode == 130
    assert [each for each in started if "--port" in command_line(each)] == []


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(not PEERS_ENVIRONMENT.exists(), reason="`make install-peers` installs the other routers")
@pytest.mark.timeout(400)
def test_a_tiny_run_of_all_parts_measures_every_peer(tmp_path: Path) -> None:
    assert main([*TINY, "--results", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    for part in ("defaults", "everything", "throughput"):
        assert {*PEERS, "kvparams"} <= {row["router"] for row in rows if row["part"] == part}
    ids = {row["router"] for row in rows if row["scenario"] == "ids-l-64"}
    assert ids == {"direct", "kvparams", "vllm-router"}  # the others refuse prompts of token ids


def test_a_floor_counts_no_request_that_it_did_not_carry(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        bench = Bench(processes, tmp_path)
        bench.start([floor(FLOORS[0], bench.engines)])
        row = bench.closed("defaults", FLOORS[0], SCENARIOS["ns-s-64"], 0, 0.02)
    assert (row.requests, row.router) == (120, "floor")
    assert row.engine_us > 0 or row.generator_us > 0


def descendants(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return children + [below for child in children for below in descendants(child)]


def command_line(pid: int) -> list[str]:
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_text().split("\0") if path.exists() else []
