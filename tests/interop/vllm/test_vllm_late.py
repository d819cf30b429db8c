"""Tests that an engine keeps the blocks of a save until the copy ends; a control shows the damage without it."""

import json
import random
from pathlib import Path

import pytest

from demo.processes import Processes, Server
from tests.interop.vllm.engines import READY_S, counters, start_engine, transfer_config
from tests.interop.vllm.traffic import Ask, answers

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]

_LATE_S = 3.0


def _late(store: str) -> str:
    told = json.loads(transfer_config(store))
    return json.dumps(told | {"kv_connector": "LateConnector", "kv_connector_module_path": "tests.interop.vllm.late"})


def _again(server: Server, asks: list[Ask]) -> tuple[list[str], list[str], dict[str, float]]:
    """What is answered first, and what from stored pages; what was counted."""
    first = answers(server.url, asks)[:-1]  # the last one is there so that the one before it is copied
    return first, answers(server.url, asks[:-1]), counters(server)


def test_blocks_are_kept_until_a_save_is_copied(model: Path, shared_memory: Path, tmp_path: Path) -> None:
    chance = random.Random(12)
    asks = [Ask([chance.randrange(300, 2000) for _ in range(300)]) for _ in range(13)]
    root = str(Path(__file__).parents[3])
    with Processes(tmp_path) as processes:
        engines = [
            start_engine(
                processes,
                f"held-{held}",
                model,
                *("--no-enable-prefix-caching", "--max-model-len", "1024"),
                transfer=_late(f"file://{shared_memory}/{held}?size=64MiB"),
                core=core,
                cache_bytes=3 << 20,  # 48 blocks of 32 tokens: the next request has the blocks of the last one
                environment={"KVPARAMS_LATE_S": str(_LATE_S), "KVPARAMS_LATE_HELD": held, "PYTHONPATH": root},
            )
            for core, held in enumerate(("yes", "no"))
        ]
        processes.wait_ready(*engines, within_s=READY_S)
        first, second, seen = _again(engines[0], asks)
        assert second == first
        assert seen["vllm:kvparams_tokens_loaded_total"] == 12 * 256
        assert seen["vllm:kvparams_saves_late_total"] == 0
        first, second, seen = _again(engines[1], asks)
        assert seen["vllm:kvparams_tokens_loaded_total"] > 0
        assert second != first  # wrong pages under right keys
