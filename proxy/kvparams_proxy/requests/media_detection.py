"""Finds out whether a chat has images, audio or video in it, and names the first one by its content.

The text is searched, because the messages of a long body are not parsed. What is missed, such as a member whose name is
written with escapes, is encoded where there is no encode engine; what is taken for a medium and is none costs one leg.
"""

import re
from collections.abc import Generator, Mapping
from typing import Final, cast

import xxhash

from kvparams.jsontext.scanner import MemberSpan
from kvparams_proxy.requests.endpoints import EndpointKind

__all__ = ["find_media_in_steps", "may_have_media"]

_SEARCHED: Final[Mapping[EndpointKind, str]] = {"chat": "messages", "messages": "messages", "responses": "input"}
"""The member that holds messages."""
_HINTS: Final = (b'_url"', b'"image"', b'"input_audio"')
"""What such parts have in them, to be looked for first: that is much faster."""
_MEDIUM: Final = re.compile(
    rb'[{,\s]"(?:(?:image_url|audio_url|video_url|input_audio)"[ \t\r\n]*:|type"[ \t\r\n]*:[ \t\r\n]*"image")'
)
"""A part of OpenAI's APIs, and one of Anthropic's. A quote within a string follows a backslash, so this is never found
inside one. Sources: vLLM 0.32.0 entrypoints/chat_utils.py, entrypoints/anthropic/protocol.py."""
_CONTENT: Final = re.compile(rb'[ \t\r\n]*+(?:"|.{0,1024}?"(?:url|data)"[ \t\r\n]*+:[ \t\r\n]*+")', re.DOTALL)
"""What stands between that and the medium, or the URL of one. Quantifiers that give nothing back keep it linear."""
_SOURCE: Final = re.compile(rb'"(?:url|data)"[ \t\r\n]*+:[ \t\r\n]*+"')
"""What stands before the medium in a `source` of Anthropic's API."""
_SOURCE_NAME: Final = b'"source"'
_WHITE_SPACE: Final = b" \t\r\n"
_LONGEST_CONTENT: Final = 4 << 10
"""Of `_CONTENT`: white space may be as long as the body."""
_CONTAINERS: Final = b"[{"
_WINDOW_BYTES: Final = 16 << 10
_LONGEST_MEMBER: Final = 64
"""A match may reach so far from one window into the next."""
_HASHED_BYTES: Final = 64 << 10
"""Of a medium. Two that begin alike only go to the same engine."""


def may_have_media(kind: EndpointKind, document: Mapping[str, object]) -> bool:
    """Returns whether a parsed chat has messages that are more than one text each: most have not."""
    items = document.get(_SEARCHED.get(kind, ""))
    if type(items) is not list:
        return False
    if kind == "responses":
        return True
    messages = cast("list[dict[str, object]]", items)
    return any(type(message.get("content")) is list for message in messages)


def find_media_in_steps(kind: EndpointKind, body: bytes, spans: Mapping[str, MemberSpan]) -> Generator[None, None, str]:
    """Returns the name of the first medium of a chat, or an empty text; see `RequestFacts.media`.

    Args:
        kind: of the request.
        body: its text.
        spans: where its members stand.
    """
    field = spans.get(_SEARCHED.get(kind, ""))
    if field is None or body[field.value] not in _CONTAINERS:
        return ""
    for at in range(field.value, field.end, _WINDOW_BYTES):
        stop = min(field.end, at + _WINDOW_BYTES + _LONGEST_MEMBER)
        if max(body.find(hint, at, stop) for hint in _HINTS) >= 0:
            found = _MEDIUM.search(body, at, stop)
            if found is not None:
                return _name(body, found.start(), found.end(), field)
        yield
    return ""


def _name(body: bytes, first: int, at: int, field: MemberSpan) -> str:
    """Returns the name of a medium.

    Args:
        body: the text.
        first: where the match of `_MEDIUM` begins.
        at: where it ends.
        field: all messages.
    """
    start = _source_start(body, first, field.value)
    if start < 0:
        content = _CONTENT.match(body, at, min(field.end, at + _LONGEST_CONTENT))
        if content is None:  # nothing of the text around it is taken for the medium
            return xxhash.xxh3_64_hexdigest(b"")
        start = content.end()
    stop = min(field.end, start + _HASHED_BYTES)
    close = body.find(b'"', start, stop)
    return xxhash.xxh3_64_hexdigest(body[start : stop if close < 0 else close])


def _source_start(body: bytes, first: int, low: int) -> int:
    """Returns where the medium begins whose `source` ends before `first`, where its part has a type.

    It is -1 where the member before the type is no source. Of a long medium it is a place close to its end.
    """
    low = max(low, first - _HASHED_BYTES)
    before = body[low : first + 1].rstrip(_WHITE_SPACE + b",").rstrip(_WHITE_SPACE)
    if not before.endswith(b"}"):
        return -1
    brace = before.rfind(b"{")
    if brace < 0:
        return low
    if not before[:brace].rstrip(_WHITE_SPACE + b":").endswith(_SOURCE_NAME):
        return -1
    source = _SOURCE.search(before, brace)
    return low + (brace if source is None else source.end())
