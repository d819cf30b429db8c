"""Pseudo tokens for a prompt whose tokenizer nobody has: its bytes, four to a token, about as much as a real one holds.

They cost a copy. Prompts with a common beginning have pseudo tokens with a common beginning, and the next turn of a
conversation adds its own behind. No vocabulary is large enough to contain one of them.
"""

from array import array
from collections.abc import Mapping
from typing import Final

from kvparams.jsontext.document import MemberSpan
from kvparams_proxy.requests.endpoints import EndpointKind

__all__ = ["BYTES_PER_TOKEN", "MAX_PSEUDO_TOKENS", "pseudo_tokens"]

BYTES_PER_TOKEN: Final = 4
_LATE: Final = b'}] \t\r\n"'
"""What ends a prompt here, and goes on where the next turn's does."""

_PROMPT: Final = ("prompt",)
_MEMBERS: Final[Mapping[EndpointKind, tuple[str, ...]]] = {
    "chat": ("tools", "messages"),
    "messages": ("tools", "system", "messages"),
    "responses": ("tools", "instructions", "input"),
}
"""Members that make up a prompt, in the order of most templates."""
_TAIL: Final = 64
MAX_PSEUDO_TOKENS: Final = 1 << 17
"""As many are made of one prompt."""
_MOST_BYTES: Final = MAX_PSEUDO_TOKENS * BYTES_PER_TOKEN


def pseudo_tokens(kind: EndpointKind, body: bytes, spans: Mapping[str, MemberSpan]) -> "tuple[array[int], int]":
    """Returns the pseudo tokens of a request as the client has written it, and how many there are.

    Of a long prompt they are the first ones, which are all that routing looks at. Tools come first, as templates have
    them.

    The same text written in another way (other escapes, other spaces) has others.
    """
    names = _MEMBERS.get(kind, _PROMPT)
    view = memoryview(body)  # a copy of a long body takes milliseconds
    parts = [view[field.value : _end(body, field)] for name in names if (field := spans.get(name))]
    count = sum(map(len, parts)) // BYTES_PER_TOKEN
    text = b"".join(part[:_MOST_BYTES] for part in parts)
    ids = array("I")
    ids.frombytes(text[: BYTES_PER_TOKEN * min(count, MAX_PSEUDO_TOKENS)])
    return ids, count


def _end(body: bytes, field: MemberSpan) -> int:
    """Returns the end of a member's value without the closing bytes that end any prompt."""
    end = field.end
    while end > field.value:
        tail = body[max(field.value, end - _TAIL) : end]
        kept = len(tail.rstrip(_LATE))
        end -= len(tail) - kept
        if kept:
            break
    return end
