"""Sends a few requests a second, so that there is something to see while everything is kept up."""

import asyncio
from collections.abc import Mapping
from random import Random
from typing import Final

import httpx

from demo.client import JSON, AnswerError, ask_stream
from demo.display import Display
from demo.texts import CONVERSATIONS, Conversation

__all__ = ["drive_traffic"]

_MOST_RUNNING: Final = 8
_LEAST_TOKENS, _MOST_TOKENS = 8, 48
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def drive_traffic(
    client: httpx.AsyncClient, url: str, per_s: float, display: Display, more: Mapping[str, object]
) -> None:
    """Sends turns of the conversations, until it is cancelled. A failure is shown once.

    Args:
        client: sends them.
        url: the proxy's.
        per_s: requests per second, on average.
        display: shows the first failure.
        more: members of every request.
    """
    random = Random(12957)
    room = asyncio.Semaphore(_MOST_RUNNING)
    has_failed = False

    async def send(conversation: Conversation, turns: int, tokens: int) -> None:
        nonlocal has_failed
        try:
            body = {**_body(conversation, turns), "max_tokens": tokens, **more}
            await ask_stream(client, url, _CHAT if conversation.endpoint == "chat" else _COMPLETIONS, body)
        except (AnswerError, httpx.HTTPError) as error:
            if not has_failed:
                display.step(f"a request of the light traffic failed: {error}")
            has_failed = True
        finally:
            room.release()

    async with asyncio.TaskGroup() as tasks:
        while True:
            await room.acquire()
            conversation = random.choice(CONVERSATIONS)
            turns = random.randint(1, len(conversation.turns))
            tasks.create_task(send(conversation, turns, random.randint(_LEAST_TOKENS, _MOST_TOKENS)))
            await asyncio.sleep(random.expovariate(per_s))


def _body(conversation: Conversation, turns: int) -> JSON:
    """Returns the request with these turns: the longer ones begin as the shorter ones do."""
    asked = conversation.turns[:turns]
    stream: JSON = {"stream": True, "stream_options": {"include_usage": True}}
    if conversation.endpoint != "chat":
        return {"prompt": "\n".join((conversation.opening, *asked)), **stream}
    messages = [{"role": "system", "content": conversation.opening}]
    for number, text in enumerate(asked):
        if number:
            messages.append({"role": "assistant", "content": "And then?"})
        messages.append({"role": "user", "content": text})
    return {"messages": messages, **stream}
