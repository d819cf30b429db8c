"""Tests the table and the plot of the proxy benchmark."""

from pathlib import Path

from benchmarks.proxy_plot import write_plot
from benchmarks.proxy_report import ClosedRow, OpenRow, Results, table


def opened(subject: str, p50_ms: float, p99_ms: float) -> OpenRow:
    return OpenRow("ns-s-64", subject, 500, p50_ms, p99_ms, p50_ms, p99_ms, 0.1)


def two_rounds() -> Results:
    """The second round met twice the noise; the proxy costs three floors in both."""
    results = Results()
    for noise in (1.0, 2.0):
        results.closed += [
            ClosedRow("ns-s-64", "direct", None, None, 9000),
            ClosedRow("ns-s-64", "floor", 50 * noise, 27, 4000),
            ClosedRow("ns-s-64", "proxy", 150 * noise, 60, 2000),
        ]
        results.open += [
            opened("direct", 1 * noise, 10 * noise),
            opened("floor", 1 * noise + 0.5, 10 * noise + 1),
            opened("proxy", 1 * noise + 1.5, 10 * noise + 3),
        ]
    return results


def test_ratios_and_differences_are_taken_within_a_round_so_that_noise_common_to_it_falls_out() -> None:
    floor, proxy = two_rounds().summary()
    assert (floor.subject, floor.of_floor.median) == ("floor", 1.0)
    assert (proxy.of_floor.low, proxy.of_floor.median, proxy.of_floor.high) == (3.0, 3.0, 3.0)
    assert (proxy.added_p50_ms, proxy.added_p99_ms) == (1.5, 3.0)
    assert (proxy.cpu_us, proxy.rss_mb, proxy.capacity_per_s) == (225.0, 60, 2000)


def test_the_table_has_a_row_for_the_floor_and_one_for_the_proxy() -> None:
    lines = table(two_rounds().summary()).splitlines()
    assert len(lines) == 4
    assert "| ns-s-64 | proxy | 225 | 3.00 [3.00, 3.00] |" in lines[3]


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    write_plot(two_rounds().summary(), tmp_path / "proxy.png")
    assert (tmp_path / "proxy.png").read_bytes().startswith(b"\x89PNG")
