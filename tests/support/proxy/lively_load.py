"""Sends conversations to a proxy in front of stub engines, so that its live page has something to show."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from random import Random
from typing import Any, Final

import httpx

from tests.support.stub_answers import Ask

__all__ = ["CachingWork", "lively_load"]

_TOPICS: Final = ("the law", "writing code", "cooking", "travel", "gardening")
_WEIGHTS: Final = (9, 5, 3, 2, 1)
_BLOCK_TOKENS: Final = 16
_LEAST_S: Final = 0.02
_TOKENS_PER_S: Final = 12_000
_BYTES_PER_TOKEN: Final = 4
"""As `--tokenizer bytes` counts."""


class CachingWork:
    """The prefix cache of a stub engine: it reports as cached what earlier prompts began with. A `Work`."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def begun(self, ask: Ask, body: bytes, now_s: float) -> tuple[Ask, float]:
        """Looks up a prompt, and keeps it."""
        prompt = str(json.loads(body).get("prompt", ""))
        size = _BLOCK_TOKENS * _BYTES_PER_TOKEN
        blocks = [hash(prompt[:end]) for end in range(size, len(prompt), size)]
        found = next((number for number, block in enumerate(blocks) if block not in self._seen), len(blocks))
        self._seen.update(blocks)
        tokens = len(prompt) // _BYTES_PER_TOKEN
        computed = tokens - found * _BLOCK_TOKENS
        ask = replace(ask, cached_tokens=found * _BLOCK_TOKENS, prompt_tokens=tokens)
        return ask, _LEAST_S + computed / _TOKENS_PER_S


@asynccontextmanager
async def lively_load(
    client: httpx.AsyncClient, per_s: float, *, seed: int = 1, refused: float = 0.02
) -> AsyncGenerator[None]:
    """Sends so many requests each second while the block runs. `refused`: the share of those that are not valid."""
    task = asyncio.create_task(_send(client, per_s, Random(seed), refused))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _send(client: httpx.AsyncClient, per_s: float, random: Random, refused: float) -> None:
    sessions = [_Conversation(random) for _ in range(24)]
    async with asyncio.TaskGroup() as group:
        while True:
            await asyncio.sleep(random.expovariate(per_s))
            conversation = random.choice(sessions)
            body = conversation.next_request()
            if random.random() < refused:
                body["max_tokens"] = 0
            group.create_task(_ask(client, body))


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    with suppress(httpx.HTTPError):
        await client.post("/v1/completions", json=body)


class _Conversation:
    """A conversation whose prompt grows with each turn, and begins anew when it is long."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._begin()

    def _begin(self) -> None:
        topic = self._random.choices(_TOPICS, _WEIGHTS)[0]
        self._prompt = f"You are an assistant for {topic}. " * self._random.choice((30, 30, 60))

    def next_request(self) -> dict[str, Any]:
        """Returns the body of the next turn."""
        if len(self._prompt) > 16_000:
            self._begin()
        self._prompt += f" Turn {self._random.randrange(1000)}." * self._random.randrange(5, 60)
        return {
            "model": "stub",
            "prompt": self._prompt,
            "max_tokens": self._random.randrange(4, 100),
            "stream": self._random.random() < 0.9,
            "stream_options": {"include_usage": True},
        }
