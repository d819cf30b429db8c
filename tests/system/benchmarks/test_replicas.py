"""Tests that proxies that share nothing route better by what engines report than without, in the simulation."""

from benchmarks.replay.generated import generate
from benchmarks.replay.model import replay
from benchmarks.replay.parts import speed_for
from benchmarks.replay.replicas import Replicas, Sharing
from benchmarks.replay.world import World


def mean_s(kind: str, count: int, sharing: Sharing, requests: int = 400) -> float:
    """The mean time to first token of a short trace."""
    trace, world = generate(kind, requests), World(4000)
    return replay(trace, speed_for(trace, world, 0.95), world, Replicas(world, count, sharing)).mean_s


def test_queue_depths_bring_most_of_what_one_proxy_has() -> None:
    one = mean_s("uniform", 1, "nothing")
    assert mean_s("uniform", 4, "queue depths") < 1.4 * one
    assert mean_s("uniform", 4, "nothing") > 1.6 * one  # the control


def test_proxies_that_agree_on_engines_have_most_of_the_hits() -> None:
    one = mean_s("agents", 1, "nothing", 1500)
    assert mean_s("agents", 8, "queue depths", 1500) < 3.0 * one  # 7.4 where they do not agree
    assert mean_s("agents", 8, "nothing", 1500) > 7.0 * one  # the control


def test_kv_events_bring_the_hits_as_well() -> None:
    one = mean_s("agents", 1, "nothing")
    assert mean_s("agents", 4, "queue depths and KV events") < 1.4 * one
    assert mean_s("agents", 4, "queue depths") > 1.6 * one  # the control: some hits are missing
