"""Tests the bar of routing by LoRA adapter: 20 adapters, 4 engines with room for 6, the policies as they are."""

import pytest

from benchmarks.lora_bench import main
from benchmarks.replay.adapters import ADAPTERS, ROUTERS, AdapterRun, OneWorkerPerAdapter, adapter_trace, run_adapters
from benchmarks.replay.model import replay
from benchmarks.replay.peers import RoundRobin
from benchmarks.replay.trace import Request
from benchmarks.replay.world import World

PROXIES = [name for name in ROUTERS if "prox" in name]
MODELS = [name for name in ROUTERS if name not in PROXIES]


def runs(
    *, shared_prompts: bool, load: float, load_s: float, seed: int = 1, routers: list[str] = MODELS
) -> dict[str, AdapterRun]:
    found = run_adapters(
        shared_prompts=shared_prompts, load=load, load_s=load_s, number=1500, seed=seed, routers=routers
    )
    return {run.router: run for run in found}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("load", [0.5, 0.85])
@pytest.mark.parametrize("shared_prompts", [True, False])
def test_half_the_loads_at_most_and_no_later_first_token(shared_prompts: bool, load: float, seed: int) -> None:
    found = runs(shared_prompts=shared_prompts, load=load, load_s=0.5, seed=seed)
    aware, blind = found["cache_aware"], found["cache_aware, blind"]
    assert blind.loads > 300  # the control: there is something to save
    assert aware.loads <= 0.5 * blind.loads
    assert aware.mean_s <= blind.mean_s
    assert aware.p99_s <= blind.p99_s
    pinned = found["one worker per adapter"]
    assert pinned.loads == ADAPTERS
    assert aware.mean_s < 0.2 * pinned.mean_s  # it never spills
    assert aware.busiest < 0.35 < pinned.busiest
    assert found["least_load"].loads < found["least_load, blind"].loads
    assert found["least_load"].mean_s <= found["least_load, blind"].mean_s


@pytest.mark.parametrize("load_s", [0.1, 1.5])
def test_the_bar_holds_where_the_first_guess_is_wrong(load_s: float) -> None:
    """The policy expects 0.5 s until it has learnt better."""
    found = runs(shared_prompts=False, load=0.7, load_s=load_s)
    aware, blind = found["cache_aware"], found["cache_aware, blind"]
    assert aware.loads <= 0.5 * blind.loads
    assert aware.mean_s <= blind.mean_s
    assert aware.p99_s <= blind.p99_s


def test_the_bar_holds_with_one_proxy_and_with_several_that_tell_each_other() -> None:
    """Real fleets. Proxies that tell each other nothing are the control."""
    found = runs(shared_prompts=True, load=0.5, load_s=0.5, routers=["cache_aware, blind", *PROXIES])
    blind, apart = found["cache_aware, blind"], found["4 proxies, apart"]
    for name in ("the proxy", "4 proxies"):
        assert found[name].loads <= 0.2 * blind.loads
        assert found[name].mean_s <= blind.mean_s
        assert found[name].p99_s <= blind.p99_s
    assert apart.loads > 5 * found["4 proxies"].loads


def test_a_worker_loads_what_is_in_none_of_its_slots() -> None:
    world = World(100, workers=1, adapter_slots=2, adapter_load_s=3.0)
    asked = [1, 2, 1, 3, 2, 0, 2]
    trace = [Request(100.0 * at, 512, 1, [1], at, adapter) for at, adapter in enumerate(asked)]
    outcome = replay(trace, 1.0, world, RoundRobin(world))
    assert outcome.adapter_loads == 4
    slow = [seconds > 3.0 for seconds in outcome.ttft_s]
    assert slow == [True, True, False, True, True, False, False]


def test_one_worker_for_each_adapter_whatever_its_load() -> None:
    world = World(100, workers=4)
    router = OneWorkerPerAdapter(world)
    trace = adapter_trace(300, shared_prompts=False)
    outcome = replay(trace, 1.0, world, router)
    assert len({request.adapter for request in trace}) == outcome.adapter_loads == ADAPTERS


def test_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--requests", "60", "--load", "0.5", "--load-seconds", "0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * 8
    assert lines[0].count("|") == lines[-1].count("|")
