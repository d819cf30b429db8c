"""Makes the answers of conforming engines, in the ways in which KV is spoken of.

A *carrier* is one of these ways: our document, the dictionary of vLLM's NixlConnector, or SGLang's bootstrap members.
In the last two nobody speaks of it: engines find it by `content`, or an `aggregated` engine goes on itself.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from kvparams_conformance.conversation import Conversation, ScriptedAnswer, SeenLeg

__all__ = [
    "CACHED_TOKENS",
    "Carrier",
    "chunk",
    "completion",
    "decode_answer",
    "error_answer",
    "load_keys",
    "nixl_params",
    "prefill_answer",
    "prefill_result",
    "stream",
]

Carrier = Literal["document", "nixl", "bootstrap", "content", "aggregated"]
CACHED_TOKENS: Final = 3
"""The cached tokens that prefill counts; decode counts others."""
_PROMPT_TOKENS: Final = 7


def completion(
    leg: SeenLeg, text: str, *, cached: int = 0, tokens: int = 1, finish: str = "length", **members: Any
) -> dict[str, Any]:
    """Returns the answer of an engine, in the shape of the endpoint that was asked."""
    is_chat = "chat" in leg.path
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
    choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    usage = {
        "prompt_tokens": _PROMPT_TOKENS,
        "completion_tokens": tokens,
        "total_tokens": _PROMPT_TOKENS + tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    made = {"id": f"cmpl-{leg.engine}", "object": "chat.completion" if is_chat else "text_completion", "created": 1}
    return {**made, "model": "m", "choices": [choice], "usage": usage, **members}


def prefill_result(talk: Conversation, leg: SeenLeg, **changes: Any) -> dict[str, Any]:
    """Returns a conforming `prefill_result` for a leg, with some members changed."""
    asked = leg.document
    document: dict[str, Any] = {
        "version": "1.0",
        "request_id": asked.get("request_id", "r"),
        "transfer": asked.get("transfer", {"id": "t", "attempt": 1}),
        "phase": "prefill_result",
        "mode": asked.get("mode", "store"),
        "load_keys": load_keys(talk, leg),
        "producer": {"id": f"{leg.engine}-{talk.tag}", "incarnation": "1763640000-12"},
        "lease": {"ttl_ms": 30000},
    }
    return {name: value for name, value in {**document, **changes}.items() if value is not ...}


def load_keys(talk: Conversation, leg: SeenLeg) -> list[str]:
    """Returns the keys that prefill answers with: of no other conversation, and of no other leg."""
    return [f"agreed.{talk.tag}.{leg.engine}.{leg.order}.{page}" for page in range(2)]


def nixl_params(talk: Conversation, leg: SeenLeg, **changes: Any) -> dict[str, Any]:
    """Returns what vLLM's NixlConnector answers, with some members changed."""
    params: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": f"engine-{leg.engine}",
        "remote_block_ids": [[812, 813, talk.number % 100_000]],
        "remote_request_id": f"cmpl-{talk.tag}-{leg.order}",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
    }
    return {name: value for name, value in {**params, **changes}.items() if value is not ...}


def prefill_answer(carrier: Carrier, talk: Conversation, leg: SeenLeg, **changes: Any) -> ScriptedAnswer:
    """Returns the answer of a conforming prefill engine."""
    if carrier in ("bootstrap", "content", "aggregated"):
        return decode_answer(leg, "p")
    params = nixl_params(talk, leg, **changes)
    if carrier == "document":
        params = {"kvparams": prefill_result(talk, leg, **changes)} if leg.document else {}
    return ScriptedAnswer(body=_dump(completion(leg, "p", cached=CACHED_TOKENS, kv_transfer_params=params)))


def decode_answer(leg: SeenLeg, text: str = "answer") -> ScriptedAnswer:
    """Returns the answer of a conforming decode engine: a stream if one was asked for."""
    if leg.json.get("stream") is True:
        return stream(leg, ["an", "sw", "er"])
    return ScriptedAnswer(body=_dump(completion(leg, text, tokens=8)))


def chunk(leg: SeenLeg, text: str, finish: str | None = None, **members: Any) -> str:
    """Returns one event of a stream."""
    is_chat = "chat" in leg.path
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    choice |= {"delta": {"content": text}} if is_chat else {"text": text}
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    made = {"id": f"cmpl-{leg.engine}", "object": kind, "created": 1, "model": "m", "choices": [choice], **members}
    return f"data: {json.dumps(made, ensure_ascii=False)}\n\n"


def stream(
    leg: SeenLeg,
    texts: list[str],
    *,
    cut: Callable[[bytes], tuple[bytes | float, ...]] = lambda text: (text,),
    done: bool = True,
    end: Literal["whole", "cut", "hang"] = "whole",
    members: Mapping[str, Any] | None = None,
) -> ScriptedAnswer:
    """Returns a stream of events. `cut` splits its bytes into parts; `members` stand in every event."""
    events = [chunk(leg, text, **(members or {})) for text in texts[:-1]]
    events.append(chunk(leg, texts[-1], "length", **(members or {})))
    whole = "".join([*events, "data: [DONE]\n\n" if done else ""]).encode()
    return ScriptedAnswer(content_type="text/event-stream", parts=cut(whole), end=end)


def error_answer(status: int, message: str, param: str | None = None) -> ScriptedAnswer:
    """Returns an engine's error."""
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return ScriptedAnswer(status, _dump({"error": error}))


def _dump(value: object) -> bytes:
    return json.dumps(value).encode()
