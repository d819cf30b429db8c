"""Tests conversations through the real proxy and engines with prefix caches: `cache_aware` beside round robin.

The engines count their own cache hits. Each conversation has a cache salt of its own as well as its text, so that
conversations share nothing.
"""

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from demo.client import AnswerError, Reply, ask, new_client, scrape
from demo.processes import Processes, Server, free_port
from kvparams.peer_reads import peer_source_members
from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.keyring_file import create_keyring
from tests.support.waiting import until

pytestmark = pytest.mark.slow

_TURNS, _TALKS = 5, 5
_FIRST, _MORE = 300, 100
"""Tokens of a conversation's first prompt, and of each further turn."""
Record = Callable[[dict[str, object]], None]


@dataclass
class Site:
    """Two prefill engines, one for decode, and a proxy before them."""

    processes: Processes
    store: str
    policy: str

    def start(self) -> None:
        self.prefill = [self.processes.engine(f"p{number}", "prefill", self.store) for number in range(2)]
        self.decode = [self.processes.engine("d0", "decode", self.store)]
        more = ("--policy", self.policy, "--log-requests", "off", "--probe", "0.2")
        self.proxy = self.processes.proxy(self.prefill, self.decode, *more)
        self.processes.wait_ready(*self.prefill, *self.decode, self.proxy)

    async def ask(self, client: httpx.AsyncClient, prompt: list[int], salt: str) -> Any:
        body = {"model": "reference", "prompt": prompt, "max_tokens": 2, "cache_salt": salt}
        answer = await client.post(f"{self.proxy.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer

    async def metric(self, client: httpx.AsyncClient, url: str, name: str) -> float:
        text = (await client.get(f"{url}/metrics")).text
        found = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    async def hit_ratio(self, client: httpx.AsyncClient) -> float:
        """As the prefill engines count."""
        hit = asked = 0.0
        for engine in self.prefill:
            for source in ("local_cache", "external_kv", "computed"):
                name = f'reference_engine:prompt_tokens_total{{source="{source}"}}'
                count = await self.metric(client, engine.url, name)
                asked += count
                hit += count if source == "local_cache" else 0.0
        return hit / asked


def prompt(talk: int, turn: int) -> list[int]:
    return Random(talk).choices(range(32, 127), k=_FIRST + _MORE * turn)


async def talk(site: Site, client: httpx.AsyncClient) -> list[Any]:
    """A turn of each conversation after the other: where nobody waits, nothing speaks against the cache."""
    return [
        await site.ask(client, prompt(number, turn), f"salt-{number}")
        for turn in range(_TURNS)
        for number in range(_TALKS)
    ]


async def test_turns_of_a_conversation_go_where_they_were_and_hit_more_than_by_round_robin(
    tmp_path: Path, record: Record
) -> None:
    ratios: dict[str, float] = {}
    for policy in ("cache_aware", "round_robin"):
        with Processes(tmp_path) as processes:
            site = Site(processes, f"file://{tmp_path}/{policy}?size=256MiB", policy)
            await asyncio.to_thread(site.start)
            async with new_client() as client:
                answers = await talk(site, client)
                ratios[policy] = await site.hit_ratio(client)
                if policy == "cache_aware":
                    assert all("x-kvparams-decision" in answer.headers for answer in answers)
                    accuracy = await site.metric(client, site.proxy.url, "kvparams_proxy_prefix_cache_accuracy")
                    assert accuracy > 0.95
    sizes = [_FIRST + _MORE * turn for turn in range(_TURNS)]
    best = sum(sizes[:-1]) / sum(sizes)
    assert ratios["cache_aware"] > 0.9 * best, ratios
    assert ratios["cache_aware"] > 1.3 * ratios["round_robin"], ratios
    record({"hit ratio": ratios, "best": best})


async def test_an_engine_that_restarts_is_forgotten_and_salts_share_nothing(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        site = Site(processes, f"file://{tmp_path}/store?size=256MiB", "cache_aware")
        await asyncio.to_thread(site.start)
        async with new_client() as client:
            expected = re.compile(r": (\d+) of 500 tokens cached")

            async def believed(salt: str) -> int:
                answer = await site.ask(client, prompt(1, 2), salt)
                found = expected.search(answer.headers["x-kvparams-decision"])
                assert found is not None
                return int(found[1])

            assert await believed("a") == 0
            assert await believed("a") == 448
            assert await believed("b") == 0
            for engine in site.prefill:
                port = engine.url.rpartition(":")[2]
                await asyncio.to_thread(processes.stop, engine)
                command = ("-m", "reference_engine", "--id", engine.name, "--role", "prefill", "--port", port)
                again = processes.start(engine.name, sys.executable, *command, "--store", site.store, port=int(port))
                await asyncio.to_thread(processes.wait_ready, again)

            async def is_healthy() -> bool:
                return (await client.get(f"{site.proxy.url}/health")).status_code == 200

            await until(is_healthy, 20.0, pause_s=0.02)
            assert await believed("a") == 0


def _signing(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What engines are told, and a proxy, so that they believe only what it says."""
    keys = str(folder / "signing-keys.json")
    create_keyring(Path(keys), SigningKeyring([SigningKey.new(int(time.time()) - 60)]))
    pool = ("--audience", "pool-a")
    return ("--verify-with", keys, *pool, "--clock-skew", "1"), ("--sign-with", keys, *pool)


async def test_the_alarm_rings_when_engines_lose_what_they_had_and_nobody_says_so(tmp_path: Path) -> None:
    """No events, no restart: somebody else fills their caches between the turns. The control are the turns before."""
    conversations, engines_blocks = 20, 256

    def turn(number: int, length: int) -> dict[str, object]:
        ids = Random(number).choices(range(32, 127), k=length)
        return {"model": "reference", "prompt": ids, "max_tokens": 1}

    with Processes(tmp_path) as processes:
        engines = [processes.engine(f"a{n}", "both", None, "--blocks", str(engines_blocks)) for n in range(2)]
        port = free_port()
        command = [sys.executable, "-m", "kvparams", "proxy", "--port", str(port), "--mode", "aggregated"]
        command += [text for each in engines for text in ("--aggregated", f"{each.name}={each.url}")]
        command += ["--policy", "cache_aware", "--log-requests", "off", "--probe", "0.2"]
        proxy = await asyncio.to_thread(processes.start, "proxy", *command, port=port)
        await asyncio.to_thread(processes.wait_ready, *engines, proxy)
        async with new_client() as client:

            async def say(url: str, body: dict[str, object]) -> int:
                return (await ask(client, url, "/v1/completions", body)).count("cached_tokens")

            async def alarmed() -> float:
                return (await scrape(client, proxy.url))["kvparams_proxy_prefix_cache_alarm"]

            async def all_say(length: int) -> int:
                return sum([await say(proxy.url, turn(number, length)) for number in range(conversations)])

            await all_say(130)
            assert await all_say(194) > 0.8 * 128 * conversations
            assert await alarmed() == 0
            for length in (258, 322, 386):
                for engine in engines:
                    for other in range(-(-16 * engines_blocks // 1000)):
                        await say(engine.url, turn(length + other, 1000))
                assert await all_say(length) < 0.1 * length * conversations
            assert await alarmed() == 1
        assert "prefix caches: only " in proxy.log.read_text()


@pytest.mark.parametrize("signed", [False, True])
async def test_what_a_busy_engine_has_in_its_memory_is_read_by_another_one(tmp_path: Path, signed: bool) -> None:
    """Peers: a prompt whose prefix is on an engine with seconds of work goes to the other one, which reads it there;
    decode gets all of it from that one. The control is the answer of one engine that does it all."""
    die = Random(7)

    def draw(tokens: int) -> list[int]:
        return die.choices(range(32, 127), k=tokens)

    def body(prompt: list[int]) -> dict[str, object]:
        return {"model": "reference", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}

    with Processes(tmp_path) as processes:
        url = "peer://127.0.0.1?size=64MiB&lease=5"
        believes, signs = _signing(tmp_path) if signed else ((), ())
        slow = ("--tokens-per-s", "1000", *believes)
        prefill = [processes.engine(f"p{at}", "prefill", url, *slow) for at in range(2)]
        decode = processes.engine("d0", "decode", url, *believes)
        alone = processes.engine("alone")
        roles = [(prefill[0], "prefill"), (prefill[1], "prefill"), (decode, "decode")]
        fleet = [{"id": each.name, "url": each.url, "role": role, "store": False} for each, role in roles]
        (tmp_path / "fleet.yaml").write_text(json.dumps({"instances": fleet}))
        proxy = await asyncio.to_thread(
            processes.proxy, (), (), "--config", str(tmp_path / "fleet.yaml"), "--policy", "cache_aware", *signs
        )
        await asyncio.to_thread(processes.wait_ready, *prefill, decode, alone, proxy)
        async with new_client() as client:

            async def counted(server: Server, source: str) -> float:
                return (await scrape(client, server.url))[f'reference_engine:prompt_tokens_total{{source="{source}"}}']

            async def ask_proxy(prompt: list[int]) -> Reply:
                return await ask(client, proxy.url, "/v1/completions", body(prompt))

            known: dict[str, list[int]] = {}
            async with asyncio.timeout(60):  # who gets what nobody has is the policy's: whoever idles longest
                while known.keys() != {"p0", "p1"}:
                    prompt = draw(960)
                    known[(await ask_proxy(prompt)).headers["x-kvparams-prefill"]] = prompt
            unlike = draw(4000)
            long = asyncio.create_task(ask_proxy(unlike))
            busy: list[Server] = []

            async def is_busy() -> bool:
                for each in prefill:
                    if (await scrape(client, each.url))["reference_engine:requests_in_flight"]:
                        busy.append(each)
                return bool(busy)

            await until(is_busy)
            (owner,) = busy
            (other,) = (each for each in prefill if each is not owner)
            asked = [*known[owner.name], *draw(100)]
            computed = await counted(decode, "computed")
            reply = await ask_proxy(asked)
            assert not long.done()
            assert reply.headers["x-kvparams-prefill"] == other.name, reply.headers["x-kvparams-decision"]
            assert f"fetch 960 from {owner.name} in" in reply.headers["x-kvparams-decision"]
            assert reply.count("cached_tokens") == 960
            assert await counted(other, "external_kv") == 960
            assert await counted(decode, "computed") == computed + 1, "decode did not get it all from one place"
            assert reply.text == (await ask(client, alone.url, "/v1/completions", body(asked))).text
            assert (await long).headers["x-kvparams-prefill"] == owner.name
            # what a stranger says: an engine goes nowhere that it was not told to trust, and computes
            before = await counted(other, "computed")
            document = {
                "version": "1.0",
                "request_id": "stranger",
                "transfer": {"id": "stranger", "attempt": 1},
                "phase": "prefill",
                "mode": "store",
                **peer_source_members("192.0.2.1:7400"),
            }
            prompt = draw(200)
            alien = {**body(prompt), "max_tokens": 1, "kv_transfer_params": {"kvparams": document}}
            started = asyncio.get_running_loop().time()
            if signed:
                with pytest.raises(AnswerError, match="carries no signature"):
                    await ask(client, other.url, "/v1/completions", alien)
            else:
                await ask(client, other.url, "/v1/completions", alien)
            assert asyncio.get_running_loop().time() - started < 2.0, "it has waited for somebody"
            assert await counted(other, "computed") == before + (0 if signed else len(prompt))
            assert signed or "is not among the peers" in other.log.read_text()
            # whoever has it is gone, and the proxy has not heard of it: it is computed, and right
            await asyncio.to_thread(processes.stop, owner)
            fetched = await counted(other, "external_kv")
            last = [*unlike[:640], *draw(100)]
            reply = await ask_proxy(last)
            assert reply.headers["x-kvparams-prefill"].endswith(other.name)
            assert (reply.count("cached_tokens"), await counted(other, "external_kv")) == (0, fetched)
            assert reply.text == (await ask(client, alone.url, "/v1/completions", body(last))).text
