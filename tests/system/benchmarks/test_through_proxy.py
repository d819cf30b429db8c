"""Tests the trace through the real proxy: every answer comes, and the engines' cache hits equal the model's."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.replay.__main__ import SAMPLE
from benchmarks.replay.parts import speed_for
from benchmarks.replay.through_proxy import Found, modelled, through_proxy
from benchmarks.replay.trace import BLOCK, load
from benchmarks.replay.world import World

pytestmark = pytest.mark.slow

_FASTER = 20.0


def test_what_is_found_in_caches_is_what_the_model_says_and_nothing_is_sooner_than_it_can_be(tmp_path: Path) -> None:
    """Round robin goes where it went in the model, so its caches are the same; a busy machine only makes it later."""
    trace = [each._replace(tokens=len(each.blocks) * BLOCK) for each in load(SAMPLE)[:150]]
    world = World(1000, workers=4)
    speed = speed_for(trace, world, 0.7)
    found: dict[str, Found] = {}
    for policy in ("round_robin", "cache_aware"):
        found[policy] = asyncio.run(through_proxy(trace, speed, world, policy, _FASTER, tmp_path))
    said = modelled(trace, speed, world, "round_robin")
    assert found["round_robin"].reused == pytest.approx(said.reused, abs=0.01)
    assert found["round_robin"].mean_s > 0.95 * said.mean_s
    assert found["cache_aware"].reused > said.reused + 0.01
