"""Tests what a proxy does with the hashes of prompts: they choose engines, and stay in the proxy."""

import json
import random

import numpy as np
import pytest

from kvparams.index.block_hashes import BlockHasher, BlockHashes, TokenSource
from kvparams_proxy.fleet import prefix_cache_model
from tests.support.proxy.acting import document
from tests.support.proxy.stage import StartStage

BLOCK = prefix_cache_model.BLOCK_TOKENS
PROMPTS = [[seed * 1_000 + number for number in range(10 * BLOCK)] for seed in range(1, 5)]
"""Of one length, with no block in common."""


class ObservedHasher(BlockHasher):
    """A `BlockHasher` that remembers its seeds and hashes; with `collides` all prompts of one length hash alike."""

    __slots__ = ()
    seeds: list[int]
    told: set[int]
    collides = False

    def __init__(self, seed: int, block_size: int) -> None:
        self.seeds.append(seed)
        super().__init__(seed, block_size)

    def hashes(self, tokens: TokenSource, namespace: int, start: int = 0, parent: int = 0) -> BlockHashes:
        found = super().hashes(tokens, namespace, start, parent)
        if self.collides:
            found = np.arange(start + 1, start + 1 + len(found), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self.told.update(found.tolist())
        return found


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> type[ObservedHasher]:
    monkeypatch.setattr(prefix_cache_model, "BlockHasher", ObservedHasher)
    ObservedHasher.seeds, ObservedHasher.told, ObservedHasher.collides = [], set(), False
    return ObservedHasher


@pytest.mark.parametrize("collides", [True, False])
async def test_prompts_that_hash_alike_are_computed_as_they_are(
    stage: StartStage, observed: type[ObservedHasher], collides: bool
) -> None:
    """Spec-mandated, 1.0#16.4: all that reaches an engine is of the client's own prompt; the control hashes well."""
    observed.collides = collides
    found = await stage("store", policy="cache_aware")
    decisions: list[str] = []
    for prompt in PROMPTS:
        answer = await found.ask(prompt=prompt)
        assert answer.status_code == 200
        decisions.append(answer.headers["x-kvparams-decision"])
        legs = [actor.bodies.pop() for actor in (*found.prefill, *found.decode) if actor.bodies]
        assert [json.loads(leg)["prompt"] for leg in legs] == [prompt, prompt]
        prefixes = [document(leg).prefix for leg in legs]
        assert all(prefix is not None and prefix.covers(prompt) for prefix in prefixes)
    assert len(observed.told) == (10 if collides else 10 * len(PROMPTS))
    believed = [decision for decision in decisions if f" {9 * BLOCK} of {10 * BLOCK} tokens cached" in decision]
    assert bool(believed) is collides  # that an engine had a prompt, which none had seen


async def test_a_seed_is_secret_and_random_and_no_client_is_told_hashes(
    stage: StartStage, observed: type[ObservedHasher]
) -> None:
    """Spec-mandated, 1.0#16.5: nobody who knows the state of Python's generator knows the seed."""
    for _ in range(2):
        random.seed(1)
        found = await stage("store", policy="cache_aware")
        answers = [await found.ask(prompt=prompt, stream=stream) for prompt in PROMPTS for stream in (False, True)]
        answers += [await found.ask(prompt=prompt, max_tokens="none") for prompt in PROMPTS[:1]]
        answers.append(await found.running.client.get("/v1/models"))
        assert {answer.status_code for answer in answers} == {200, 400}
        said = "".join(f"{answer.headers}{answer.text}" for answer in answers)
        assert "tokens cached" in said  # the decision, which is in a header
        secrets = {observed.seeds[-1], *observed.told}
        assert len(secrets) > 10 * len(PROMPTS)
        assert [one for one in secrets if str(one) in said or f"{one:016x}" in said.lower()] == []
    assert len(set(observed.seeds)) == len(observed.seeds) == 2
