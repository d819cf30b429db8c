"""Defines the requests of a measurement: prompts of a size, whole or streamed, at a concurrency. Pure.

The same scenario is the same bytes in every run, up to the counter that makes each prompt another. Names: `ns` whole
answers, `stb` streams as fast as the engine can, `st` streams paced at 20 ms; `s` 200 and `l` 8,000 tokens of prompt;
the number is how many requests are in flight.
"""

import json
import random
from dataclasses import dataclass

from benchmarks.load_client import Target

__all__ = ["SCENARIOS", "Scenario"]

_MODEL = "stub"
_WORDS = (
    "a key page lease block token cache engine prefill decode reads holds sends waits while each of the next one is at "
    "rest and then again before it moves to where some other part had been in short order by way of this"
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A `Scenario` is a row of the table."""

    name: str
    prompt_tokens: int
    """Words of about one token each."""
    stream: bool
    max_tokens: int
    concurrency: int
    requests: int
    """In one round of the closed loop; set so that a round takes a second or two."""
    itl_ms: float = 0.0

    @property
    def events(self) -> int | None:
        """Events of one stream, `[DONE]` included."""
        return self.max_tokens + 1 if self.stream else None

    @property
    def body(self) -> bytes:
        """The request body, with the place of the counter in it."""
        draw = random.Random(self.name)
        prompt = " ".join([*draw.choices(_WORDS.split(), k=self.prompt_tokens), "@@@@@@@@"])
        document = {"model": _MODEL, "prompt": prompt, "max_tokens": self.max_tokens, "temperature": 0.0}
        return json.dumps({**document, "stream": self.stream}).encode()

    def target(self, port: int) -> Target:
        """This scenario, asked of the server on that port."""
        return Target(port=port, path="/v1/completions", body=self.body, stream=self.stream, events=self.events)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("ns-s-64", prompt_tokens=200, stream=False, max_tokens=16, concurrency=64, requests=4000),
        Scenario("ns-l-64", prompt_tokens=8000, stream=False, max_tokens=16, concurrency=64, requests=2500),
        Scenario("stb-s-64", prompt_tokens=200, stream=True, max_tokens=64, concurrency=64, requests=2000),
        Scenario("st-s-64", prompt_tokens=200, stream=True, max_tokens=64, concurrency=64, requests=128, itl_ms=20),
    )
}
