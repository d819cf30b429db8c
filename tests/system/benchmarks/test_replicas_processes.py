"""Tests the benchmark of several real proxies: its figures, and one short run."""

import json
from pathlib import Path

import pytest

from benchmarks.load_client import Request as Sent
from benchmarks.replay.__main__ import SAMPLE
from benchmarks.replay.trace import Request
from benchmarks.replay.world import Cost
from benchmarks.replicas_processes.__main__ import main
from benchmarks.replicas_processes.engines import TOKENS, ModelEngine, PrefillLog, PrefillRecord, request_body
from benchmarks.replicas_processes.fault_figures import fault_figures
from benchmarks.replicas_processes.figures import Figure, Run, engine_load_cov, hit_ratio, relative_hits, table, ttft_s
from benchmarks.replicas_processes.load_generator import DealtRequest
from benchmarks.replicas_processes.scenarios import FaultTimes
from tests.support.stub_answers import read_ask


def _run(cached: dict[int, int], replicas: int = 1, failed: frozenset[int] = frozenset()) -> Run:
    """Returns a run of a request each second, of ten blocks, so many of them cached."""
    log = PrefillLog({n: PrefillRecord(n % 2, 10, blocks, 1.0 + n % 2) for n, blocks in cached.items()})
    requests = [
        DealtRequest(n, float(n), n % replicas, Sent(0.0, b"", True, False, 0.1 * n, "lost" if n in failed else None))
        for n in cached
    ]
    return Run(requests, log, 2, 0.0)


def test_an_engine_computes_one_prompt_after_the_other_and_finds_what_it_has() -> None:
    log = PrefillLog()
    engine = ModelEngine(3, 100, Cost(fixed_s=1.0, tokens_per_s=512.0), 10.0, log)
    waits: list[float] = []
    for number, blocks in enumerate(([1, 2, 3], [1, 2, 4])):
        body = request_body(number, Request(0.0, 1536, 4, blocks, 0), 4)
        known, wait_s = engine.begun(read_ask(body, chat=False), body, 100.0)
        waits.append(wait_s)
        assert known.prompt_tokens == 3 * TOKENS
        assert known.cached_tokens == (0, 2 * TOKENS)[number]
    assert waits == pytest.approx([0.4, 0.4 + 0.2])
    assert log == {0: PrefillRecord(3, 3, 0, 4.0), 1: PrefillRecord(3, 3, 2, 2.0)}


def test_figures_of_one_run() -> None:
    run = _run({0: 0, 1: 5, 2: 10, 3: 1})
    assert hit_ratio(run.log) == 0.4
    assert ttft_s(run) == pytest.approx((0.15, 0.3))
    assert engine_load_cov(run) == pytest.approx((1 / 3, 0.0))
    assert hit_ratio(run.until(2.0).log) == 0.25
    assert relative_hits([0, 1, 9], run.log, _run({0: 0, 1: 10}).log) == 0.5


def test_a_figure_meets_its_bar_or_misses_it() -> None:
    figures = [Figure("a", "x", 1.0, "<= 1.05"), Figure("a", "y", 0.9, ">= 0.98"), Figure("a", "z", 2.0)]
    assert [each.meets for each in figures] == [True, False, None]
    assert table(figures).splitlines()[3] == "| a | y | 0.900 | at least 0.98 | **missed** |"


def test_failures_and_hits_count_at_their_time_and_place() -> None:
    one = _run(dict.fromkeys(range(100), 4))
    cached = {n: 4 if n < 50 or n >= 80 else 1 for n in range(100)}
    cached[31] = 2  # a new replica's, within its first seconds
    run = _run(cached, 2, frozenset({45, 60}))
    times = FaultTimes({1: 30.0}, 45.5, {45}, 2.0, 4.0, 0.1, 50.0, 70.0)
    found = {each.name: each.value for each in fault_figures(run, times, one)}
    assert found["failed requests of other replicas"] == 1
    assert found["failed requests"] == 1
    assert found["new replicas, first 2 s: hits / one"] == 0.5
    assert found["hits, new from 10 s to 20 s / old"] == 1.0
    assert found["while it is away: hits / one"] == 0.25
    assert found["10 s to 20 s after: hits / one"] == 1.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_proxies_that_share_find_more_than_those_that_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    main([str(SAMPLE), "--seconds", "12", "--replicas", "3", "--no-faults", "--blocks", "1000"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    found = {(each["scenario"], each["name"]): each["value"] for each in lines}
    assert found["3 replicas", "failed requests"] == 0
    assert found["3 replicas", "hit ratio"] > 1.2 * found["3 replicas that share nothing", "hit ratio"]


def test_a_trace_that_is_none_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "missing")]) == 2
    assert "replicas_processes: " in capsys.readouterr().err
