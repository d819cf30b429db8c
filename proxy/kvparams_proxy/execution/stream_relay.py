"""Carries a decode engine's stream to the client as it arrives.

The one rule: nothing reaches the client before the first whole event with content is here, so that until then the
request can still be answered in another way; from then on events leave together as they came together, within a fixed
buffer.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, Protocol

from kvparams.errors import JSONTextError
from kvparams_proxy.event_loop.clock import Clock
from kvparams_proxy.execution.response_corrector import (
    ResponseCorrector,
    load_response,
    require_complete_event,
    require_no_error,
)
from kvparams_proxy.execution.response_privacy import embedded_error
from kvparams_proxy.execution.sse import (
    LARGE_EVENT_BYTES,
    SSEBuffer,
    done_event_end,
    elide_token_lists,
    restore_token_lists,
)
from kvparams_proxy.execution.stream_continuation import StreamRecorder
from kvparams_proxy.requests.downstream import Downstream
from kvparams_proxy.upstream.types import BodyBuffer, ResponseHead, UpstreamError, UpstreamErrorResponse

__all__ = ["StreamRelay", "StreamRelayObserver"]


_EVENT_STREAM: Final = b"content-type: text/event-stream; charset=utf-8\r\n"
"""Written by us: what an engine adds to it may say where it is."""
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
_CONTENT: Final = b'"choices":[{"'
"""The same in the spelling of most engines, and of what is put together here."""
_NO_SPELLING: Final = b'"choices"\n\n'
"""Occurs in no event: for engines that spell it now in one way and now in another."""
_DELTA: Final = b'.delta"'
"""The type of the events that have content in a stream of `/v1/responses`."""
_ROLE_ONLY: Final = re.compile(
    rb'"delta"~:~\{~"role"~:~"assistant"~(?:,~"[a-z_]{1,64}+"~:~(?:""|null|\[~\])~){0,16}\}'.replace(
        b"~", rb"[ \t\r\n]{0,64}+"
    )
)
"""In an event of a chat that announces an answer and has nothing of it."""
_BEGINNING: Final = 4 << 10
"""Bytes in which a chat shows that it is one."""
_MOST_ERROR_BYTES: Final = 8 << 10
"""Of an answer in place of a stream, in which an error is looked for."""
_HELD_BYTES: Final = 8 << 20
"""The most that is held before the first event with content: one event of any length, and what came before it."""


class StreamRelayObserver(Protocol):
    """Whoever owns the request."""

    def stream_held(self) -> None:
        """Where it is gated: there is something to send."""
        ...

    def stream_begun(self) -> None:
        """The first whole event is about to be sent."""
        ...

    def stream_complete(self) -> None:
        """The client has the last event; the engine has only to end its response."""
        ...

    def stream_ended(
        self, head: ResponseHead, whole: bytes, error: UpstreamError | None, sent_bytes: int, sent_events: int
    ) -> None:
        """The answer is complete, or will never be. `whole` is the body of one that is no stream; of one that is, the
        client was sent so many bytes, and so many events with content."""
        ...


class StreamRelay:
    """A sink for one streaming answer."""

    __slots__ = (
        "_begins",
        "_begun",
        "_clock",
        "_complete",
        "_content",
        "_corrections",
        "_cut",
        "_done",
        "_downstream",
        "_ended",
        "_gated",
        "_head",
        "_headers",
        "_heard",
        "_held",
        "_limit",
        "_listener",
        "_recorder",
        "_resumed",
        "_sent_bytes",
        "_sent_events",
        "_spoken",
        "_streaming",
        "_streams",
        "_unfinished",
        "_whole",
        "last_content_s",
    )

    def __init__(
        self,
        downstream: Downstream,
        headers: bytes,
        corrections: ResponseCorrector,
        limit_bytes: int,
        listener: StreamRelayObserver,
        clock: Clock,
        recorder: StreamRecorder | None = None,
        *,
        done: bool = True,
        choices: bool = False,
        gated: bool = False,
        streams: bool = False,
    ) -> None:
        """
        Args:
            downstream: the client.
            headers: whole lines that it gets beside content-type.
            corrections: of every event.
            limit_bytes: an answer that is no stream fits in.
            listener: who owns the request.
            clock: what time-outs are measured by.
            done: whether the last event is `[DONE]`: a stream without it was cut off.
            choices: whether content stands in `choices`: a stream without one is no answer.
            gated: whether all of it is held until `release_held`.
            streams: whether the client's endpoint has streams: then an answer that is none is a failure.
            recorder: where the stream may have to be continued; one that has resumed goes on where the client is.
        """
        self._downstream = downstream
        self._headers = headers
        self._corrections = corrections
        self._listener = listener
        self._clock = clock
        self.last_content_s = clock.time()
        """When the last event came that says something to the client; at first, when its engine was asked. Comments,
        empty events and bytes of an event that is not complete do not count: an engine that sends nothing else is
        silent."""
        self._head = ResponseHead()
        self._recorder = recorder
        self._resumed = recorder is not None and recorder.resumed
        self._done = done
        self._begins: Callable[[bytes | bytearray], re.Match[bytes] | bool | None] = (
            _first_choice if choices else _says_something
        )
        self._begun = False
        self._gated = gated
        self._ended = False
        """Whether it has ended well, and waits for `release_held`."""
        self._content = _CONTENT if choices else _DELTA
        """What each event with content has in it once, as this engine spells it until it spells it in another way."""
        self._heard = False
        """Whether there was an event at all that says something, before the first with content."""
        self._held = bytearray()
        self._complete = False
        """Whether the last event was sent: nothing may follow."""
        self._sent_bytes = 0
        self._sent_events = 0
        self._spoken = not choices
        """Whether an event had more in it than the role of who answers: until then, each is looked at."""
        self._streaming = False
        self._streams = streams
        self._unfinished = SSEBuffer()
        self._cut = False
        """Whether there is a part of an event in it."""
        self._whole = BodyBuffer(limit_bytes)
        """An answer that is no stream."""

    def on_head(self, head: ResponseHead) -> None:
        """Decide whether this is a stream at all."""
        self._head = head
        self._streaming = head.status == 200 and head.content_type.lower().startswith(b"text/event-stream")

    def on_body(self, data: bytes) -> None:
        """Send on all whole events, corrected, in one write; keep the rest.

        Raises:
            JSONTextError: an event is not what it should be.
            UpstreamError: it is too long, an error, or behind the last one.
            ValueError: an answer that is no stream is too long.
        """
        if not self._streaming:
            self._whole.add(data)
        elif self._complete:
            if data.strip():
                raise UpstreamError("the engine's stream goes on behind its last event")
        elif not self._cut and data.endswith(b"\n\n"):  # nearly always: an engine sends events whole
            self._send(data)
        else:
            events = self._unfinished.feed(data)
            self._cut = len(self._unfinished) > 0
            if events:
                self._send(events)

    @property
    def complete(self) -> bool:
        """Whether the client has the last event."""
        return self._complete

    def release_held(self) -> UpstreamError | None:
        """What is held may be sent now. What is wrong with it, where the exchange has not ended yet."""
        self._gated = False
        events = bytes(self._held)
        self._held.clear()
        error: UpstreamError | None = None
        try:
            if events:
                self._send(events)
        except UpstreamError as refused:
            error = refused
        except JSONTextError as fault:
            error = UpstreamError(f"the engine's stream is not what it should be: {fault}")
        if not self._ended:
            return error
        self.on_done(error)
        return None

    def on_done(self, error: UpstreamError | None) -> None:
        """Say how it went; the owner does the rest."""
        if self._gated and error is None and self._head.status == 200 and self._worth_waiting():
            self._ended = True
            return
        if error is None and self._cut and not self._complete:
            tail = self._unfinished.take()
            try:
                require_complete_event(tail)
                self._send(tail + b"\n\n")
            except UpstreamError as wrong:
                error = wrong
            except JSONTextError:
                error = UpstreamError("the engine's stream ends in the middle of an event")
        whole = self._whole.take()
        if self._complete:  # whatever came after it, the client has everything
            error = None
        elif error is None and self._streaming and (self._done or not self._begun):
            how = "too early" if self._begun else "without content" if self._heard else "without an event"
            error = UpstreamError(f"the engine's stream ended {how}")
        elif error is None and self._head.status == 200 and not self._streaming and (self._streams or self._resumed):
            error = _no_stream(whole)
        self._listener.stream_ended(self._head, whole, error, self._sent_bytes, self._sent_events)

    def _worth_waiting(self) -> bool:
        """Whether it has answered. Who has not may never have met the prefill that would be waited for."""
        return self._streaming and bool(self._begins(self._held))

    def _send(self, events: bytes) -> None:
        """
        Raises:
            JSONTextError: an event is not what it should be.
            UpstreamError: examining the events would take too long.
            UpstreamErrorResponse: the engine says in the stream that it has failed.
        """
        lists: list[bytes] | None = None
        whole = None
        if len(events) > LARGE_EVENT_BYTES:
            whole = events
            events, lists = elide_token_lists(whole)
        if not self._begun:
            begins = None if self._gated else self._begins(events)
            if not begins:  # it commits to nothing, or nobody may commit to it yet
                self._hold(whole or events, events)
                if self._gated and self._begins(events):
                    self._listener.stream_held()
                return
            if isinstance(begins, re.Match) and not self._resumed:
                self._content = begins.group()
            if self._held:
                events = bytes(self._held) + (whole or events)
                self._held.clear()
                lists = whole = None
                if len(events) > LARGE_EVENT_BYTES:
                    whole = events
                    events, lists = elide_token_lists(whole)
        end = done_event_end(events) if events.find(b"[DONE]") >= 0 and self._done else -1
        behind = b""
        if end >= 0:
            events, behind = events[:end], events[end:]
            if lists is not None:
                whole = restore_token_lists(events, lists)
        recorder = self._recorder
        if recorder is not None:
            events = recorder.events(events, whole)
        try:
            corrected = self._corrections.correct_events(events)
        except UpstreamErrorResponse as refusal:
            if refusal.preceding_events and (self._begun or self._begins(refusal.preceding_events)):
                self._write(refusal.preceding_events, restore_token_lists(refusal.preceding_events, lists or []))
            raise
        except (JSONTextError, UpstreamError):
            if recorder is not None:
                recorder.undo_last()
            raise
        self._write(corrected, restore_token_lists(corrected, lists) if lists else corrected)
        if end >= 0:
            self._complete = True
            self._listener.stream_complete()
            if behind.strip() or self._unfinished.take().strip():
                raise UpstreamError("the engine's stream goes on behind its last event")

    def _hold(self, whole: bytes, events: bytes) -> None:
        """Keeps events without content: `whole`, which are `events` with their long lists of token ids.

        Raises:
            JSONTextError: one is not what it should be.
            UpstreamError: they are too many or too long.
            UpstreamErrorResponse: one is an error.
        """
        if _says_something(events):
            self._heard = True
            require_no_error(events)
        self._held += whole
        if len(self._held) > _HELD_BYTES:
            raise UpstreamError("the engine's stream holds nothing but comments and empty events")

    def _write(self, corrected: bytes, body: bytes) -> None:
        """Sends `body`: these events, with the lists that were cut out of them."""
        if not self._begun:
            self._begun = True
            self._listener.stream_begun()
            if not self._resumed:
                self._downstream.head(200, _EVENT_STREAM + self._headers, None)
        self._downstream.body(body)
        self._sent_bytes += len(body)
        number = corrected.count(self._content) or self._respelled(corrected)  # one search, however many they are
        if number:
            self._sent_events += number
            if not self._spoken and not self._speaks(corrected, number):
                return
            self.last_content_s = self._clock.coarse_time_s

    def _respelled(self, corrected: bytes) -> int:
        """Returns how many of these events have content, spelled as it was not before; from then on all are counted
        here. In a stream of `/v1/responses`, every event that says something is progress as well."""
        if self._content is _DELTA:
            if _says_something(corrected):
                self.last_content_s = self._clock.coarse_time_s
            return 0
        number = sum(1 for _ in _content_in(corrected))
        if number:
            self._content = _NO_SPELLING
        return number

    def _speaks(self, corrected: bytes, number: int) -> bool:
        """Returns whether these are more than events that name a role, or the first of those: an answer that begins."""
        chat = corrected.find(b'"delta"', 0, _BEGINNING) >= 0
        long = len(corrected) > LARGE_EVENT_BYTES  # then it says more than who speaks
        self._spoken = not chat or long or number > len(_ROLE_ONLY.findall(corrected))
        return self._spoken or self._sent_events == number


def _first_choice(events: bytes | bytearray) -> re.Match[bytes] | None:
    """Returns what matches `_CHOICE` first, or None."""
    return next(_content_in(events), None)


def _content_in(events: bytes | bytearray) -> Iterator[re.Match[bytes]]:
    """Yields what matches `_CHOICE`. Looking for the word alone is ten times as fast where there are none."""
    at = events.find(_CHOICES)
    for _ in range(_MOST_CHOICES):
        if at < 0:
            return
        found = _CHOICE.match(events, at)
        if found is not None:
            yield found
        at = events.find(_CHOICES, at + len(_CHOICES))


def _says_something(events: bytes | bytearray) -> bool:
    return _FIRST_DATA.match(events) is not None or _DATA.search(events) is not None


def _no_stream(whole: bytes) -> UpstreamError:
    """Returns what is wrong with an answer to a client that has asked for a stream. OpenAI's clients read no event in
    it, and would take it for an empty answer."""
    reported = None
    if len(whole) <= _MOST_ERROR_BYTES:
        with suppress(JSONTextError):
            reported = embedded_error(load_response(whole))
    if reported is not None:
        return UpstreamErrorResponse(reported)
    return UpstreamError("the engine's answer is no stream, and a stream was asked for")
