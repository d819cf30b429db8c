"""Classifies an answer as a client sees it: right and complete, an error in words, or a violation.

It checks every byte, and counts unexpected ones as a violation.
"""

import json
from typing import TYPE_CHECKING, Any

from tests.system.simulation.answers import LOCAL, SECRET
from tests.system.simulation.language import answer_ids, text, tokenize
from tests.system.simulation.scenario import Ask

if TYPE_CHECKING:
    from tests.system.simulation.world import World

__all__ = ["Reply", "judge"]


class Reply:
    """One answer, as it comes."""

    __slots__ = ("body", "headers", "status")

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""


def judge(world: "World", ask: Ask, reply: Reply) -> tuple[str, str | None]:
    """What it is, and what is wrong with it."""
    if SECRET.encode() in reply.body or LOCAL.encode() in reply.body:
        return "whole", "it names an engine's address"
    if ask.way in ("health", "models", "metrics"):
        return "whole", None if reply.body else "it is empty"
    if b'"too_many_connections"' in reply.body and world.scenario.clients_at_once is not None:
        return "an error", None
    if b'"shutting_down"' in reply.body and world.stopping and b"x-request-id" not in reply.headers:
        return "an error", None  # its head had not arrived
    if ask.own_id and reply.headers.get(b"x-request-id") != f"id-{ask.prompt[:-1]}".encode():
        return "whole", "it has another request's id"
    expected = text(answer_ids(tokenize(ask.prompt), ask.tokens))
    if reply.status == 200 and reply.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
        return _judge_stream(world, ask, reply.body, expected)
    try:
        document: Any = json.loads(reply.body)
    except ValueError:
        return "whole", "it is not JSON"
    if reply.status >= 400:
        if document["error"]["code"] == "kv_expired" and world.scenario.lease_ms is None:
            return "an error", "no lease is that short"
        kind = "refused" if ask.way == "invalid" else "an error"
        return kind, None if document["error"]["message"] else "it is not an error in words"
    if ask.way == "invalid":
        return "whole", "the request was invalid"
    choice = document["choices"][0]
    said = choice["message"]["content"] if ask.chat else choice["text"]
    if said != expected:
        return "whole", f"it should say {expected!r}"
    if document.pop("kv_transfer_params", None) is not None or set(document) != {"id", "object", "choices", "usage"}:
        return "whole", "it has other members"
    return "whole", _judge_usage(world, ask, document["usage"])


def _judge_stream(world: "World", ask: Ask, body: bytes, expected: str) -> tuple[str, str | None]:
    events = body.split(b"\n\n")
    if events.pop():
        return "whole", "its last event does not end"
    said = ""
    usage: dict[str, Any] | None = None
    done = failed = False
    for event in events:
        if done or (failed and event != b"data: [DONE]"):
            return "whole", "something follows its end"
        if event == b"data: [DONE]":
            done = True
            continue
        if not event.startswith(b"data: "):
            return "whole", "it has a line that is no data"
        try:
            document: dict[str, Any] = json.loads(event[6:])
        except ValueError:
            return "whole", "it has an event that is not JSON"
        if "error" in document:
            failed = True
            continue
        if document.get("usage") is not None:
            usage = document["usage"]
        for choice in document["choices"]:
            if ask.chat and "stop_reason" in choice and choice["finish_reason"] is None:
                return "whole", "it has a reason to stop before its end"
            said += (choice["delta"].get("content") or "") if ask.chat else choice["text"]
            if "token_ids" in choice or "prompt_token_ids" in document or "prompt_token_ids" in choice:
                return "whole", "it has token ids, which nobody has asked for"
    if not expected.startswith(said):
        return "whole", f"it should say {expected!r}"
    if failed:
        return "an error midway", None
    if said != expected or not done:
        return "whole", f"it ends as if it were whole, and is not: {expected!r}"
    if ask.usage and usage is None:
        return "whole", "it has no usage"
    return "whole", None if usage is None else _judge_usage(world, ask, usage)


def _judge_usage(world: "World", ask: Ask, usage: dict[str, Any]) -> str | None:
    prompt = len(tokenize(ask.prompt))
    if (usage["prompt_tokens"], usage["completion_tokens"]) != (prompt, ask.tokens):
        return f"its usage should be {prompt} and {ask.tokens}"
    cached = {"cached_tokens": prompt // 4} if world.scenario.reports_cached else None
    untold = "prompt_tokens_details" not in usage and world.scenario.alone and world.scenario.continues
    if untold:  # the one engine that knew has failed behind its last token
        return None
    if usage.get("prompt_tokens_details") != cached and prompt == usage["prompt_tokens"] and not world.continued(ask):
        return f"its cached tokens should be {cached}"
    return None
