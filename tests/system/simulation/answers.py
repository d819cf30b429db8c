"""Provides engines' answers, as bytes on the wire, and their faults.

Every fault can be told from the answer itself. An engine that lies in well-formed HTTP and JSON is believed.
"""

import json
from collections.abc import Generator
from enum import Enum
from random import Random
from typing import TYPE_CHECKING, Any, cast

from tests.system.simulation.language import text, tokenize

if TYPE_CHECKING:
    from tests.system.simulation.engines import Engine
    from tests.system.simulation.legs import Leg

__all__ = [
    "ANSWERING",
    "CONNECTING",
    "LOCAL",
    "PREFILLED",
    "RECEIVED",
    "SECRET",
    "STREAMING",
    "TURNING",
    "Do",
    "Step",
    "Steps",
    "answering",
    "framed",
    "json_answer",
    "prompt_ids",
    "stream_events",
    "whole_answer",
]

SECRET = "secret-host"
"""Begins every address that no client may see ..."""
LOCAL = "127.0.0.7"
"""... but that of an engine behind a broker: its node is beside it, and nobody else knows where."""
_ERROR = b'data: {"error":{"message":"cuda died at %b","type":"x","code":500}}\n\ndata: [DONE]\n\n'


class Do(Enum):
    """What ends a leg in another way than an answer."""

    END = "end"
    RESET = "reset"
    STALL = "stall"
    CRASH = "crash"


Step = float | bytes | Do
Steps = Generator[Step, None, None]

CONNECTING = ("refuse", "refuse", "stall", "reset", "slow")
RECEIVED = ("reset", "end", "stall", "late", "500", "503", "429", "400", "garbage", "crash", "freeze", "no json")
PREFILLED = ("no params", "bad params", "no json", "null params")
ANSWERING = (
    "reset",
    "end",
    "half end",
    "half reset",
    "half stall",
    "stall",
    "late",
    "garbage",
    "crash",
    "freeze",
    "twice",
    "extra",
)
STREAMING = (*ANSWERING, *ANSWERING, "error event", "bad event", "bad event", "short")
TURNING = ("503", "503", "503", "429", "busy", "busy", "busy")
"""Of an engine that is well, and has enough to do."""


def framed(random: Random, name: str, kind: str, parts: list[bytes]) -> list[bytes]:
    """As HTTP, in pieces; an empty one at the end is the end of the connection."""
    draw = random.random()
    head = f"HTTP/1.1 200 OK\r\nserver: {name}\r\ncontent-type: {kind}\r\n"
    if draw < 0.05:
        first = b"HTTP/1.1 100 Continue\r\ncontent-length: 0\r\n\r\n" if draw < 0.02 else b""
        return [first + f"{head}connection: close\r\n\r\n".encode(), *parts, b""]
    if kind == "application/json" and draw < 0.9:
        pieces = [f"{head}content-length: {len(parts[0])}\r\n\r\n".encode() + parts[0]]
    else:
        chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts]
        pieces = [f"{head}transfer-encoding: chunked\r\n\r\n".encode(), *chunks, b"0\r\n\r\n"]
    if draw > 0.97:
        pieces.insert(0, b"HTTP/1.1 100 Continue\r\n\r\n")
    draw = random.random()
    if draw < 0.1:
        return [b"".join(pieces)]
    if draw < 0.2:
        whole = b"".join(pieces)
        cuts = sorted(random.randrange(len(whole)) for _ in range(4))
        return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True) if a != b]
    return pieces


def answering(engine: "Engine", pieces: list[bytes], faults: tuple[str, ...], leg: "Leg | None" = None) -> Steps:
    """Send what `framed` made, unless something goes wrong. `leg`: one that streams."""
    world = engine.world
    for index, piece in enumerate(pieces):
        if index:
            yield world.pause()
            if leg is not None:
                world.touch(leg, "chunk")
        fault = world.fault(engine.name, f"sending piece {index}", faults)
        if fault is None:
            yield piece if piece else Do.END
            continue
        half = piece[: world.random.randrange(len(piece)) if piece else 0]
        if fault in ("reset", "end", "stall", "crash"):
            yield Do(fault)
        elif fault == "late":
            yield 0.3
            yield piece if piece else Do.END
        elif fault == "freeze":
            engine.freeze(0.6)
            yield 0.0001
            yield piece if piece else Do.END
        elif fault.startswith("half"):
            yield half
            yield Do(fault[5:])
        elif fault == "garbage":
            yield b"zz\r\n\0\xff" + half
            yield Do.RESET  # it may have been as long as what was missing
        elif fault == "twice":  # in one write: later it could not be told from the answer to the next request
            yield b"".join(pieces[index:]) + (b"".join(pieces) if pieces[-1] else b"")
            yield from _end(pieces)
            return
        elif fault == "extra":
            extra = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nxyz"
            yield b"".join(pieces[index:]) + (extra if pieces[-1] else b"")
            yield from _end(pieces)
            return
        elif not pieces[-1]:
            yield Do.END
        elif fault == "bad event" and world.scenario.continues and (event := _chunk(piece)) is not None:
            event += b'data: {"choices": [\n\n'  # in the same chunk; who does not record a stream does not read it
            yield b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)
            return
        elif not piece.partition(b"\r\n")[0].isalnum():  # it is in the middle of a chunk
            yield Do.STALL
        else:  # it ends in order, and too early
            said = _ERROR % engine.host.encode()
            yield b"%x\r\n%b\r\n0\r\n\r\n" % (len(said), said) if fault == "error event" else b"0\r\n\r\n"
            return
    fault = world.fault(engine.name, "at the end", ("end", "reset"))
    if fault is not None:
        yield Do(fault)


def _chunk(piece: bytes) -> bytes | None:
    """The event of a piece that is one chunk with one event, which has a choice."""
    size, _, rest = piece.partition(b"\r\n")
    event = rest[:-2]
    said = event.startswith(b"data: {") and b'"choices": []' not in event
    return event if said and size == b"%x" % len(event) else None


def _end(pieces: list[bytes]) -> Steps:
    if not pieces[-1]:
        yield Do.END


def json_answer(status: int, body: bytes) -> bytes:
    """A short one, in one piece."""
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


def prompt_ids(body: dict[str, Any], path: str) -> list[int]:
    """What is asked, in tokens."""
    if path == "/v1/chat/completions":
        return tokenize(cast("str", body["messages"][0]["content"]))
    prompt: object = body["prompt"]
    return tokenize(prompt) if isinstance(prompt, str) else cast("list[int]", prompt)


def _usage(ids: list[int], tokens: int, cached: int | None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {
        "prompt_tokens": len(ids),
        "completion_tokens": tokens,
        "total_tokens": len(ids) + tokens,
        "prompt_tokens_details": details,
    }


def whole_answer(body: dict[str, Any], ids: list[int], answer: list[int], cached: int | None) -> dict[str, Any]:
    """An answer that is no stream; `cached` of its prompt tokens were, None: it does not say."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    if "messages" in body:
        choice["message"] = {"role": "assistant", "content": text(answer)}
    else:
        choice["text"] = text(answer)
    if body.get("return_token_ids"):
        choice |= {"token_ids": answer, "prompt_token_ids": ids}
    return {"id": "x", "object": "o", "choices": [choice], "usage": _usage(ids, len(answer), cached)}


def stream_events(body: dict[str, Any], ids: list[int], answer: list[int], cached: int | None) -> list[bytes]:
    """The events of a stream; `cached` as above."""
    chat = "messages" in body
    wants_ids = bool(body.get("return_token_ids"))
    events: list[dict[str, Any]] = []
    unsaid: list[int] = []
    for index, one in enumerate(answer):
        choice: dict[str, Any] = {"index": 0}
        last = index == len(answer) - 1
        unsaid.append(one)
        said = text(unsaid) if last or one % 4 else ""  # half a letter: it is said with the next token
        if said:
            unsaid.clear()
        if chat:
            choice["delta"] = {"content": said}
        else:
            choice["text"] = said
        choice["finish_reason"] = "length" if last else None
        if last or not chat:
            choice["stop_reason"] = None
        event: dict[str, Any] = {"id": "x", "object": "o", "choices": [choice]}
        if wants_ids:
            choice["token_ids"] = [one]
            if index == 0:
                (event if chat else choice)["prompt_token_ids"] = ids
        events.append(event)
    options: dict[str, Any] = body.get("stream_options") or {}
    if options.get("include_usage"):
        usage = _usage(ids, len(answer), cached)
        events.append({"id": "x", "object": "o", "choices": [], "usage": usage})
    return [*(b"data: %b\n\n" % json.dumps(event).encode() for event in events), b"data: [DONE]\n\n"]
