"""Tests that the proxy models each stock vLLM engine's cache as the engine's own prefix-cache hits show it.

Requests go to the engines directly, so KV events are the proxy's only source.
"""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from demo.client import NO_CERTIFICATES
from tests.interop.vllm.engines import ANSWER_S, PATIENCE_S, counters, until
from tests.interop.vllm.heard import BLOCK, LOOK_S, Kind, Site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]

KINDS: Final = {
    "small": Kind(32, 8 << 20, 10_000),
    "large": Kind(
        128,
        16 << 20,
        2,
        ("--prefix-caching-hash-algo", "sha256_cbor"),
        {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"},
    ),
}
"""Blocks below and above the proxy's, called by numbers and by bytes."""


@pytest.fixture(scope="module")
def site(model: Path) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder, Site(Path(folder), model, KINDS) as site:
        yield site


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Prompts that no other test has."""
    return random.Random(request.node.name)


def ids(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(300, 2000) for _ in range(count)]


@pytest.mark.parametrize("name", KINDS)
def test_what_is_believed_is_what_the_engine_has(site: Site, chance: random.Random, name: str) -> None:
    """New prompts, old ones, and old ones that go on, in a cache that gives them up again."""
    unit = max(BLOCK, KINDS[name].block_size)
    before = counters(site.engines[name])["vllm:prefix_cache_hits_total"]
    asked: list[list[int]] = []
    once: set[int] = set()
    hits = given_up = gone_on = 0
    for number in range(40):
        if asked and number % 4:
            begun = chance.choice(asked)
            prompt = begun[: chance.randrange(1, len(begun) + 1)] + ids(chance, chance.randrange(1, 300))
        else:
            prompt = ids(chance, chance.randrange(100, 900))
        site.settle(name)
        believed, found = site.has(name, prompt), site.ask(name, prompt)
        assert believed // unit == found // unit, (number, len(prompt))
        hits += found
        gone_on += found > 0
        given_up += found == 0 and prompt[0] in once
        once.add(prompt[0])
        asked.append(prompt)
    assert min(gone_on, given_up) > 3
    assert counters(site.engines[name])["vllm:prefix_cache_hits_total"] - before == hits
    assert site.metric("refused", name) == site.metric("gaps", name) == 0


def test_a_cache_that_is_reset_is_believed_to_be_empty(site: Site, chance: random.Random) -> None:
    prompt = ids(chance, 300)
    for name in KINDS:
        site.ask(name, prompt)
        site.settle(name)
    assert site.believed({"prompt": prompt})["cached"] == {"small": 256, "large": 256}
    url = f"{site.engines['small'].url}/reset_prefix_cache"
    httpx.post(url, timeout=PATIENCE_S, verify=NO_CERTIFICATES).raise_for_status()
    site.settle("small")
    assert site.believed({"prompt": prompt})["cached"] == {"small": 0, "large": 256}
    assert site.ask("small", prompt) == 0


def test_what_was_lost_on_the_way_is_asked_for_again(site: Site, chance: random.Random) -> None:
    line, prompts = site.lines["small"], [ids(chance, 300) for _ in range(3)]
    site.settle("small")
    line.cut()
    for prompt in prompts:
        lost = line.lost
        site.ask("small", prompt)
        until(lambda lost=lost: line.lost > lost, pause_s=LOOK_S)
    assert [site.has("small", prompt) for prompt in prompts] == [0, 0, 0]
    line.mend()
    site.settle("small")
    assert [site.has("small", prompt) for prompt in prompts] == [256, 256, 256]
    assert [site.ask("small", prompt) for prompt in prompts] == [288, 288, 288]
    assert site.metric("gaps", "small") == 0


def test_what_the_engine_can_say_no_more_is_not_believed(site: Site, chance: random.Random) -> None:
    """It keeps two batches for those who ask; more are lost. What was known before may be gone, and is forgotten."""
    line, prompts = site.lines["large"], [ids(chance, 300) for _ in range(5)]
    site.ask("large", prompts[0])
    site.settle("large")
    assert site.has("large", prompts[0]) == 256
    line.cut()
    for prompt in prompts[1:]:
        lost = line.lost
        site.ask("large", prompt)
        until(lambda lost=lost: line.lost > lost, pause_s=LOOK_S)
    line.mend()
    site.settle("large")
    assert site.metric("gaps", "large") == 1
    assert site.has("large", prompts[0]) == site.has("large", prompts[1]) == 0
    for prompt in prompts:  # it has more than is believed, never less
        assert site.has("large", prompt) <= site.ask("large", prompt) == 256
    again = ids(chance, 300)
    site.ask("large", again)
    site.settle("large")
    assert site.has("large", again) == 256


CHAT: Final[list[dict[str, Any]]] = [
    {"role": "system", "content": "You keep the accounts of a key value store. " * 8},
    {"role": "user", "content": "What is a lease? \U0001f600\n" * 12},
    {"role": "assistant", "content": "A promise that ends by itself. " * 12},
    {"role": "user", "content": "And who may take it back?"},
]
TEXT: Final = "What is a lease, and who may take it back? e\u0301 \u2764\ufe0f\n" * 20


@pytest.mark.parametrize(
    ("path", "prompt", "another"),
    [
        ("/v1/completions", {"prompt": TEXT}, {"prompt": f"!{TEXT}"}),
        ("/v1/chat/completions", {"messages": CHAT}, {"messages": CHAT[1:]}),
    ],
    ids=["text", "chat"],
)
def test_words_have_the_token_ids_here_that_they_have_there(
    site: Site, path: str, prompt: dict[str, Any], another: dict[str, Any]
) -> None:
    """What the engine said of its own ids is found by the proxy's, to the last block; another text is not."""
    body = {"model": "tiny", "max_tokens": 1, "return_token_ids": True, **prompt}
    answer = httpx.post(site.engines["small"].url + path, json=body, timeout=ANSWER_S, verify=NO_CERTIFICATES)
    answer.raise_for_status()
    tokens = answer.json()["usage"]["prompt_tokens"]
    site.settle("small")
    route = site.believed(prompt, path)
    assert (route["tokens"], route["ids"]) == (tokens, "tokenizer")
    assert route["cached"]["small"] == (tokens - 1) // BLOCK * BLOCK >= 4 * BLOCK
    assert site.believed(another, path)["cached"]["small"] == 0


def test_an_engine_that_was_started_anew_has_nothing(site: Site, chance: random.Random) -> None:
    """And what it says then is heard. Of the other one everything is believed as before."""
    prompt = ids(chance, 300)
    for name in KINDS:
        site.ask(name, prompt)
        site.settle(name)
    assert site.believed({"prompt": prompt})["cached"] == {"small": 256, "large": 256}
    site.restart("small")
    site.settle("small")
    assert site.believed({"prompt": prompt})["cached"] == {"small": 0, "large": 256}
    assert site.ask("small", prompt) == 0
    site.settle("small")
    assert site.believed({"prompt": prompt})["cached"] == {"small": 256, "large": 256}
    assert site.metric("refused", "small") == 0
