"""Tests which figures the table of offload and peer-to-peer compares."""

from dataclasses import replace

import pytest

from benchmarks.offload_or_peer import KINDS, Row, summed, table


def row(number: int, tokens: int, ttft_s: float, *, cpu_s: float = 0.01, loaded: float = 1e6) -> Row:
    return Row(number, tokens, "first", ttft_s, 0.0, cpu_s, 0.0, 1e6, loaded)


BASE = [row(number, tokens, tokens / 1000 + number / 10) for number in range(5) for tokens in (100, 300)]


def test_each_request_is_compared_with_the_same_one_of_the_first_way() -> None:
    ours = [replace(one, ttft_s=2 * one.ttft_s, cpu_engines_s=3 * one.cpu_engines_s) for one in reversed(BASE)]
    line = summed(ours, BASE, peer=False)
    assert (line.requests, line.ttft_ratio.low, line.ttft_ratio.high) == (10, pytest.approx(2), pytest.approx(2))
    assert (line.cpu_ratio.low, line.cpu_ratio.high) == (pytest.approx(3), pytest.approx(3))
    assert line.engines_ms == pytest.approx(30)


def test_by_way_of_a_store_bytes_move_twice() -> None:
    assert summed(BASE, BASE, peer=False).moved_mb == pytest.approx(20)
    assert summed(BASE, BASE, peer=True).moved_mb == pytest.approx(10)


def test_other_requests_are_not_compared() -> None:
    with pytest.raises(ValueError, match="not the same requests"):
        summed(BASE[1:], BASE, peer=False)


def test_processor_time_of_a_request_too_short_to_be_counted_spoils_nothing() -> None:
    base = [replace(one, cpu_engines_s=0.0) if one.round else one for one in BASE]
    assert summed(BASE, base, peer=False).cpu_ratio.median == pytest.approx(1)


def test_every_kind_has_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [replace(one, kind=kind) for one in BASE for kind in KINDS]
    table({"valkey": rows, "peer-tcp": rows})
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said if "p99" in line] == list(KINDS)
    assert sum(line.startswith("peer-tcp") for line in said) == len(KINDS)
