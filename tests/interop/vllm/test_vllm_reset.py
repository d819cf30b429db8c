"""Tests that an engine whose weights change while it runs loads no KV of the old ones; a control shows the damage."""

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.processes import Processes, Server
from tests.interop.vllm.engines import (
    ANSWER_S,
    PATIENCE_S,
    READY_S,
    complete,
    counters,
    start_engine,
    transfer_config,
    until,
    wait_saved,
)

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(1800)]


def _answers(server: Server, prompts: Sequence[Sequence[int]], salt: str | None = None) -> list[list[int]]:
    told: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
    return [
        complete(server.url, prompt, return_token_ids=True, **told)["choices"][0]["token_ids"] for prompt in prompts
    ]


def _other_weights(server: Server, folder: Path, *, told: bool) -> None:
    """As one does it over vLLM's own endpoints; `told`: the connector is told of the reset."""
    order = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    assert httpx.post(f"{server.url}/collective_rpc", json=order, timeout=ANSWER_S).status_code == 200
    query = {"reset_external": "true"} if told else {}
    # It fails while blocks are held that are still to be copied.
    until(lambda: httpx.post(f"{server.url}/reset_prefix_cache", params=query, timeout=PATIENCE_S).json()["success"])


def test_kv_of_other_weights_is_not_used(
    model: Path, make_tiny: Callable[..., Path], shared_memory: Path, tmp_path: Path
) -> None:
    chance = random.Random(14)
    prompts = [[chance.randrange(300, 2000) for _ in range(size)] for size in (129, 300, 513)]
    stored, pages = 128 + 256 + 512, 1 + 2 + 4
    before: list[list[int]] = []
    with Processes(tmp_path) as processes:
        told, untold, keeping = engines = [
            start_engine(
                processes,
                name,
                model,
                "--no-enable-prefix-caching",
                transfer=transfer_config(f"file://{shared_memory}/{name}?size=64MiB", extra=extra),
                environment={"VLLM_SERVER_DEV_MODE": "1"},
                core=core,
            )
            for core, (name, extra) in enumerate({"told": {}, "untold": {}, "keeping": {"keep_on_reset": True}}.items())
        ]
        processes.wait_ready(*engines, within_s=READY_S)
        for engine in engines:
            before = _answers(engine, prompts)
            wait_saved(engine, pages)
            assert _answers(engine, prompts) == before
            assert counters(engine)["vllm:kvparams_tokens_loaded_total"] == stored
            _other_weights(engine, make_tiny(1), told=engine is told)
        right = _answers(keeping, prompts, salt="never stored")
        assert right != before
        for engine in (told, untold):
            assert _answers(engine, prompts) == right
            seen = counters(engine)
            assert seen["vllm:kvparams_tokens_loaded_total"] == stored
            assert seen["vllm:kvparams_resets_total"] == 1
            wait_saved(engine, 2 * pages)
            assert _answers(engine, prompts) == right
            assert counters(engine)["vllm:kvparams_tokens_loaded_total"] == 2 * stored  # of the new weights
        assert _answers(keeping, prompts) != right  # told that weights never change, it believes what is stored
        for engine in (told, untold):  # it is in vLLM's own log
            (line,) = (line for line in engine.log.read_text().splitlines() if "vLLM has reset its caches" in line)
            assert re.match(
                r"\(EngineCore pid=\d+\) WARNING .* \[scheduler_connector.py:\d+\] vLLM", line
            )  # in vLLM's own log
