"""Tests prefill and decode in two processes, driven as a proxy would: what travels, and what happens if not."""

import asyncio
import random
import uuid
from contextlib import suppress
from pathlib import Path
from typing import cast

import httpx
import pytest

from demo.client import JSON, AnswerError, Reply, ask, scrape
from demo.damage import flip_stored_byte
from demo.processes import Processes
from kvparams import codec
from kvparams.params import KVTransferParams
from tests.support.waiting import until

PATH = "/v1/completions"
COMPUTED = 'reference_engine:prompt_tokens_total{source="computed"}'
LOADED = "reference_engine:kv_bytes_loaded_total"
PAGE_TOKENS = 64
WAIT_S = 20.0


def document(phase: str, **more: object) -> JSON:
    transfer = {"id": uuid.uuid4().hex, "attempt": 1}
    said = {"version": "1.0", "request_id": uuid.uuid4().hex, "transfer": transfer, "phase": phase, "mode": "store"}
    return {"kvparams": {**said, **more}}


def random_prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(length)]


async def prefill_leg(client: httpx.AsyncClient, url: str, body: JSON, **more: object) -> KVTransferParams:
    """What the prefill engine answers."""
    asked = {**body, "max_tokens": 1, "kv_transfer_params": document("prefill", **more)}
    reply = await ask(client, url, PATH, asked)
    found = codec.read_request(reply.kv_transfer_params)
    assert found is not None
    return found


async def decode_leg(client: httpx.AsyncClient, url: str, body: JSON, **more: object) -> Reply:
    return await ask(client, url, PATH, {**body, "kv_transfer_params": document("decode", **more)})


async def grown(client: httpx.AsyncClient, url: str, name: str, before: dict[str, float]) -> float:
    return (await scrape(client, url)).get(name, 0) - before.get(name, 0)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 66, 128, 129, 700])
async def test_decode_computes_one_prompt_token_and_says_what_one_engine_says(
    client: httpx.AsyncClient, prefill: str, decode: str, single: str, length: int
) -> None:
    body: JSON = {"prompt": random_prompt(length, length), "max_tokens": 20, "temperature": 0.8, "seed": 3}
    result = await prefill_leg(client, prefill, body)
    before = await scrape(client, decode)

    reply = await decode_leg(client, decode, body, load_keys=result.load_keys)

    assert reply.outcome == (await ask(client, single, PATH, body)).outcome
    assert await grown(client, decode, COMPUTED, before) == 1
    assert reply.count("cached_tokens") == length - 1
    assert (await grown(client, decode, LOADED, before) > 0) == (length > 1)


async def test_the_prefill_answer_says_where_the_kv_is_and_whose_it_is(client: httpx.AsyncClient, prefill: str) -> None:
    prompt = random_prompt(1_000, 150)
    result = await prefill_leg(client, prefill, {"prompt": prompt})
    health = (await client.get(f"{prefill}/health")).json()

    assert result.phase == "prefill_result"
    assert result.load_keys is not None
    assert len(result.load_keys) == 3
    assert result.producer is not None
    assert (result.producer.id, result.producer.incarnation) == ("p0", health["incarnation"])
    assert result.prefix is not None
    assert result.prefix.covers(prompt)
    assert result.lease is not None
    assert result.usage is not None
    assert (result.usage.prompt_tokens, result.usage.cached_tokens, result.usage.computed_tokens) == (150, 0, 150)


async def test_prefill_uses_what_is_stored_and_says_so(client: httpx.AsyncClient, prefill: str, both: str) -> None:
    """The second engine never saw the first prompt: what it did not compute came through the store."""
    prompt = random_prompt(1_001, 200)
    await prefill_leg(client, prefill, {"prompt": prompt})

    result = await prefill_leg(client, both, {"prompt": [*prompt[:190], *random_prompt(1, 50)]})

    assert result.usage is not None
    assert result.usage.loaded_tokens == 2 * PAGE_TOKENS
    assert result.usage.cached_tokens == 2 * PAGE_TOKENS
    assert len(result.load_keys or ()) == 4


async def test_the_next_turn_finds_what_decode_generated(client: httpx.AsyncClient, prefill: str, decode: str) -> None:
    body: JSON = {"prompt": random_prompt(1_002, 70), "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    await prefill_leg(client, prefill, body)
    reply = await decode_leg(client, decode, body)
    turn = [*cast("list[int]", body["prompt"]), *reply.text.encode(), *random_prompt(2, 40)]

    result = await prefill_leg(client, prefill, {"prompt": turn})

    assert result.usage is not None
    assert result.usage.cached_tokens == 3 * PAGE_TOKENS  # 70 + 149 tokens have KV: three full pages
    assert result.usage.loaded_tokens is not None
    assert result.usage.loaded_tokens >= 2 * PAGE_TOKENS


async def test_ordinary_requests_share_prefixes_through_the_store(
    client: httpx.AsyncClient, prefill: str, both: str, single: str
) -> None:
    prompt = random_prompt(1_003, 130)
    body: JSON = {"prompt": [*prompt, 1], "temperature": 0}
    await ask(client, prefill, PATH, {"prompt": [*prompt, 2], "temperature": 0})

    reply = await ask(client, both, PATH, body)

    assert reply.count("cached_tokens") == 2 * PAGE_TOKENS
    assert reply.kv_transfer_params is None
    assert reply.outcome == (await ask(client, single, PATH, body)).outcome


async def test_another_cache_salt_finds_nothing(client: httpx.AsyncClient, prefill: str, both: str) -> None:
    body: JSON = {"prompt": random_prompt(1_004, 100), "temperature": 0}
    await ask(client, prefill, PATH, {**body, "cache_salt": "mine"})

    theirs = await ask(client, both, PATH, {**body, "cache_salt": "theirs"})
    mine = await ask(client, both, PATH, {**body, "cache_salt": "mine"})

    assert (theirs.count("cached_tokens"), mine.count("cached_tokens")) == (0, PAGE_TOKENS)


async def test_the_salt_of_the_document_holds_and_another_one_beside_it_is_refused(
    client: httpx.AsyncClient, prefill: str, both: str
) -> None:
    """Spec-mandated, 1.0#12.3; where the document names none, that of the request holds."""
    body: JSON = {"prompt": random_prompt(1_005, 100), "temperature": 0}
    salted = body | {"cache_salt": "mine"}
    await prefill_leg(client, prefill, salted, isolation={})
    assert (await ask(client, both, PATH, body)).count("cached_tokens") == 0
    assert (await ask(client, both, PATH, salted)).count("cached_tokens") == 99
    await prefill_leg(client, prefill, salted, isolation={"cache_salt": "mine"})
    for told in ("theirs", None):
        with pytest.raises(AnswerError, match=r"isolation\.cache_salt is not the request's"):
            await prefill_leg(client, prefill, salted, isolation={"cache_salt": told})


async def test_several_prompts_and_choices_travel_in_one_request(
    client: httpx.AsyncClient, prefill: str, decode: str, single: str
) -> None:
    prompts = [random_prompt(seed, 60 + seed) for seed in range(3)]
    body: JSON = {"prompt": prompts, "n": 2, "max_tokens": 15, "seed": 9}
    result = await prefill_leg(client, prefill, {**body, "n": 1})
    before = await scrape(client, decode)

    reply = await decode_leg(client, decode, body, load_keys=result.load_keys)

    assert reply.outcome == (await ask(client, single, PATH, body)).outcome
    assert await grown(client, decode, COMPUTED, before) == 6


@pytest.mark.parametrize("how", ["recompute", "fail"])
async def test_kv_that_is_not_there_is_recomputed_or_an_error_as_asked(
    client: httpx.AsyncClient, decode: str, single: str, how: str
) -> None:
    body: JSON = {"prompt": random_prompt(2_000 + len(how), 100), "max_tokens": 20, "temperature": 0}
    before = await scrape(client, decode)

    if how == "fail":
        with pytest.raises(AnswerError, match="500"):
            await decode_leg(client, decode, body, on_load_failure=how)
        return
    reply = await decode_leg(client, decode, body, on_load_failure=how)

    assert reply.outcome == (await ask(client, single, PATH, body)).outcome
    assert await grown(client, decode, COMPUTED, before) == 100


@pytest.mark.parametrize(
    ("phase", "more", "word"),
    [
        ("prefill", {}, "role"),
        ("release", {}, "release"),
        ("decode", {"mode": "pull"}, "--connector store"),
        ("decode", {"version": "2.0"}, "version"),
        ("decode", {"must_understand": ["teleport"]}, "must be understood"),
        ("decode", {"prefix": [9, 9, 9]}, "prefix"),
    ],
)
async def test_documents_that_cannot_be_followed_are_refused_in_words(
    client: httpx.AsyncClient, decode: str, phase: str, more: JSON, word: str
) -> None:
    response = await client.post(decode + PATH, json={"prompt": "a", "kv_transfer_params": document(phase, **more)})

    assert response.status_code == 400
    assert word in response.json()["error"]["message"]


async def test_an_engine_without_a_store_says_so(client: httpx.AsyncClient, single: str) -> None:
    response = await client.post(single + PATH, json={"prompt": "a", "kv_transfer_params": document("decode")})

    assert response.status_code == 400
    assert "--store" in response.json()["error"]["message"]


async def test_native_keys_alone_are_ignored(client: httpx.AsyncClient, decode: str) -> None:
    body: JSON = {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}}

    assert (await ask(client, decode, PATH, body)).kv_transfer_params is None


@pytest.mark.slow
async def test_clients_that_leave_during_either_leg_leave_nothing_behind(
    client: httpx.AsyncClient, prefill: str, decode: str, single: str
) -> None:
    """They leave while pages are looked up, loaded, computed and saved; the same prompts still work afterwards."""
    draw = random.Random(4)
    bodies: list[JSON] = [
        {"prompt": random_prompt(4_000 + number, draw.randrange(100, 900)), "max_tokens": 20, "temperature": 0}
        for number in range(60)
    ]

    async def leave(url: str, phase: str, body: JSON) -> None:
        asked = {**body, "kv_transfer_params": document(phase)}
        with suppress(TimeoutError):
            async with asyncio.timeout(draw.random() * 2):
                await ask(client, url, PATH, asked)

    await asyncio.gather(*(leave(prefill, "prefill", {**body, "max_tokens": 1}) for body in bodies))
    await asyncio.gather(*(leave(decode, "decode", body) for body in bodies))

    for url in (prefill, decode):

        async def is_idle(url: str = url) -> bool:
            return not (await scrape(client, url))["reference_engine:requests_in_flight"]

        await until(is_idle, WAIT_S)
        metrics = await scrape(client, url)
        assert metrics["reference_engine:kv_blocks_in_use"] == 0
        assert metrics['reference_engine:requests_total{finish="abort"}'] > 0
    for body in bodies[:5]:
        await prefill_leg(client, prefill, body)
        reply = await decode_leg(client, decode, body)
        assert reply.outcome == (await ask(client, single, PATH, body)).outcome


def third_key(result: KVTransferParams) -> str:
    assert result.load_keys is not None
    return result.load_keys[2]


async def test_a_damaged_page_is_refused_and_recomputed(
    client: httpx.AsyncClient, prefill: str, decode: str, single: str, store_url: str
) -> None:
    body: JSON = {"prompt": random_prompt(3_000, 300), "max_tokens": 30, "temperature": 0}
    result = await prefill_leg(client, prefill, body)
    flip_stored_byte(store_url, third_key(result))
    before = await scrape(client, decode)

    reply = await decode_leg(client, decode, body)

    assert reply.outcome == (await ask(client, single, PATH, body)).outcome
    assert await grown(client, decode, 'reference_engine:pages_refused_total{reason="flipped_payload"}', before) == 1
    assert await grown(client, decode, COMPUTED, before) == 300 - 2 * PAGE_TOKENS


@pytest.mark.slow
async def test_without_verification_the_same_damage_changes_the_tokens(
    client: httpx.AsyncClient, processes: Processes, single: str, tmp_path: Path
) -> None:
    """Negative control of the test above: the damage does reach the model, and the model's output depends on it."""
    url = f"file://{tmp_path}/kv?size=32MiB"
    careless = [processes.engine(f"careless-{number}", "both", url, "--no-verify") for number in range(2)]
    processes.wait_ready(*careless)
    body: JSON = {"prompt": random_prompt(3_001, 300), "max_tokens": 30, "temperature": 0}
    result = await prefill_leg(client, careless[0].url, body)
    flip_stored_byte(url, third_key(result))

    reply = await decode_leg(client, careless[1].url, body)
    processes.stop(*careless)

    assert reply.text != (await ask(client, single, PATH, body)).text
    assert reply.count("cached_tokens") == 299


@pytest.mark.slow
async def test_a_restarted_engine_is_another_incarnation_and_finds_the_stored_kv(
    client: httpx.AsyncClient, processes: Processes, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/kv?size=32MiB"
    body: JSON = {"prompt": random_prompt(3_002, 200)}
    found: list[KVTransferParams] = []
    for _ in range(2):
        engine = processes.engine("same", "prefill", url)
        processes.wait_ready(engine)
        found.append(await prefill_leg(client, engine.url, body))
        processes.stop(engine)

    first, second = (one.producer for one in found)
    assert first is not None
    assert second is not None
    assert (first.id, second.id) == ("same", "same")
    assert first.incarnation != second.incarnation
    usage = found[1].usage
    assert usage is not None
    assert usage.computed_tokens == 1
