"""Recognition of events with content in a stream, by pattern instead of by a parser.

A quote in a JSON string is escaped, so text that a model writes never looks like a member of an event.
"""

import re
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from kvparams_proxy.execution.sse import DONE, LARGE_EVENT_BYTES, done_event_end, named_event_end
from kvparams_proxy.requests.endpoints import APIEndpoint

__all__ = [
    "CONTENT_TEXT",
    "NO_SPELLING",
    "StreamForm",
    "find_content",
    "first_content",
    "has_data",
    "names_role_only",
    "stream_form",
]

# White space is bounded and never given back: what an engine fills an event with is walked over once.
_DATA: Final = re.compile(rb"\ndata:[ \t]{0,64}+\{")
_FIRST_DATA: Final = re.compile(rb"data:[ \t]{0,64}+\{")
"""The first event that says something."""
_CHOICES: Final = b'"choices"'
_GAP: Final = rb"[ \t\r\n]{0,64}+(?:(?<=\n)data:[ \t\r\n]{0,64}+){0,4}"
_CHOICE: Final = re.compile(rb'"choices"_:_\[_\{_[^ \t\r\n}]'.replace(b"_", _GAP))
"""Matches an event with content from `"choices"` on, of an endpoint whose answers stand there. Inside a JSON string a
quote is escaped, so what a model writes does not look like it."""
_MOST_CHOICES: Final = 1024
"""Places that are compared with `_CHOICE` in one turn of the event loop: it brings about so many events at most."""
CONTENT_TEXT: Final = b'"choices":[{"'
"""The same in the spelling of most engines, and of what is put together here."""
NO_SPELLING: Final = b'"choices"\n\n'
"""Occurs in no event: for engines that spell it now in one way and now in another."""
_RESPONSES_CONTENT: Final = b'.delta"'
"""The end of the type of the events that have content in a stream of `/v1/responses`."""
_MESSAGES_CONTENT: Final = b"content_block_delta\ndata:"
"""Occurs in the events that have content in a stream of `/v1/messages`. A JSON string holds no line break."""
_MESSAGES_BEGIN: Final = re.compile(
    rb"(?:^|\n)event:[ \t]{0,64}+(?:content_block_(?:delta|stop)|message_(?:delta|stop))[ \t]{0,64}+[\r\n]"
)
_RESPONSES_BEGIN: Final = re.compile(
    rb"(?:^|\n)event:[ \t]{0,64}+response\.(?!created|in_progress|queued)[a-z_.]{1,64}+(?<!\.added)[ \t]{0,64}+[\r\n]"
)
"""Match events behind which no other engine can answer. Those in front of them only announce an answer."""
_MESSAGES_LAST: Final = rb"event:[ \t]{0,64}+message_stop[ \t]{0,64}+[\r\n]"
_RESPONSES_LAST: Final = rb"event:[ \t]{0,64}+response\.(?:completed|incomplete|failed|cancelled)[ \t]{0,64}+[\r\n]"
_KEEP_ALIVE: Final = b"event: ping"
_ROLE_ONLY: Final = re.compile(
    rb'"delta"~:~\{~"role"~:~"assistant"~(?:,~"[a-z_]{1,64}+"~:~(?:""|null|\[~\])~){0,16}\}'.replace(
        b"~", rb"[ \t\r\n]{0,64}+"
    )
)
"""In an event of a chat that announces an answer and has nothing of it."""
_BEGINNING: Final = 4 << 10
"""Bytes in which a chat shows that it is one."""


_FindsContent = Callable[[bytes | bytearray], re.Match[bytes] | bool | None]


class StreamForm(NamedTuple):
    """The form of the streams of an endpoint."""

    begins: _FindsContent
    """Finds the first event that commits to an answer."""
    content: bytes
    """Occurs once in each event with content. Of choices it is one spelling among others."""
    has_choices: bool = False
    """Whether content stands in `choices`."""
    last_word: bytes | None = None
    """Occurs in the last event and in few others. None where the end of a stream is not marked."""
    last_end: Callable[[bytes, int], int] = done_event_end
    """Returns the position behind the last event, or -1, given where `last_word` stands first."""

    def says_something(self, events: bytes) -> bool:
        """Returns whether these events, of which none has content, are progress all the same."""
        return not self.has_choices and has_data(events) and _KEEP_ALIVE not in events


def stream_form(endpoint: APIEndpoint) -> StreamForm:
    """Returns the form of the streams of an endpoint."""
    if endpoint.kind == "messages":
        return _MESSAGES_FORM
    if endpoint.kind == "responses":
        return _RESPONSES_FORM
    if endpoint.kind != "other":
        return _CHOICES_FORM
    return _OTHER_FORM if endpoint.sends_done_event else _UNMARKED_FORM


def first_content(events: bytes | bytearray) -> re.Match[bytes] | None:
    """Returns what matches `_CHOICE` first, or None."""
    return next(find_content(events), None)


def find_content(events: bytes | bytearray) -> Iterator[re.Match[bytes]]:
    """Yields what matches `_CHOICE`. Looking for the word alone is ten times as fast where there are none."""
    at = events.find(_CHOICES)
    for _ in range(_MOST_CHOICES):
        if at < 0:
            return
        found = _CHOICE.match(events, at)
        if found is not None:
            yield found
        at = events.find(_CHOICES, at + len(_CHOICES))


def has_data(events: bytes | bytearray) -> bool:
    """Returns whether an event says something: it is no comment, and not empty."""
    return _FIRST_DATA.match(events) is not None or _DATA.search(events) is not None


def names_role_only(events: bytes, number: int) -> bool:
    """Returns whether `number` events with content only announce an answer of a chat: they name a role, and no text."""
    if events.find(b'"delta"', 0, _BEGINNING) < 0 or len(events) > LARGE_EVENT_BYTES:  # a long event says more
        return False
    return number <= len(_ROLE_ONLY.findall(events))


def _messages_begin(events: bytes | bytearray) -> bool:
    return _MESSAGES_BEGIN.search(events) is not None


def _responses_begin(events: bytes | bytearray) -> bool:
    return _RESPONSES_BEGIN.search(events) is not None


_CHOICES_FORM: Final = StreamForm(first_content, CONTENT_TEXT, has_choices=True, last_word=DONE)
_OTHER_FORM: Final = StreamForm(has_data, _RESPONSES_CONTENT, last_word=DONE)
_UNMARKED_FORM: Final = StreamForm(has_data, _RESPONSES_CONTENT)
_MESSAGES_FORM: Final = StreamForm(
    _messages_begin, _MESSAGES_CONTENT, last_word=b"message_stop", last_end=named_event_end(_MESSAGES_LAST)
)
_RESPONSES_FORM: Final = StreamForm(
    _responses_begin, _RESPONSES_CONTENT, last_word=b'"response"', last_end=named_event_end(_RESPONSES_LAST)
)
