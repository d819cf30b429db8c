"""Runs a proxy in front of actors (`acting.py`), and records what its clients see.

Answers are compared whole, except for ids and times.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tests.support.proxy.acting import Actor

__all__ = ["BODY", "CHATS", "COMPLETIONS", "Stage", "StartStage", "events_of", "text_of"]

PROMPT = "Who is there?"
BODY: dict[str, Any] = {"model": "stub", "prompt": PROMPT, "max_tokens": 8}
CHAT: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


class Stage:
    """A proxy before two engines of each role."""

    def __init__(self, running: Any, prefill: Sequence[Actor], decode: Sequence[Actor]) -> None:
        self.running = running
        self.prefill, self.decode = prefill, decode
        self.of: Mapping[str, Sequence[Actor]] = {"prefill": prefill, "decode": decode}

    async def ask(self, path: str = COMPLETIONS, **more: Any) -> Any:
        return await self.running.client.post(path, json=(CHAT if path == CHATS else BODY) | more)

    async def settled(self) -> bool:
        """Nothing is in flight and no load is counted, here and there."""
        if any(actor.open for actors in self.of.values() for actor in actors):
            return False
        return await self.running.metric("kvparams_proxy_in_flight") == 0

    def transfers(self, role: str) -> list[str]:
        return [found.transfer.id for actor in self.of[role] for found in actor.documents]


StartStage = Callable[..., Awaitable[Stage]]


def text_of(got: Any, stream: bool) -> str:
    if not stream:
        return got.json()["choices"][0]["text"]
    *events, done = [event.removeprefix("data: ") for event in got.text.split("\n\n") if event]
    assert done == "[DONE]"
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def events_of(got: Any) -> list[Any]:
    """The events of a stream, ids and times apart."""
    assert got.status_code == 200
    events = [event.removeprefix("data: ") for event in got.text.split("\n\n") if event]
    return [json.loads(e) | {"id": 0, "created": 0} if e.startswith("{") else e for e in events]
