"""Pseudo tokens for a prompt whose tokenizer nobody has: its bytes, four to a token, about as much as a real one holds.

They cost a copy. The one rule: requests whose prompts begin alike have pseudo tokens that begin alike; what a
conversation's next turn adds stands behind what was there. No vocabulary is large enough to have one of them.
"""

from array import array
from collections.abc import Mapping
from typing import Final

from kvparams.jsontext import Field
from kvparams_proxy.clients.endpoints import EndpointKind

__all__ = ["BYTES_PER_TOKEN", "pseudo_tokens"]

BYTES_PER_TOKEN: Final = 4
_LATE: Final = b'}] \t\r\n"'
"""What ends a prompt here, and goes on where the next turn's does."""

_TAIL: Final = 64


def pseudo_tokens(kind: EndpointKind, body: bytes, spans: Mapping[str, Field]) -> "array[int]":
    """Of a request for completions or chat, as the client has written it. Tools come first, as templates have them.

    The same text written in another way (other escapes, other spaces) has others.
    """
    names = ("tools", "messages") if kind == "chat" else ("prompt",)
    view = memoryview(body)  # a copy of a long body takes milliseconds
    parts = [view[field.value : _end(body, field)] for name in names if (field := spans.get(name))]
    text = parts[0] if len(parts) == 1 else b"".join(parts)
    ids = array("I")
    ids.frombytes(text[: len(text) - len(text) % BYTES_PER_TOKEN])
    return ids


def _end(body: bytes, field: Field) -> int:
    """Where a member's value ends, but for what ends any prompt."""
    end = field.end
    while end > field.value:
        tail = body[max(field.value, end - _TAIL) : end]
        kept = len(tail.rstrip(_LATE))
        end -= len(tail) - kept
        if kept:
            break
    return end
