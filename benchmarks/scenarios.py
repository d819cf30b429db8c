"""Defines the requests of a measurement: prompts of a size, whole or streamed, at a concurrency. Pure.

The same scenario is the same bytes in every run, up to the counter that makes each prompt another. Names: `ns` whole
answers to a text prompt, `chat` the same as a chat, `ids` the same as token ids, `stb` streams as fast as the engine
can, `st` streams paced at 20 ms; `s` 200 and `l` 8,000 tokens of prompt; the number is how many requests are in flight.
"""

import json
import random
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["SCENARIOS", "Scenario"]

_MODEL: Final = "stub"
_WORDS: Final = (
    "a key page lease block token cache engine prefill decode reads holds sends waits while each of the next one is at "
    "rest and then again before it moves to where some other part had been in short order by way of this"
)
_SHARED: Final = 0.73
"""The part of a prompt of token ids that all requests have in common."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A `Scenario` is a row of the table."""

    name: str
    title: str
    """For a plot."""
    prompt_tokens: int
    """Token ids, or words of about one token each."""
    stream: bool
    max_tokens: int
    concurrency: int
    requests: int
    """In one round of the closed loop; set so that a round takes a second or two."""
    itl_ms: float = 0.0
    prompt: Literal["text", "chat", "ids"] = "text"

    @property
    def path(self) -> str:
        """The path that requests go to."""
        return "/v1/chat/completions" if self.prompt == "chat" else "/v1/completions"

    @property
    def shared(self) -> float:
        """The part of a prompt that all requests have in common: what an engine's cache would have of it."""
        return _SHARED if self.prompt == "ids" else 1.0

    @property
    def events(self) -> int | None:
        """Events of one stream, `[DONE]` included."""
        return self.max_tokens + 1 if self.stream else None

    @property
    def body(self) -> bytes:
        """The request body, with the place of the counter in it."""
        end = {"max_tokens": self.max_tokens, "temperature": 0.0, "stream": self.stream}
        draw = random.Random(self.name)
        if self.prompt == "ids":
            ids = [str(each) for each in draw.choices(range(1000, 128_000), k=self.prompt_tokens)]
            ids[int(_SHARED * self.prompt_tokens)] = "2@@@@@@@@"
            return b'{"model": "stub", "prompt": [%b], %b' % (", ".join(ids).encode(), json.dumps(end)[1:].encode())
        text = " ".join([*draw.choices(_WORDS.split(), k=self.prompt_tokens), "@@@@@@@@"])
        if self.prompt == "chat":
            messages = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": text}]
            return json.dumps({"model": _MODEL, "messages": messages, **end}).encode()
        return json.dumps({"model": _MODEL, "prompt": text, **end}).encode()


def _whole(name: str, title: str, tokens: int, requests: int, prompt: Literal["text", "chat", "ids"]) -> Scenario:
    return Scenario(name, title, tokens, False, max_tokens=16, concurrency=64, requests=requests, prompt=prompt)


def _stream(name: str, title: str, requests: int, itl_ms: float) -> Scenario:
    return Scenario(name, title, 200, True, max_tokens=64, concurrency=64, requests=requests, itl_ms=itl_ms)


SCENARIOS: Final = {
    scenario.name: scenario
    for scenario in (
        _whole("ns-s-64", "200 tokens, whole answer", 200, 6000, "text"),
        _whole("ns-l-64", "8,000 tokens, whole answer", 8000, 3000, "text"),
        _whole("chat-s-64", "chat of 200 tokens, whole answer", 200, 6000, "chat"),
        _whole("chat-l-64", "chat of 8,000 tokens, whole answer", 8000, 3000, "chat"),
        _whole("ids-l-64", "8,000 token ids, whole answer", 8000, 3000, "ids"),
        _stream("stb-s-64", "stream of 64 events, burst", 2000, 0.0),
        _stream("st-s-64", "stream of 64 events, 20 ms apart", 128, 20.0),
    )
}
