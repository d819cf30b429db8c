"""Tests `/v1/messages` and `/v1/responses` through the proxy before reference engines that share a store."""

import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import httpx
import pytest

from demo.processes import Processes, Server

pytestmark = pytest.mark.slow

WORDS: Final = "The quick brown fox jumps over the lazy dog. " * 12
TOOL: Final = {"name": "get", "input_schema": {"type": "object", "properties": {"days": {"enum": [1, 2, 3]}}}}
MESSAGES: Final[dict[str, Any]] = {
    "model": "reference",
    "max_tokens": 20,
    "temperature": 0,
    "messages": [{"role": "user", "content": WORDS}],
}
RESPONSES: Final[dict[str, Any]] = {"model": "reference", "max_output_tokens": 20, "temperature": 0, "input": WORDS}
COMPUTED: Final = 'reference_engine:prompt_tokens_total{source="computed"}'
CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "messages": ("/v1/messages", {}),
    "messages with a system prompt": ("/v1/messages", {"system": [{"type": "text", "text": "Be brief."}]}),
    "messages with thinking": (
        "/v1/messages",
        {"max_tokens": 1030, "thinking": {"type": "enabled", "budget_tokens": 1024}, "stop_sequences": ["e"]},
    ),
    "messages with a tool": ("/v1/messages", {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 60}),
    "messages with a named tool": (
        "/v1/messages",
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get"}, "max_tokens": 60},
    ),
    "messages in a form": (
        "/v1/messages",
        {"output_config": {"format": {"type": "json_schema", "schema": TOOL["input_schema"]}}, "max_tokens": 60},
    ),
    "responses": ("/v1/responses", {}),
    "responses with instructions": ("/v1/responses", {"instructions": "Be brief.", "store": False}),
    "responses in a form": (
        "/v1/responses",
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": TOOL["input_schema"]}}},
    ),
}


class Site(NamedTuple):
    """A fleet over a store, and one engine that does all the work alone."""

    single: Server
    prefill: Server
    decode: tuple[Server, Server]
    proxy: Server


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("agents")
    store = f"file://{folder}/kv?size=64MiB"
    with Processes(folder) as processes:
        single, prefill = processes.engine("single"), processes.engine("p0", "prefill", store)
        decode = processes.engine("d0", "decode", store), processes.engine("d1", "decode", store)
        processes.wait_ready(single, prefill, *decode, within_s=240)
        proxy = processes.proxy([prefill], decode, "--log-requests", "off", "--policy", "round_robin")
        processes.wait_ready(proxy, within_s=240)
        yield Site(single, prefill, decode, proxy)


def body_of(path: str, more: dict[str, Any]) -> dict[str, Any]:
    return {**(MESSAGES if path == "/v1/messages" else RESPONSES), **more}


async def post(client: httpx.AsyncClient, server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return await client.post(f"{server.url}{path}", json=body, timeout=60)


async def computed(client: httpx.AsyncClient, *servers: Server) -> float:
    total = 0.0
    for server in servers:
        text = (await client.get(f"{server.url}/metrics")).text
        total += sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(COMPUTED))
    return total


def said(document: dict[str, Any]) -> Any:
    """What an answer says, without the ids of this one."""
    if document.get("type") == "message":
        parts = document["content"]
    else:
        parts = [item.get("content") or [item] for item in document["output"]]
    told = json.loads(json.dumps([parts, document.get("stop_reason"), document.get("status")]))
    return json.loads(
        json.dumps(told), object_hook=lambda found: {k: v for k, v in found.items() if k not in ("id", "call_id")}
    )


def events(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """The named events of a stream."""
    *blocks, end = response.text.split("\n\n")
    assert not end
    found: list[tuple[str, dict[str, Any]]] = []
    for block in blocks:
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert found[-1][0] == found[-1][1]["type"]
    return found


@pytest.mark.parametrize("case", CASES)
async def test_an_answer_is_that_of_one_engine(client: httpx.AsyncClient, site: Site, case: str) -> None:
    path, more = CASES[case]
    body = body_of(path, {**more, "cache_salt": case})
    alone, split = [await post(client, server, path, body) for server in (site.single, site.proxy)]
    assert (alone.status_code, split.status_code) == (200, 200), split.text
    assert said(split.json()) == said(alone.json())
    first, usage = alone.json()["usage"], split.json()["usage"]
    assert usage == first
    if "named tool" not in case:
        assert split.headers["x-kvparams-prefill"] == "p0"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_decode_computes_one_token_of_the_prompt(client: httpx.AsyncClient, site: Site, path: str) -> None:
    before = await computed(client, *site.decode)
    answer = await post(client, site.proxy, path, body_of(path, {"cache_salt": f"one token {path}"}))
    assert answer.status_code == 200
    assert await computed(client, *site.decode) - before == 1


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_cached_tokens_are_those_of_prefill(client: httpx.AsyncClient, site: Site, path: str) -> None:
    body = body_of(path, {"cache_salt": f"cached {path}"})
    counts: list[tuple[int, int]] = []
    for _ in range(2):
        usage = (await post(client, site.proxy, path, body)).json()["usage"]
        if path == "/v1/messages":
            cached = usage["cache_read_input_tokens"]
            counts.append((usage["input_tokens"] + cached, cached))
        else:
            counts.append((usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]))
    (total, first), (again, second) = counts
    assert total == again
    assert first == 0
    assert total - 32 <= second < total


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_stream_is_that_of_one_engine(client: httpx.AsyncClient, site: Site, path: str) -> None:
    body = body_of(path, {"stream": True, "cache_salt": f"stream {path}"})
    alone, split = [events(await post(client, server, path, body)) for server in (site.single, site.proxy)]
    assert [name for name, _ in split] == [name for name, _ in alone]
    assert split[-1][0] in ("message_stop", "response.completed")
    text = ["".join(str(event.get("delta")) for name, event in found if "delta" in name) for found in (alone, split)]
    assert text[0] == text[1]
    usages = [
        [event.get("usage") or event["response"]["usage"] for name, event in found if name in LAST]
        for found in (alone, split)
    ]
    assert usages[0] == usages[1] != [[]]


LAST: Final = ("message_delta", "response.completed")


async def test_tokens_are_counted_by_an_engine(client: httpx.AsyncClient, site: Site) -> None:
    body = {"model": "reference", "messages": MESSAGES["messages"]}
    counted = (await post(client, site.proxy, "/v1/messages/count_tokens", body)).json()
    assert counted == (await post(client, site.single, "/v1/messages/count_tokens", body)).json()
    assert counted["input_tokens"] > 500


async def test_errors_have_the_form_of_their_api(client: httpx.AsyncClient, site: Site) -> None:
    wrong = await post(client, site.proxy, "/v1/messages", {"model": "reference", "messages": MESSAGES["messages"]})
    assert wrong.status_code == 400
    assert wrong.json()["type"] == "error"
    assert wrong.json()["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in wrong.json()["error"]["message"]
    unknown = await post(client, site.proxy, "/v1/messages", {**MESSAGES, "model": "another"})
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    refused = await post(client, site.proxy, "/v1/messages", {**MESSAGES, "temperature": 1000})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    wrong = await post(client, site.proxy, "/v1/responses", {"model": "reference"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "input")


async def test_a_response_that_goes_on_is_answered_by_the_engine_that_has_it(
    client: httpx.AsyncClient, site: Site
) -> None:
    """Requests go round robin: without the reference in the id, half of them would meet the other engine."""
    for number in range(6):
        first = await post(client, site.proxy, "/v1/responses", {**RESPONSES, "input": f"{number} {WORDS}"})
        document = first.json()
        kept = {**RESPONSES, "previous_response_id": document["id"], "input": "And then?"}
        second = await post(client, site.proxy, "/v1/responses", kept)
        assert second.status_code == 200, second.text
        assert second.headers["x-kvparams-decode"] == first.headers["x-kvparams-decode"]
        assert "x-kvparams-prefill" not in second.headers
        text = document["output"][0]["content"][0]["text"]
        items = [("user", f"{number} {WORDS}"), ("assistant", text), ("user", "And then?")]
        whole = {**RESPONSES, "input": [{"role": role, "content": words} for role, words in items]}
        assert said(second.json()) == said((await post(client, site.single, "/v1/responses", whole)).json())
        got = await client.get(f"{site.proxy.url}/v1/responses/{document['id']}")
        assert got.json()["output"] == document["output"]


async def test_a_response_that_nobody_has_is_refused(client: httpx.AsyncClient, site: Site) -> None:
    document = (await post(client, site.proxy, "/v1/responses", RESPONSES)).json()
    changed = document["id"][:-1] + ("0" if document["id"][-1] != "0" else "1")
    for unknown in ("resp_1", changed):
        again = await post(client, site.proxy, "/v1/responses", {**RESPONSES, "previous_response_id": unknown})
        assert again.status_code == 404
        assert again.json()["error"]["code"] == "previous_response_not_found"
        assert (await client.get(f"{site.proxy.url}/v1/responses/{unknown}")).status_code == 404
    assert (await client.get(f"{site.proxy.url}/v1/responses/{document['id']}")).status_code == 200
