"""Tests a model with windows under tensor parallelism, in bfloat16, and as a child of MultiConnector."""

import random
from pathlib import Path
from typing import Any, Final

import pytest

from demo.processes import Processes, Server
from kvparams_connectors.store import open_store
from tests.interop.vllm.damage import flip
from tests.interop.vllm.engines import (
    READY_S,
    by_its_name,
    child,
    complete,
    counters,
    multi,
    one_and_two,
    start_engine,
    transfer_config,
)
from tests.interop.vllm.legs import decode, prefill, tokens_of
from tests.interop.vllm.version import is_earlier

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extended,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(is_earlier(), reason="refused in words there"),
]

_PAGE: Final = 64
_LENGTHS: Final = (65, 129, 193, 300, 641)
_HITS: Final = "vllm:external_prefix_cache_hits_total"
_REFUSED: Final = "vllm:kvparams_pages_refused_total{reason=flipped_payload}"


def _prompts(seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(300, 2000) for _ in range(length)] for length in _LENGTHS]


def _handed_over(source: Server, target: Server, prompts: list[list[int]]) -> list[list[int]]:
    """The answers of `target`, which computes one token of each prompt."""
    before = counters(target)[_HITS]
    found = [prefill(source.url, prompt) for prompt in prompts]
    ids = [tokens_of(decode(target.url, prompt, one)) for prompt, one in zip(prompts, found, strict=True)]
    assert counters(target)[_HITS] - before == sum(map(len, prompts)) - len(prompts)
    return ids


def _alone(server: Server, prompt: list[int], **told: object) -> list[int]:
    answer: dict[str, Any] = complete(server.url, prompt, 12, return_token_ids=True, **told)
    return answer["choices"][0]["token_ids"]


def test_two_ranks_and_one_hand_over_to_each_other(hybrid: Path, shared_memory: Path, tmp_path: Path) -> None:
    url = f"file://{shared_memory}/kv?size=256MiB"
    transfer = transfer_config(url, extra={"tensor_parallel_sizes": [1, 2], "page_tokens": _PAGE})
    with Processes(tmp_path) as processes:
        one, two = one_and_two(processes, hybrid, transfer)
        for number, (source, target) in enumerate(((one, two), (two, one))):
            prompts = _prompts(number)
            right = [_alone(source, prompt, cache_salt=f"right {number}") for prompt in prompts]
            assert _handed_over(source, target, prompts) == right
        _half_a_page_is_damaged(one, two, url)


def _half_a_page_is_damaged(one: Server, two: Server, url: str) -> None:
    """What one rank has to refuse, neither uses, of whichever group it is."""
    store = open_store(url)
    try:
        prompt = _prompts(7)[-1]
        right = _alone(one, prompt, cache_salt="right")
        found = prefill(one.url, prompt)
        for key in random.Random(8).sample(found["load_keys"], 4):
            before = counters(two).get(_REFUSED, 0)
            flip(store, key)
            assert tokens_of(decode(two.url, prompt, found)) == right
            assert counters(two)[_REFUSED] == before + 1
            prefill(one.url, prompt)  # what was refused has gone, and is stored anew
    finally:
        store.close()


def test_children_of_multi_connector_in_bfloat16(hybrid: Path, shared_memory: Path, tmp_path: Path) -> None:
    """Of two of ours one answers with the document: with two answers vLLM's engine ends. As right is
    taken what an engine answers that finds the same tokens in its own cache."""
    ours, other = (
        child(f"file://{shared_memory}/{name}?size=256MiB", {"page_tokens": _PAGE}) for name in ("kv", "copy")
    )
    environment = by_its_name(tmp_path)
    with Processes(tmp_path) as processes:
        writer, reader = (
            start_engine(
                processes,
                name,
                hybrid,
                transfer=multi(*children),
                environment=environment,
                core=core,
                dtype="bfloat16",
            )
            for core, (name, children) in enumerate({"writer": [ours], "reader": [ours, other]}.items())
        )
        processes.wait_ready(writer, reader, within_s=READY_S)
        prompts = _prompts(9)
        assert _handed_over(writer, reader, prompts) == [_alone(writer, prompt) for prompt in prompts]
