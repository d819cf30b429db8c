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


def pseudo_tokens(kind: EndpointKind, body: bytes, spans: Mapping[str, Field]) -> "array[int]":
    """Of a request for completions or chat, as the client has written it. Tools come first, as templates have them.

    The same text written in another way (other escapes, other spaces) has others.
    """
    names = ("tools", "messages") if kind == "chat" else ("prompt",)
    text = b"".join(body[field.value : field.end].rstrip(_LATE) for name in names if (field := spans.get(name)))
    ids = array("I")
    ids.frombytes(text[: len(text) - len(text) % BYTES_PER_TOKEN])
    return ids
