"""Carries a decode engine's stream to the client as it arrives.

Invariant: nothing reaches the client before the first whole event with content, so that until then another engine can
answer the request. Comments and empty events do not count. From then on events leave together as they came together,
within a fixed buffer.
"""

import re
from contextlib import suppress
from typing import Final, Protocol

from kvparams.errors import JSONTextError
from kvparams_proxy.event_loop.clock import Clock
from kvparams_proxy.execution.response_corrector import ResponseCorrector, require_complete_event, require_no_error
from kvparams_proxy.execution.response_document import embedded_error, load_response
from kvparams_proxy.execution.sse import (
    DONE,
    LARGE_EVENT_BYTES,
    SSEBuffer,
    elide_token_lists,
    restore_token_lists,
)
from kvparams_proxy.execution.stream_content import (
    NO_SPELLING,
    find_content,
    has_data,
    names_role_only,
    stream_form,
)
from kvparams_proxy.execution.stream_continuation import StreamRecorder
from kvparams_proxy.requests.downstream import Downstream
from kvparams_proxy.requests.endpoints import APIEndpoint
from kvparams_proxy.upstream.types import BodyBuffer, ResponseHead, UpstreamError, UpstreamErrorResponse

__all__ = ["StreamRelay", "StreamRelayObserver"]


_DONE_EVENT: Final = b"data: [DONE]"
_EVENT_STREAM: Final = b"content-type: text/event-stream; charset=utf-8\r\n"
"""Written by us: what an engine adds to it may say where it is."""
_MOST_ERROR_BYTES: Final = 8 << 10
"""Of an answer in place of a stream, in which an error is looked for."""
_HELD_BYTES: Final = 8 << 20
"""The most that is held before the first event with content: one event of any length, and what came before it."""


class StreamRelayObserver(Protocol):
    """The owner of the request, as its stream relay sees it."""

    def stream_held(self) -> None:
        """Hears that a gated relay has something to send."""
        ...

    def stream_begun(self) -> None:
        """Hears that the first whole event is about to be sent."""
        ...

    def stream_complete(self) -> None:
        """Hears that the client has the last event; the engine has only to end its response."""
        ...

    def stream_ended(
        self, head: ResponseHead, whole: bytes, error: UpstreamError | None, sent_bytes: int, sent_events: int
    ) -> None:
        """Hears that the answer is complete, or will never be.

        `whole` is the body of one that is no stream. Of a stream, the client was sent so many bytes, and so many events
        with content.
        """
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
        "_form",
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
        endpoint: APIEndpoint,
        recorder: StreamRecorder | None = None,
        *,
        gated: bool = False,
    ) -> None:
        """Creates the relay of one answer.

        Args:
            downstream: the client.
            headers: whole lines that it gets beside content-type.
            corrections: correct every event.
            limit_bytes: the longest answer that is no stream.
            listener: the owner of the request.
            clock: measures time-outs.
            endpoint: how its streams look, and whether it has any.
            recorder: remembers a stream that may have to be continued on another engine.
            gated: whether everything is held until `release_held`.
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
        form = self._form = stream_form(endpoint)
        self._done = form.last_word is not None
        self._begins = form.begins
        self._begun = self._streaming = False
        self._gated = gated
        self._ended = False  # whether it has ended well, and waits for `release_held`
        self._content = form.content
        """Occurs once in each event with content, as this engine spells it until it spells it in another way."""
        self._heard = False  # whether an event without content has said something
        self._held = bytearray()
        self._complete = False  # whether the last event was sent: nothing may follow
        self._sent_bytes = self._sent_events = 0
        self._spoken = not form.has_choices
        """Whether an event had more in it than the role of who answers: until then, each is looked at."""
        self._streams = endpoint.supports_streaming
        self._unfinished = SSEBuffer()
        self._cut = False  # whether there is a part of an event in it
        self._whole = BodyBuffer(limit_bytes)  # an answer that is no stream

    def on_head(self, head: ResponseHead) -> None:
        """Decides whether the response is a stream."""
        self._head = head
        self._streaming = head.status == 200 and head.content_type.lower().startswith(b"text/event-stream")

    def on_body(self, data: bytes) -> None:
        """Sends all whole events, corrected, in one write, and keeps the rest.

        Raises:
            JSONTextError: an event is not what it should be.
            UpstreamError: it is too long, an error, or behind the last one.
            ValueError: an answer that is no stream is too long.
        """
        if not self._streaming:
            self._whole.add(data)
        elif self._complete:
            if self._goes_on(data):
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
        """True once the client has the last event."""
        return self._complete

    def release_held(self) -> UpstreamError | None:
        """Sends the held events. Returns the error in them, if there is one and the exchange has not ended yet."""
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
            error = UpstreamError(f"the engine's stream is invalid: {fault}")
        if not self._ended:
            return error
        self.on_done(error)
        return None

    def on_done(self, error: UpstreamError | None) -> None:
        """Tells the owner how the exchange has ended."""
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
        """Returns whether the decode engine has begun its answer.

        An engine that has not may never meet the prefill that would be waited for.
        """
        return self._streaming and bool(self._begins(self._held))

    def _send(self, events: bytes) -> None:
        """Sends whole events, corrected, to the client.

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
            if isinstance(begins, re.Match) and not self._resumed:  # a spelling of `choices`
                self._content = begins.group()
            if self._held:
                events = bytes(self._held) + (whole or events)
                self._held.clear()
                lists = whole = None
                if len(events) > LARGE_EVENT_BYTES:
                    whole = events
                    events, lists = elide_token_lists(whole)
        word = self._form.last_word
        at = -1 if word is None else events.find(word)
        end = -1 if at < 0 else self._form.last_end(events, at)
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
            if self._goes_on(behind + self._unfinished.take()):
                raise UpstreamError("the engine's stream goes on behind its last event")

    def _goes_on(self, behind: bytes) -> bool:
        """Returns whether there is anything behind the last event. Behind a named one, `[DONE]` says nothing more."""
        rest = behind.strip()
        return bool(rest) and (self._form.last_word == DONE or rest != _DONE_EVENT)

    def _hold(self, whole: bytes, events: bytes) -> None:
        """Keeps events without content: `whole`, which are `events` with their long lists of token ids.

        Raises:
            JSONTextError: one is not what it should be.
            UpstreamError: they are too many or too long.
            UpstreamErrorResponse: one is an error.
        """
        if has_data(events):
            self._heard = True
            if self._form.has_choices or b'"error"' in events:
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
        """Returns the number of these events with content in a new spelling, which is counted from then on.

        In streams without choices, every event that says something is progress as well.
        """
        if not self._form.has_choices:
            if self._form.says_something(corrected):
                self.last_content_s = self._clock.coarse_time_s
            return 0
        number = sum(1 for _ in find_content(corrected))
        if number:
            self._content = NO_SPELLING
        return number

    def _speaks(self, corrected: bytes, number: int) -> bool:
        """Returns whether these are more than events that name a role, or the first of those: an answer that begins."""
        self._spoken = not names_role_only(corrected, number)
        return self._spoken or self._sent_events == number


def _no_stream(whole: bytes) -> UpstreamError:
    """Returns the error of an answer that is no stream, to a client that has asked for one.

    OpenAI's clients read no event in it, and would take it for an empty answer.
    """
    reported = None
    if len(whole) <= _MOST_ERROR_BYTES:
        with suppress(JSONTextError):
            reported = embedded_error(load_response(whole))
    if reported is not None:
        return UpstreamErrorResponse(reported)
    return UpstreamError("the engine's answer is not a stream, but the client requested one")
