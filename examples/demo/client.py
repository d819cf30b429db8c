"""A client of engines and proxies that notes what there is to prove: the text, the usage, the times, the counters.

An answer that is not whole is an error, never a short text.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, cast

import httpx

__all__ = ["NO_CERTIFICATES", "AnswerError", "Reply", "ask", "ask_stream", "new_client", "scrape", "settled"]

JSON = dict[str, object]

_TIMEOUT_S: Final = 60.0
_SETTLED_S: Final = 30.0
_PAUSE_S: Final = 0.05
NO_CERTIFICATES: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Trusts nobody: engines here are spoken to in plain http, and httpx would read every certificate for each client."""


class AnswerError(RuntimeError):
    """The answer was an error, or ended early."""


@dataclass(slots=True)
class Reply:
    """An answer."""

    texts: dict[int, str] = field(default_factory=dict[int, str])
    """By choice."""
    token_ids: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """By choice, where the engine was asked for them (`return_token_ids`)."""
    finish: dict[int, object] = field(default_factory=dict[int, object])
    """By choice: why it ended."""
    usage: JSON = field(default_factory=dict[str, object])
    kv_transfer_params: JSON | None = None
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    ttft_s: float = 0.0
    """From sending the request to the first text; without a stream, to the answer."""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.texts[0]

    @property
    def outcome(self) -> tuple[object, ...]:
        """Returns the values that must be equal on two engines that do the same.

        Of the reference engine one token is one character, of others there are token ids, and the end marker counts.
        """
        texts, finish = sorted(self.texts.items()), sorted(self.finish.items())
        return texts, finish, self.usage["completion_tokens"], sorted(self.token_ids.items())

    def count(self, name: str) -> int:
        """A number from `usage`; `cached_tokens` is looked up where OpenAI's API has it."""
        details = cast("JSON", self.usage.get("prompt_tokens_details") or {})
        return cast("int", details.get(name, 0) if name == "cached_tokens" else self.usage[name])


def new_client() -> httpx.AsyncClient:
    """A client for many requests at once."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, limits=limits, verify=NO_CERTIFICATES)


async def ask(client: httpx.AsyncClient, url: str, path: str, body: JSON) -> Reply:
    """Ask for an answer in one piece.

    Raises:
        AnswerError: the status is not 200; the message has the body.
    """
    started = time.monotonic()
    response = await client.post(url + path, json=body)
    if response.status_code != 200:
        raise AnswerError(f"{response.status_code}: {response.text}")
    document = cast("JSON", response.json())
    reply = Reply(headers=response.headers, ttft_s=time.monotonic() - started)
    for choice in cast("list[JSON]", document["choices"]):
        message = cast("JSON", choice.get("message") or {"content": choice.get("text")})
        index = cast("int", choice["index"])
        reply.texts[index] = cast("str", message["content"])
        reply.finish[index] = choice["finish_reason"]
        if ids := cast("list[int] | None", choice.get("token_ids")):
            reply.token_ids[index] = ids
    reply.usage = cast("JSON", document["usage"])
    reply.kv_transfer_params = cast("JSON | None", document.get("kv_transfer_params"))
    return reply


async def ask_stream(client: httpx.AsyncClient, url: str, path: str, body: JSON) -> Reply:
    """Ask for a stream with usage, and put it together.

    Raises:
        AnswerError: the status is not 200, an error event came, or `[DONE]` or a finish reason did not come.
    """
    started = time.monotonic()
    reply = Reply()
    ended = False
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", url + path, json=body) as response:
        if response.status_code != 200:
            raise AnswerError(f"{response.status_code}: {(await response.aread()).decode()}")
        reply.headers = response.headers
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                _take(reply, cast("JSON", json.loads(line.removeprefix("data: "))), started)
    if not ended or not reply.usage or None in reply.finish.values():
        raise AnswerError(f"the stream ended early: {reply}")
    return reply


def _take(reply: Reply, event: JSON, started: float) -> None:
    if "error" in event:
        raise AnswerError(str(event["error"]))
    reply.usage = cast("JSON", event.get("usage") or reply.usage)
    for choice in cast("list[JSON]", event["choices"]):
        delta = cast("JSON", choice.get("delta") or {"content": choice.get("text")})
        index, text = cast("int", choice["index"]), cast("str", delta.get("content") or "")
        if text and not any(reply.texts.values()):
            reply.ttft_s = time.monotonic() - started
        reply.texts[index] = reply.texts.get(index, "") + text
        if ids := cast("list[int] | None", choice.get("token_ids")):
            reply.token_ids.setdefault(index, []).extend(ids)
        reply.finish[index] = choice.get("finish_reason")


async def settled(
    client: httpx.AsyncClient, url: str, more: JSON, so: Callable[[Mapping[str, float]], bool]
) -> dict[str, float]:
    """Returns a server's counters when they are `so`, or as they are after 30 s.

    Some count only when they do something else, so small completions with the members `more` are asked of it meanwhile.
    """
    until_s = time.monotonic() + _SETTLED_S
    while True:
        found = await scrape(client, url)
        if so(found) or time.monotonic() > until_s:
            return found
        await ask(client, url, "/v1/completions", {**more, "prompt": "Go on", "max_tokens": 1, "min_tokens": 0})
        await asyncio.sleep(_PAUSE_S)


async def scrape(client: httpx.AsyncClient, url: str) -> dict[str, float]:
    """The counters and gauges of a server, by name with labels, e.g. `name_total{source="computed"}`."""
    response = await client.get(f"{url}/metrics")
    samples = (line.rpartition(" ") for line in response.text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}
