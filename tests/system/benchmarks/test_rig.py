"""Tests the comparison of our proxy with other routers: its parts, its ratios, and its checks of counts."""

import json
from pathlib import Path

import pytest

from benchmarks.rig import OTHER, OURS, Counted, Rig
from benchmarks.rig_closed import Row, compare_closed, problems
from benchmarks.rig_open import OpenFigures, compare_open
from tests.support.processes import StartError

LISTING = "print('vr-pd-rr /venvs/vr --host 127.0.0.1 --port 18203 --policy round_robin')"


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """A folder that looks like a rig from outside."""
    (tmp_path / "rig" / "bodies").mkdir(parents=True)
    (tmp_path / "rig" / "bench.py").write_text(LISTING)
    (tmp_path / "home").mkdir()
    for name in ("mock", "load"):
        (tmp_path / "home" / name).touch()
    return Rig(tmp_path / "rig", tmp_path / "home")


def row(router: str, number: int, cpu_us: float, **changes: object) -> Row:
    plain: Row = {
        "router": router,
        "sc": "ns-s-64",
        "rd": number,
        "conc": 64,
        "n": 1000,
        "wall": 0.5,
        "rps": 2000.0,
        "cpu_us": cpu_us,
        "rss": 60.0,
        "errors": 0,
        "bad": 0,
        "err": "",
        "split": [500, 500, 500, 500],
        "prefills": [500, 500, 0, 0],
        "dec_kv": [0, 0, 500, 500],
    }
    return {**plain, **changes}  # pyright: ignore[reportReturnType]


def test_a_rig_that_is_not_there_is_reported_by_the_part_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"bench\.py is missing"):
        Rig(tmp_path, tmp_path)


def test_a_router_is_what_the_rig_itself_lists(rig: Rig) -> None:
    router = rig.router("vr-pd-rr")
    assert router.port == 18203
    assert router.command[0] == "/venvs/vr"
    with pytest.raises(StartError, match="no router nobody"):
        rig.router("nobody")


def test_our_entry_is_there_for_the_run_and_what_was_there_before_comes_back(rig: Rig) -> None:
    entry = rig.home / "extra" / "ours.json"
    with rig.with_ours(["--continuation"]):
        ours = json.loads(entry.read_text())[OURS]
        assert ours["cmd"][1:4] == ["proxy", "--port", "18299"]
        assert ours["cmd"][-1] == "--continuation"
    assert not entry.exists()
    entry.write_text("before")
    with rig.with_ours():
        assert entry.read_text() != "before"
    assert entry.read_text() == "before"


def test_in_plain_mode_all_engines_are_aggregated_and_a_second_proxy_of_ours_may_join(rig: Rig) -> None:
    with rig.with_ours(["--policy", "cache_aware"], ["--policy", "round_robin"], plain=True):
        entries = json.loads((rig.home / "extra" / "ours.json").read_text())
    assert [entry["cmd"].count("--aggregated") for entry in entries.values()] == [4, 4]
    assert [entry["cmd"][-1] for entry in entries.values()] == ["cache_aware", "round_robin"]
    assert entries[OURS]["port"] != entries[OTHER]["port"]


def test_the_ratio_is_the_median_of_ratios_within_rounds() -> None:
    rows = [
        each
        for number, noise in enumerate((1.0, 3.0, 1.5))
        for each in (row(OURS, number, 80 * noise), row("vr-pd-rr", number, 100 * noise))
    ]
    (result,) = compare_closed(rows, ["vr-pd-rr"])
    assert (result.ratio.low, result.ratio.median, result.ratio.high) == (0.8, 0.8, 0.8)
    assert result.ours_us.median == 120


def test_rows_that_add_up_are_no_problem() -> None:
    assert problems([row(OURS, 0, 80), row("direct", 0, 0, prefills=[0] * 4)], limit_s=20) == []


def test_requests_cut_off_at_the_limit_are_allowed_for_in_that_run_and_the_next_but_never_elsewhere() -> None:
    more = {"split": [520, 520, 505, 505], "prefills": [520, 520, 0, 0], "dec_kv": [0, 0, 505, 505]}
    cut_off = row(OURS, 1, 80, wall=20.1, **more)
    assert problems([cut_off, row("vr-pd-rr", 1, 80, **more)], limit_s=20) == []
    (found,) = problems([cut_off, row(OURS, 2, 80), row(OURS, 3, 80, **more)], limit_s=20)
    assert found == "round 3 ns-s-64 kvparams proxy: 1040 prefill legs for 1000 requests"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dec_kv": [0, 0, 500, 400]}, "100 decode legs without KV params"),
        ({"prefills": [499, 500, 0, 0]}, "1 prefill legs without KV params"),
        ({"n": 1001}, "1000 prefill legs for 1001 requests"),
        ({"split": [500, 500, 600, 600], "dec_kv": [0, 0, 600, 600]}, "1200 decode legs for 1000 requests"),
        ({"errors": 2, "err": "bad status"}, "2 errors, 0 bad: bad status"),
    ],
)
def test_a_row_that_does_not_add_up_is_a_problem(changes: dict[str, object], problem: str) -> None:
    (found,) = problems([row(OURS, 3, 80, **changes)], limit_s=20)
    assert found == f"round 3 ns-s-64 kvparams proxy: {problem}"


def test_an_open_loop_allows_for_nothing_cut_off() -> None:
    assert Counted(10, 10, 10, 10).problem(10, 0) is None
    assert Counted(11, 10, 11, 10).problem(10, 0) == "11 prefill legs for 10 requests"


def test_in_plain_mode_a_request_has_one_leg_and_none_carries_kv_params() -> None:
    one_leg = {"split": [250] * 4, "prefills": [0] * 4, "dec_kv": [0] * 4}
    assert problems([row(OURS, 0, 80, **one_leg)], limit_s=20, plain=True) == []
    (found,) = problems([row(OURS, 0, 80)], limit_s=20, plain=True)
    assert found.endswith("2000 legs with KV params")
    (found,) = problems([row(OURS, 0, 80, **one_leg | {"n": 999})], limit_s=20, plain=True)
    assert found.endswith("1000 legs for 999 requests")


def test_added_latency_is_over_the_direct_run_of_the_same_round() -> None:
    figures = [
        OpenFigures("ns-s-64", router, number, 900, base + p50, 10 * base + p99, 0.1, rss, None)
        for number, base in enumerate((1.0, 5.0, 2.0))
        for router, p50, p99, rss in (("direct", 0.0, 0.0, 0.0), (OURS, 0.5, 2.0, 60.0), ("vr-pd-rr", 0.25, 4.0, 90.0))
    ]
    (result,) = compare_open(figures, "vr-pd-rr")
    assert (result.ours_added_p50_ms.median, result.peer_added_p50_ms.median) == (0.5, 0.25)
    assert (result.ours_added_p99_ms.median, result.peer_added_p99_ms.median) == (2.0, 4.0)
    assert (result.p99_difference_ms.median, result.p99_ratio) == (-2.0, 0.5)
    assert (result.ours_rss_mb, result.peer_rss_mb) == (60.0, 90.0)
