"""Tests the trace through the real proxy and reference engines: the engines' counts add up and equal the model's."""

from pathlib import Path
from random import Random

import pytest

from benchmarks.replay.__main__ import SAMPLE
from benchmarks.replay.engines_report import Part, Said, lines, table, write_plot
from benchmarks.replay.parts import speed_for
from benchmarks.replay.scaled import TOKENS, Scale, scaled
from benchmarks.replay.through_engines import measure, modelled
from benchmarks.replay.trace import Request, load


@pytest.mark.slow
@pytest.mark.timeout(400)  # ten processes, eight of which import torch
def test_engines_find_what_the_model_says_and_nothing_is_sooner_than_it_can_be(tmp_path: Path) -> None:
    """Round robin goes where it went in the model, so its caches are the same; a busy machine only makes it later."""
    policies = ["round_robin", "cache_aware"]
    trace, scale = scaled(load(SAMPLE)[:120]), Scale(2, 1, 1000, 4000, "peer")
    speed = speed_for(trace, scale.world, 0.7)
    parts = list(measure(trace, speed, scale, policies, tmp_path, part=60))
    assert sorted((each.number, each.policy) for each in parts) == [(at, p) for at in (0, 1) for p in sorted(policies)]
    for each in parts:
        assert len(each.ttft_s) == 60
        computed = each.asked - each.local - each.fetched
        assert sum(each.ttft_s) > computed / scale.tokens_per_s
        assert each.again < 0.01 * each.asked  # decode fetched what prefill had computed
    robin, aware = lines(parts, policies)
    assert robin.whole.asked == aware.whole.asked == TOKENS * sum(len(one.blocks) for one in trace)
    said = modelled(trace, speed, scale, "round_robin", part=60)
    reused = [(one.whole.local + one.whole.fetched) / one.whole.asked for one in (robin, aware)]
    assert reused[0] == pytest.approx(said.reused, abs=0.02)
    assert reused[1] > reused[0] + 0.03


def _part(policy: str, number: int, factor: float, asked: float = 1000.0) -> Part:
    seconds = [factor * Random(f"{number} {at}").random() for at in range(100)]
    return Part(policy, number, seconds, asked, 0.25 * asked, 0.0, 0.0)


def test_ratios_are_beside_the_first_policy_within_parts(tmp_path: Path) -> None:
    """Whatever order they were measured in."""
    parts = [_part("b", 1, 3.0), _part("a", 0, 2.0), _part("a", 1, 6.0), _part("b", 0, 1.0)]
    first, second = lines(parts, ["a", "b"])
    assert (first.mean, first.p99) == (1.0, 1.0)
    assert second.mean == pytest.approx(0.5)
    assert second.p99 == pytest.approx(0.5)
    assert second.mean_of_parts.median == pytest.approx(0.5)
    assert second.whole.local == 500.0
    said = [Said("a", 2.0, 3.0, 0.1), Said("b", 1.5, 3.0, 0.2)]
    assert "| 25.0% | 0.0% |" in table(parts, said)
    assert table(parts, said).splitlines()[-1].endswith("| 20.0% | 0.750 | 1.000 |")
    write_plot(parts, ["a", "b"], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="b did not get the same parts"):
        lines([*parts[:3], _part("b", 0, 1.0, 999.0)], ["a", "b"])


def test_prompts_that_engines_cannot_take_are_refused() -> None:
    fits = Request(0.0, 1, 1, range(255), 0)
    assert scaled([fits])[0].tokens == 255 * 512
    with pytest.raises(ValueError, match="256 blocks"):
        scaled([fits, fits._replace(blocks=range(256))])
