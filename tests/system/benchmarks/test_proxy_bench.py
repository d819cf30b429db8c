"""Tests the proxy benchmark and the relay that it measures as a floor."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import floor_relay, proxy_bench
from benchmarks.load_process import Ask, LoadError, closed
from benchmarks.scenarios import SCENARIOS
from tests.support import stub_engine
from tests.support.processes import Processes, free_ports, http_get


def test_the_floor_carries_both_legs_of_every_request_whole_and_streamed(tmp_path: Path) -> None:
    prefill, decode, relay = free_ports(3)
    roles = ["--prefill", str(prefill), "--decode", str(decode)]
    stub_url = f"http://127.0.0.1:{prefill}"
    with Processes(tmp_path) as processes:
        processes.start("stub", [sys.executable, stub_engine.__file__, *roles], ready=[stub_url + "/health"])
        command = [sys.executable, floor_relay.__file__, "--port", str(relay), *roles]
        processes.start("floor", command, ready=[f"http://127.0.0.1:{relay}/health"])
        for name in ("ns-s-64", "stb-s-64"):
            body = tmp_path / "body.json"
            body.write_bytes(SCENARIOS[name].body)
            ask = Ask(body, events=SCENARIOS[name].events)
            assert closed(relay, ask, concurrency=8, requests=40, limit_s=20).right == 40
        stats = json.loads(http_get(stub_url + "/stats")[1])
    assert (stats[str(prefill)]["prefill"], stats[str(prefill)]["requests"]) == (80, 80)
    assert (stats[str(decode)]["decode_with_kv"], stats[str(decode)]["requests"]) == (80, 80)


def test_a_run_with_wrong_answers_is_no_measurement(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    body = tmp_path / "body.json"
    body.write_bytes(SCENARIOS["stb-s-64"].body)
    with Processes(tmp_path) as processes:
        command = [sys.executable, stub_engine.__file__, "--decode", str(port)]
        processes.start("stub", command, ready=[f"http://127.0.0.1:{port}/health"])
        with pytest.raises(LoadError, match="65 events instead of 66"):
            closed(port, Ask(body, events=66), concurrency=2, requests=4, limit_s=20)


def test_every_scenario_asks_for_what_its_name_says() -> None:
    for name, scenario in SCENARIOS.items():
        document = json.loads(scenario.body)
        assert document["stream"] == name.startswith("st")
        assert len(document["prompt"].split()) == (8001 if "-l-" in name else 201)
        assert scenario.body.count(b"@@@@@@@@") == 1
        assert scenario.body == scenario.body
        assert scenario.events == (document["max_tokens"] + 1 if scenario.stream else None)


@pytest.mark.slow
@pytest.mark.alone
def test_the_bench_measures_the_shipped_proxy_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--scenarios", "ns-s-64,stb-s-64", "--rounds", "1", "--share", "0.05", "--open-seconds", "0.3"]
    assert proxy_bench.main([*options, "--results", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "proxy.json").read_text())
    assert [(row["scenario"], row["subject"]) for row in document["summary"]] == [
        ("ns-s-64", "floor"),
        ("ns-s-64", "proxy"),
        ("stb-s-64", "floor"),
        ("stb-s-64", "proxy"),
    ]
    assert all(row["rss_mb"] > 1 for row in document["summary"])
    assert (tmp_path / "proxy.png").exists()
    assert "| ns-s-64 | proxy |" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_bench_that_is_interrupted_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    options = ["--scenarios", "ns-s-64", "--rounds", "100", "--share", "0.02", "--results", str(tmp_path)]
    command = [sys.executable, proxy_bench.__file__, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stderr is not None
        assert "round 1/100" in bench.stderr.readline()
        started = [each for each in descendants(bench.pid) if "--port" in command_line(each)]
        assert len(started) >= 2
        bench.send_signal(number)
        assert "interrupted" in bench.communicate(timeout=90)[1]
    assert bench.returncode == 130
    assert [each for each in started if "--port" in command_line(each)] == []


def descendants(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return children + [below for child in children for below in descendants(child)]


def command_line(pid: int) -> list[str]:
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_text().split("\0") if path.exists() else []
