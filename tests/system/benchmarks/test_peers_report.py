"""Tests the tables and the plot of the comparison with other routers."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

import pytest

from benchmarks.peers.measure import Row
from benchmarks.peers.plot import plot
from benchmarks.peers.report import best_peer, compare, report

NOISE = (1.0, 3.0, 1.5)
"""What each round met: it multiplies everybody's figures."""


def row(router: str, number: int, cpu_us: float, **changes: object) -> Row:
    plain: dict[str, object] = {
        "part": "defaults",
        "scenario": "ns-s-64",
        "router": router,
        "round": number,
        "loop": "closed",
        "requests": 1000,
        "per_s": 2000.0,
        "cpu_us": cpu_us,
        "rss_mb": 60.0,
        "engine_us": 10.0,
        "generator_us": 7.0,
        "p50_ms": 1.0,
        "p99_ms": 10.0,
        "lag_p99_ms": 0.1,
    }
    return Row(**(plain | changes))  # pyright: ignore[reportArgumentType]


def rounds(costs: dict[str, float], noise: Sequence[float] = NOISE, **changes: object) -> list[Row]:
    return [
        row(router, number, cost * each, **changes)
        for number, each in enumerate(noise)
        for router, cost in costs.items()
    ]


COSTS = {"direct": 0.0, "floor": 40.0, "kvparams": 80.0, "vllm-router": 100.0, "smg": 50.0}


def test_ratios_are_taken_within_a_round_so_that_noise_common_to_it_falls_out() -> None:
    found = {each.router: each for each in compare(rounds(COSTS), lambda row: row.cpu_us)}
    assert set(found) == {"floor", "kvparams", "vllm-router", "smg"}
    ratio = found["vllm-router"].ours
    assert (ratio.low, ratio.median, ratio.high) == (0.8, 0.8, 0.8)
    assert found["floor"].ours.median == 2.0
    assert found["vllm-router"].value.median == 150.0
    assert (found["vllm-router"].value.low, found["vllm-router"].value.high) == (100.0, 300.0)


def test_rounds_that_disagree_make_a_wide_interval() -> None:
    rows = [row("kvparams", number, cost) for number, cost in enumerate((80.0, 120.0, 100.0))]
    rows += [row("smg", number, 100.0) for number in range(3)]
    (found,) = [each for each in compare(rows, lambda row: row.cpu_us) if each.router == "smg"]
    assert (found.ours.low, found.ours.median, found.ours.high) == (0.8, 1.0, 1.2)


def test_added_latency_is_over_the_bare_engine_of_the_same_round() -> None:
    rows = [
        row(router, number, 0.0, loop="open", p50_ms=base + p50)
        for number, base in enumerate((1.0, 5.0, 2.0))
        for router, p50 in (("direct", 0.0), ("kvparams", 0.5), ("smg", 0.25))
    ]
    found = {each.router: each for each in compare(rows, lambda row: row.p50_ms, difference=True, over_direct=True)}
    assert (found["kvparams"].value.median, found["smg"].value.median) == (0.5, 0.25)
    assert found["smg"].ours.median == 0.25


def test_the_best_peer_is_the_cheapest_and_never_a_floor() -> None:
    best = best_peer(compare(rounds(COSTS), lambda row: row.cpu_us), "ns-s-64")
    assert best is not None
    assert best.router == "smg"
    assert best_peer(compare(rounds({"kvparams": 1.0, "floor": 0.5}), lambda row: row.cpu_us), "ns-s-64") is None


def test_the_report_has_a_section_for_each_part_that_was_taken() -> None:
    both = {"kvparams": 80.0, "vllm-router": 100.0}
    rows = [
        *rounds(COSTS),
        *rounds(both, part="everything"),
        *rounds(both, part="everything", scenario="ids-l-64"),
        *rounds({"smg": 50.0}, part="everything"),
        *rounds(COSTS, part="throughput"),
    ]
    text = report(rows)
    titles = re.findall("^### (.*)$", text, re.MULTILINE)
    assert [title.split(",")[0] for title in titles] == [
        "CPU per request",
        "CPU per request",
        "Throughput",
        "Resident memory",
        "The stub engines asked without a router",
    ]
    assert "| ns-s-64 | 60 [40, 120] | 120 [80, 240] | 150 [100, 300] | 75 [50, 150] |" in text
    # smg takes no token ids: its cells are empty there, not wrong.
    assert "| ids-l-64 | 120 [80, 240] | 150 [100, 300] | - |" in text
    assert "1.60 [1.60, 1.60] (smg)" in text


def test_like_is_compared_with_like_where_both_legs_start_at_once() -> None:
    text = report(rounds(COSTS | {"kvparams sglang": 60.0}))
    assert "| kvparams sglang / smg |" in text
    assert "kvparams sglang / vllm-router" not in text
    assert "| 1.20 [1.20, 1.20] |" in text


@pytest.mark.parametrize("count", [1, 3])
def test_the_plot_has_a_panel_for_each_scenario_and_a_dot_with_an_interval_for_each_router(count: int) -> None:
    scenarios = ("ns-s-64", "ns-l-64", "st-s-64")[:count]
    rows = [each for scenario in scenarios for each in rounds(COSTS, scenario=scenario)]
    picture = plot(compare(rows, lambda row: row.cpu_us), "CPU <per> request")
    name = "{http://www.w3.org/2000/svg}"
    root = ET.fromstring(picture)
    assert root.findtext(f"{name}title") == "CPU <per> request"
    panels = root.findall(f"{name}g")
    assert len(panels) == count
    for panel in panels:
        assert len(panel.findall(f"{name}circle")) == 4
        spans = [each for each in panel.findall(f"{name}line") if "span" in each.get("class", "")]
        dots = panel.findall(f"{name}circle")
        for span, dot in zip(spans, dots, strict=True):
            assert float(span.get("x1", "")) <= float(dot.get("cx", "")) <= float(span.get("x2", ""))
    assert "prefers-color-scheme:dark" in picture


def test_two_workers_are_beside_what_the_cores_allow() -> None:
    both = [row("kvparams", number, 150.0, part="throughput", per_s=9_000.0, engine_us=30.0) for number in range(3)]
    one = [row("kvparams one worker", number, 140.0, part="throughput", per_s=6_000.0) for number in range(3)]
    direct = [row("direct", number, 0.0, part="throughput") for number in range(3)]
    text = report([*both, *one, *direct])
    # 150 + 30 + 7 us of two cores: 10,695 requests a second at most, which is 1.78 times 6,000.
    assert "ns-s-64: two workers carry 1.50 [1.50, 1.50] times what one does" in text
    assert "1.78 is the most" in text
