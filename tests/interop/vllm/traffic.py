"""Defines the requests by which engines are compared, and reads their answers."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from demo.client import NO_CERTIFICATES
from tests.interop.vllm.engines import ANSWER_S

__all__ = ["BOUNDARIES", "Ask", "answer", "answers", "mixed"]

BOUNDARIES: Final = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130, 160, 255, 256, 257, 300, 383, 384, 385, 512, 700)
"""Prompt lengths around the ends of blocks of 32 and of pages of 128 tokens."""
_WORDS: Final = (
    "key",
    "value",
    "cache",
    "page",
    "block",
    "store",
    "engine",
    "prefill",
    "decode",
    "prompt",
    "load",
    "save",
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    prompt: str | Sequence[int]
    """For a chat the words of the user."""
    max_tokens: int = 12
    chat: bool = False
    stream: bool = False

    def body(self) -> dict[str, object]:
        """What is sent."""
        told = {"messages": [{"role": "user", "content": self.prompt}]} if self.chat else {"prompt": self.prompt}
        body = {"model": "tiny", "max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True, **told}
        return {**body, "stream": True} if self.stream else {**body, "return_token_ids": True}


def mixed(count: int, seed: int = 0) -> list[Ask]:
    """Lengths around boundaries first, then shared prefixes, words, chats and streams."""
    chance = random.Random(seed)
    ids = [chance.randrange(300, 2000) for _ in range(1024)]
    asks = [Ask([chance.randrange(300, 2000) for _ in range(size)]) for size in BOUNDARIES]
    while len(asks) < count:
        kind = len(asks) % 4
        words = " ".join(chance.choices(_WORDS, k=chance.randrange(20, 250)))
        if kind == 0:
            shared = chance.choice((128, 200, 256, 500))
            own = [chance.randrange(300, 2000) for _ in range(chance.randrange(1, 150))]
            asks.append(Ask(ids[:shared] + own, stream=chance.random() < 0.3))
        elif kind == 1:
            asks.append(Ask(words, stream=chance.random() < 0.3))
        else:
            asks.append(Ask(words, chat=True, stream=chance.random() < 0.3))
    return asks[:count]


def answer(client: httpx.Client, url: str, ask: Ask) -> str:
    """The answer as text that is equal only if the tokens are: token ids where they can be had, else the words."""
    path = "/v1/chat/completions" if ask.chat else "/v1/completions"
    if not ask.stream:
        response = client.post(url + path, json=ask.body())
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        return json.dumps(choice["token_ids"])
    text = ""
    with client.stream("POST", url + path, json=ask.body()) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                text += _words(json.loads(line[6:]))
    return text


def _words(event: dict[str, Any]) -> str:
    words = ""
    for one in event["choices"]:
        delta: dict[str, str | None] = one.get("delta") or {}
        words += delta.get("content") or one.get("text") or ""
    return words


def answers(url: str, asks: Sequence[Ask]) -> list[str]:
    """One after the other."""
    with httpx.Client(timeout=ANSWER_S, verify=NO_CERTIFICATES) as client:
        return [answer(client, url, ask) for ask in asks]
