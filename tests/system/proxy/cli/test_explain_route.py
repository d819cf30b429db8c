"""Tests `kvparams explain-route` and its endpoint: it names the route of a request and sends nothing."""

import argparse
import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvparams.jsontext.document import JSONLimits
from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams_proxy.cli.explain_route_command import COMMAND
from kvparams_proxy.secret import Secret
from kvparams_proxy.tokenization.tokenizer_choice import TokenizationMethod
from tests.support.proxy.admin_schema import check_answer
from tests.support.proxy.fixtures import Proxy, StartProxy
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until

PROMPT = Random(5).choices(range(1000), k=641)
ADMIN = {"authorization": "Bearer secret"}


def urls(stub: StubEngines) -> tuple[list[str], list[str]]:
    return tuple([engine.url for engine in stub.engines if engine.role == role] for role in ("prefill", "decode"))  # pyright: ignore[reportReturnType]


@pytest.fixture
async def aware(stub: StubEngines, proxy: StartProxy) -> Proxy:
    return await proxy(
        *urls(stub), policy="cache_aware", admin_token=Secret("secret"), tokenizers={None: TokenizationMethod.BYTES}
    )


async def explain(
    running: Proxy, body: Any, path: str = "", expect: int = 200, session: str = "", **headers: str
) -> Any:
    headers |= {"x-session-id": session} if session else {}
    answer = await running.client.post(f"/admin/explain-route{path}", json=body, headers=ADMIN | headers)
    assert answer.status_code == expect, answer.text
    check_answer("POST", "/admin/explain-route", answer)
    return answer.json() if expect == 200 else answer.json()["error"]["message"]


async def test_it_says_where_the_next_one_goes_and_counts_nothing(aware: Proxy) -> None:
    body = {"model": "stub", "prompt": PROMPT, "max_tokens": 4}
    first = await explain(aware, body)
    assert (first["tokens"], first["ids"], first["alarm"]) == (641, "client", False)
    assert {one["id"] for one in first["candidates"]} == {"prefill-0", "prefill-1"}
    assert all(one["cached"] == 0 and one["legs_seen"] == 0 for one in first["candidates"])
    answer = await aware.client.post("/v1/completions", json=body)
    assert answer.headers["x-kvparams-prefill"] == first["chosen"]
    for _ in range(3):
        again = await explain(aware, body)
        assert again["chosen"] == first["chosen"]
        assert "640 of 641 tokens cached" in again["decision"]
        assert all(one["in_flight"] == 0 and one["wait_s"] == 0 for one in again["candidates"])
    assert await aware.metric("kvparams_proxy_prefix_cache_queries_total") == 641
    assert await aware.metric("kvparams_proxy_prefix_cache_alarm") == 0
    other = await explain(aware, body, "?tenant=acme")
    assert all(one["cached"] == 0 for one in other["candidates"]), "a tenant's prompts are its own"


async def test_text_and_chats_are_explained_as_they_are_routed(aware: Proxy) -> None:
    chat = {"model": "stub", "messages": [{"role": "user", "content": "who is there? " * 200}]}
    assert (await explain(aware, chat, "?path=/v1/chat/completions"))["ids"] == "bytes"
    answer = await aware.client.post("/v1/chat/completions", json=chat)
    found = await explain(aware, chat, "?path=/v1/chat/completions")
    assert found["chosen"] == answer.headers["x-kvparams-prefill"]
    assert max(one["cached"] for one in found["candidates"]) > 0


async def test_what_cannot_be_explained_is_refused_in_words(aware: Proxy, stub: StubEngines, proxy: StartProxy) -> None:
    assert "path must be" in await explain(aware, {}, "?path=/v1/embeddings", 400)
    assert "not JSON" not in await explain(aware, {"model": "stub", "prompt": 5}, "", 400)
    await explain(aware, {}, "", 401, authorization="Bearer wrong")
    blind = await proxy(
        *urls(stub), policy="least_load", admin_token=Secret("secret"), body=JSONLimits(max_bytes=100_000)
    )
    assert "larger than 100000 bytes" in await explain(blind, {"prompt": "x" * 100_000}, "", 413)


@pytest.mark.parametrize(
    "policy", ["round_robin", "least_load", "random", "two_choices", "session_affinity", "cache_aware"]
)
async def test_every_policy_is_explained(policy: str, stub: StubEngines, proxy: StartProxy) -> None:
    running = await proxy(*urls(stub), policy=policy, admin_token=Secret("secret"))
    body = {"model": "stub", "prompt": PROMPT, "max_tokens": 4}
    found = [await explain(running, body) for _ in range(3)]
    assert {one["id"] for one in found[0]["candidates"]} == {"prefill-0", "prefill-1"}
    assert (found[0]["policy"], found[0]["role"], found[0]["tokens"]) == (policy, "prefill", 641)
    assert found[0]["decision"].startswith(f"{found[0]['chosen']}: ")
    assert all(one["in_flight"] == 0 for one in found[0]["candidates"])
    if policy in ("random", "two_choices"):  # they draw by the id of the request
        return
    assert found[0] == found[1] == found[2], "to explain takes no turn"
    answer = await running.client.post("/v1/completions", json=body)
    assert answer.headers["x-kvparams-prefill"] == found[0]["chosen"]
    if policy == "round_robin":
        assert (await explain(running, body))["chosen"] != found[0]["chosen"]


async def test_an_estimated_prompt_is_counted_in_the_engines_tokens_where_it_is_logged(
    stub: StubEngines, proxy: StartProxy, tmp_path: Path
) -> None:
    """The stub engine counts a token for each byte, pseudo tokens have four."""
    log = tmp_path / "log"
    running = await proxy(
        *urls(stub),
        policy="cache_aware",
        admin_token=Secret("secret"),
        tokenizers={None: TokenizationMethod.BYTES},
        log_requests=str(log),
    )
    body = {"model": "stub", "prompt": "who is there? " * 200, "max_tokens": 4}
    await running.client.post("/v1/completions", json=body)
    explained = await explain(running, body)
    assert (explained["ids"], explained["estimated"]) == ("bytes", True)
    answer = await running.client.post("/v1/completions", json=body)
    await until(lambda: log.read_bytes().count(b"\n") == 2)
    line = json.loads(log.read_bytes().splitlines()[1])
    of = answer.headers["x-kvparams-decision"]
    assert f"{line['predicted_tokens']} of {line['prompt_tokens']} tokens cached" in of
    assert 0 < line["predicted_tokens"] < line["prompt_tokens"]
    believed = max(one["cached"] for one in explained["candidates"])
    assert line["predicted_tokens"] == believed * line["prompt_tokens"] // explained["tokens"]
    assert line["prompt_tokens"] != explained["tokens"], "or nothing was converted"


async def test_the_command_asks_and_tells(aware: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "body").write_text(json.dumps({"model": "stub", "prompt": PROMPT}))

    async def run(*arguments: str) -> tuple[int, str]:
        parser = argparse.ArgumentParser()
        COMMAND.add_arguments(parser)
        known = (str(aware.client.base_url), "--admin-token-file", str(tmp_path / "token"))
        parsed = parser.parse_args([*known, *arguments])
        status = await asyncio.to_thread(COMMAND.run, parsed)
        said = capsys.readouterr()
        return status, said.out + said.err

    status, said = await run("--request", str(tmp_path / "body"))
    assert status == 0, said
    assert "-> prefill-" in said.replace("->prefill", "-> prefill")
    assert "641 tokens, with ids from client" in said
    status, said = await run("--prompt", "Who is there?", "--model", "stub")
    assert "tokens, estimated from the text's bytes; so is every number of tokens above" in said
    status, said = await run("--prompt", "Who is there?", "--model", "stub", "--json")
    assert (status, json.loads(said)["ids"]) == (0, "bytes")
    status, said = await run("--prompt", "x", "--path", "/nowhere")
    assert (status, "path must be" in said) == (1, True)
    assert (await run())[0] == 2
    (tmp_path / "token").write_text("wrong")
    assert (await run("--prompt", "x"))[0] == 1


async def test_the_command_shows_loads_where_the_policy_ignores_caches(
    stub: StubEngines, proxy: StartProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = await proxy(*urls(stub), policy="round_robin", admin_token=Secret("secret"))
    (tmp_path / "token").write_text("secret\n")
    parser = argparse.ArgumentParser()
    COMMAND.add_arguments(parser)
    parsed = parser.parse_args(
        [str(running.client.base_url), "--admin-token-file", str(tmp_path / "token"), "--prompt", "x"]
    )
    assert await asyncio.to_thread(COMMAND.run, parsed) == 0
    said = capsys.readouterr().out
    assert "prefill-0: chosen by round_robin among 2 candidates; it has 0 requests in flight" in said
    assert "->prefill-0" in said
    assert "about 8 tokens, estimated" in said
    assert "chosen by load" not in said, "the policy takes turns"


async def test_the_active_modes_decide_which_engine_is_explained(stub: StubEngines, proxy: StartProxy) -> None:
    running = await proxy(*urls(stub), policy="session_affinity", admin_token=Secret("secret"))
    body = {"model": "stub", "prompt": PROMPT, "max_tokens": 4}
    assert (await explain(running, body))["role"] == "prefill"

    async def change(method: str, path: str, document: Any) -> None:
        answer = await running.client.request(method, path, json=document, headers=ADMIN)
        assert answer.is_success, answer.text

    await change("PUT", "/admin/modes", {"modes": [{"use": "aggregated"}]})
    assert "no aggregated instance is configured" in await explain(running, body, expect=503)
    await change("POST", "/admin/instances", {"id": "a0", "url": stub.engines[0].url, "role": "aggregated"})
    found = await explain(running, body)
    assert (found["role"], found["chosen"]) == ("aggregated", "a0")
    await change("PUT", "/admin/modes", {"modes": [{"use": "conditional", "options": {"remote_tokens": 5000}}]})
    assert (await explain(running, body))["role"] == "decode", "a short prompt stays with decode"
    modes = [{"use": "aggregated", "priority": 1, "when": {"session": ["s"]}}, {"use": "prefill_then_decode"}]
    await change("PUT", "/admin/modes", {"modes": modes})
    assert (await explain(running, body))["role"] == "prefill"
    assert (await explain(running, body, session="s"))["role"] == "aggregated"


async def test_the_session_decides_as_it_does_for_a_client(stub: StubEngines, proxy: StartProxy) -> None:
    running = await proxy(*urls(stub), policy="session_affinity", admin_token=Secret("secret"))
    body = {"model": "stub", "prompt": PROMPT, "max_tokens": 4}
    chosen: set[str] = set()
    for number in range(8):
        session = f"session-{number}"
        found = await explain(running, body, session=session)
        answer = await running.client.post("/v1/completions", json=body, headers={"x-session-id": session})
        assert found["chosen"] == answer.headers["x-kvparams-prefill"]
        chosen.add(found["chosen"])
    assert chosen == {"prefill-0", "prefill-1"}, "or the session decides nothing"


async def test_a_request_that_would_be_refused_is_refused_for_the_same_reason(
    stub: StubEngines, proxy: StartProxy
) -> None:
    running = await proxy(*urls(stub), policy="least_load", admin_token=Secret("secret"))

    async def both(body: Any, status: int) -> str:
        answer = await running.client.post("/v1/completions", json=body)
        assert answer.status_code == status, answer.text
        said = await explain(running, body, expect=status)
        assert said == answer.json()["error"]["message"]
        return said

    body = {"model": "stub", "prompt": PROMPT, "max_tokens": 4}
    assert "'nope' is not served here" in await both(body | {"model": "nope"}, 404)
    for name in ("prefill-0", "prefill-1"):
        answer = await running.client.post(f"/admin/instances/{name}/drain", headers=ADMIN)
        assert answer.is_success, answer.text
    assert "the 2 ready prefill instances are being drained" in await both(body, 503)


async def test_a_prompt_that_a_decode_engine_has_cached_is_explained_there(
    stub: StubEngines, proxy: StartProxy
) -> None:
    modes = (ManagerMode("conditional", options={"remote_tokens": 100}),)
    running = await proxy(*urls(stub), policy="cache_aware", admin_token=Secret("secret"), modes=modes)
    body = {"model": "stub", "prompt": PROMPT, "max_tokens": 4}
    assert (await explain(running, body))["role"] == "prefill"
    first = await running.client.post("/v1/completions", json=body)
    found = await explain(running, body)
    assert (found["role"], found["chosen"]) == ("decode", first.headers["x-kvparams-decode"])
    second = await running.client.post("/v1/completions", json=body)
    assert (second.headers["x-kvparams-decode"], "x-kvparams-prefill" in second.headers) == (found["chosen"], False)
