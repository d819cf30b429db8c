"""Tests `--connector legacy` before reference engines that speak only the three fields of vLLM pull request #12957."""

import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import httpx
import pytest

from demo.processes import Processes, Server
from kvparams.dialects.legacy import LEGACY
from kvparams.instances import RequestFacts
from kvparams.routing.managers.prefill_then_decode import PrefillThenDecode
from kvparams.routing.plan import Leg, LegResult
from tests.support.kvparams.planning import Table

PROMPT: Final = list(range(30, 120)) * 4
COMPUTED: Final = 'reference_engine:prompt_tokens_total{source="computed"}'


def legs(facts: RequestFacts) -> list[dict[str, Any]]:
    """What both legs of a request carry beside our document."""
    sent: list[Leg] = Table(LEGACY).run(PrefillThenDecode().legs(facts, Table(LEGACY)), lambda _: LegResult({}))
    carried = [json.loads(leg.changes["kv_transfer_params"] or b"{}") for leg in sent]
    return [{name: value for name, value in one.items() if name != "kvparams"} for one in carried]


def test_both_legs_carry_the_three_fields() -> None:
    facts = RequestFacts("r", "t-1", "m", 1, 1, [5, 6, 7], None)
    assert legs(facts) == [
        {"prefix_prompt_ids": [5, 6, 7], "kvcache_store_keys": ["kvp-t-1"], "kvcache_load_keys": None},
        {"prefix_prompt_ids": [5, 6, 7], "kvcache_load_keys": ["kvp-t-1"], "kvcache_store_keys": None},
    ]
    assert [one.keys() & {"prefix_prompt_ids"} for one in legs(facts._replace(token_ids=None))] == [set(), set()]
    assert not LEGACY.can_split(facts._replace(prompts=2))


class Site(NamedTuple):
    single: Server
    decode: Server
    proxy: Server


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("legacy")
    store = f"file://{folder}/kv?size=64MiB"
    with Processes(folder) as processes:
        single = processes.engine("single")
        prefill = processes.engine("p0", "prefill", store, "--legacy")
        decode = processes.engine("d0", "decode", store, "--legacy")
        processes.wait_ready(single, prefill, decode, within_s=240)
        proxy = processes.proxy([prefill], [decode], "--log-requests", "off", connector="legacy")
        processes.wait_ready(proxy, within_s=240)
        yield Site(single, decode, proxy)


async def computed(client: httpx.AsyncClient, server: Server) -> float:
    text = (await client.get(f"{server.url}/metrics")).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(COMPUTED))


async def text_of(client: httpx.AsyncClient, server: Server, body: dict[str, Any]) -> str:
    answer = await client.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [PROMPT, "The quick brown fox jumps over the lazy dog. " * 9], ids=["ids", "text"])
async def test_keys_move_kv_between_engines(client: httpx.AsyncClient, site: Site, prompt: object) -> None:
    body = {"model": "reference", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    right = await text_of(client, site.single, body)
    before = await computed(client, site.decode)
    assert await text_of(client, site.proxy, body) == right
    assert await computed(client, site.decode) - before == 1


@pytest.mark.slow
async def test_another_key_finds_nothing(client: httpx.AsyncClient, site: Site) -> None:
    """The control: it is the key that leads to the KV, and not what is in the prompt."""
    own = [*PROMPT, 40]
    body = {"model": "reference", "prompt": own, "max_tokens": 12, "temperature": 0}
    right = await text_of(client, site.proxy, body)
    before = await computed(client, site.decode)
    wrong = {"prefix_prompt_ids": own, "kvcache_load_keys": ["kvp-nobody"], "kvcache_store_keys": None}
    assert await text_of(client, site.decode, {**body, "kv_transfer_params": wrong}) == right
    assert await computed(client, site.decode) - before > 300
    answer = await client.post(
        f"{site.decode.url}/v1/completions",
        json={**body, "kv_transfer_params": {**wrong, "prefix_prompt_ids": own[1:]}},
    )
    assert answer.status_code == 400
    assert "prefix" in answer.text
