"""Runs streaming clients that know the right answer, and classifies how each request ended.

A request has ended at its deadline, in exactly one of these ways: right, a refusal (an error status), an error event,
or one that must never happen: wrong, cut (no end and no error), late.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal, cast

__all__ = ["Asked", "Question", "Seen", "ask", "question"]

Seen = Literal["right", "refused", "error event", "wrong", "cut", "late"]


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and what one engine answers."""

    path: str
    body: dict[str, Any]
    answer: tuple[str, object, int] | None = None
    """Text, why it ended, completion tokens."""


@dataclass(slots=True)
class Asked:
    """One request and how it ended."""

    began_s: float
    """On the clock of `time.monotonic`."""
    seen: Seen = "late"
    ended_s: float = 0.0
    first_s: float = 0.0
    """When the first byte came."""
    status: int = 0
    said: str = ""
    """The error's code, or what was wrong."""
    route: list[str] = field(default_factory=list[str])
    """The engines, as they were when the answer began."""
    front: str = ""
    """Who was asked, where there are several."""
    answer: tuple[str, object, int] | None = None


def question(path: str, prompt: str, max_tokens: int) -> Question:
    """A greedy stream of exactly so many tokens."""
    asked: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    if path == "/v1/completions":
        return Question(path, {"prompt": prompt, **asked})
    return Question(path, {"messages": [{"role": "user", "content": prompt}], **asked})


async def ask(port: int, what: Question, deadline_s: float, salt: str | None = None) -> Asked:
    """Ask for a stream; `salt` keeps its KV apart from everybody else's. Never raises for what a server does."""
    asked = Asked(time.monotonic())
    raw = json.dumps(what.body if salt is None else {**what.body, "cache_salt": salt}).encode()
    lines = "host: x\r\nconnection: close\r\ncontent-type: application/json"
    head = f"POST {what.path} HTTP/1.1\r\n{lines}\r\ncontent-length: {len(raw)}\r\n\r\n"
    got = b""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head.encode() + raw)
            while piece := await reader.read(1 << 16):
                asked.first_s = asked.first_s or time.monotonic()
                got += piece
    except TimeoutError:
        asked.said = f"after {len(got)} bytes"
    except OSError as error:
        asked.seen, asked.said = "cut", str(error)
    else:
        _judge(asked, what, got)
    finally:
        if writer is not None:
            writer.transport.abort()
    asked.ended_s = time.monotonic()
    return asked


def _judge(asked: Asked, what: Question, got: bytes) -> None:
    top, found, body = got.partition(b"\r\n\r\n")
    if not found:
        asked.seen, asked.said = "cut", "no head"
        return
    lines = top.decode("latin-1").split("\r\n")
    asked.status = int(lines[0].split()[1])
    headers = [line.lower().split(": ", 1) for line in lines[1:]]
    asked.route = [value for name, value in headers if name in ("x-kvparams-prefill", "x-kvparams-decode")]
    if ["transfer-encoding", "chunked"] in headers:
        whole = _unchunked(body)
        if whole is None:
            asked.seen, asked.said = "cut", "the last chunk is missing"
            return
        body = whole
    if asked.status != 200:
        error: dict[str, Any] = json.loads(body)["error"]
        asked.seen, asked.said = "refused", f"{asked.status} {error['code']}"
        return
    text, finish, tokens, ended = "", None, -1, False
    for event in body.split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        if data == b"[DONE]":
            ended = True
        elif data:
            document = cast("dict[str, Any]", json.loads(data))
            if "error" in document:
                asked.seen, asked.said = "error event", str(document["error"]["code"])
                return
            if document.get("usage"):
                tokens = document["usage"]["completion_tokens"]
            for choice in document["choices"]:
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                finish = choice["finish_reason"] or finish
    asked.answer = (text, finish, tokens)
    if not ended:
        asked.seen, asked.said = "cut", "[DONE] is missing"
    elif what.answer is not None and asked.answer != what.answer:
        asked.seen, asked.said = "wrong", f"{asked.answer} is not {what.answer}"
    else:
        asked.seen = "right"


def _unchunked(body: bytes) -> bytes | None:
    """The body; None where its last chunk is missing."""
    parts: list[bytes] = []
    at = 0
    while True:
        end = body.find(b"\r\n", at)
        if end < 0:
            return None
        size = int(body[at:end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 4 + size
