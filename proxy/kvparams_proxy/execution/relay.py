"""Carries a decode engine's stream to the client as it arrives.

The one rule: nothing reaches the client before the first whole event with content is here, so that until then the
request can still be answered in another way; from then on events leave together as they came together, within a fixed
buffer.
"""

import re
from collections.abc import Callable
from typing import Final, Protocol

from kvparams.errors import JSONTextError
from kvparams_proxy.clients.downstream import Downstream
from kvparams_proxy.execution.continuation import Recorder
from kvparams_proxy.execution.corrections import (
    Corrections,
    check_event,
    check_no_error,
    complete_events,
    is_answer,
)
from kvparams_proxy.upstream.terms import Head, UpstreamError, UpstreamRefusal

__all__ = ["Listener", "Relay"]


_EVENT_STREAM: Final = b"content-type: text/event-stream; charset=utf-8\r\n"
"""Written by us: what an engine adds to it may say where it is."""
_DATA: Final = re.compile(rb"(?:\A|\n)data:[ \t]*\{")
"""The first event that says something."""
_CHOICE: Final = re.compile(rb'"choices"_:_\[_\{_[^ \t\r\n}]'.replace(b"_", rb"(?:[ \t\r\n]|\ndata:)*"))
"""The first event with content, of an endpoint whose answers stand in `choices`. Inside a JSON string a quote is
escaped, so what a model writes does not look like it."""
_CONTENT: Final = b'"choices":[{"'
"""The same in the spelling of most engines, and of what is put together here."""
_DELTA: Final = b'.delta"'
"""The type of the events that have content in a stream of `/v1/responses`."""
_DONE: Final = re.compile(rb"(?:\A|[\r\n])data:[ \t]*\[DONE\][ \t]*[\r\n]")
"""The last event."""
_TAIL_BYTES: Final = 64


class Listener(Protocol):
    """Whoever owns the request."""

    def stream_held(self) -> None:
        """Where it is gated: there is something to send."""
        ...

    def stream_begun(self) -> None:
        """The first whole event is about to be sent."""
        ...

    def stream_ended(
        self, head: Head, whole: bytes, error: UpstreamError | None, sent_bytes: int, sent_events: int
    ) -> None:
        """The answer is complete, or will never be. `whole` is the body of one that is no stream; of one that is, the
        client was sent so many bytes, and so many events with content."""
        ...


class Relay:
    """A sink for one streaming answer."""

    __slots__ = (
        "_begins",
        "_begun",
        "_content",
        "_corrections",
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
        "_now",
        "_over",
        "_recorder",
        "_resumed",
        "_sent_bytes",
        "_sent_events",
        "_streaming",
        "_tail",
        "_whole",
        "_whole_bytes",
        "heard_s",
    )

    def __init__(
        self,
        downstream: Downstream,
        headers: bytes,
        corrections: Corrections,
        limit_bytes: int,
        listener: Listener,
        now: Callable[[], float],
        recorder: Recorder | None = None,
        *,
        done: bool = True,
        choices: bool = False,
        gated: bool = False,
    ) -> None:
        """
        Args:
            downstream: the client.
            headers: whole lines that it gets beside content-type.
            corrections: of every event.
            limit_bytes: one event, or an answer that is no stream, fits in.
            listener: who owns the request.
            now: the loop's clock, in seconds.
            done: whether the last event is `[DONE]`: a stream without it was cut off.
            choices: whether content stands in `choices`: a stream without one is no answer.
            gated: whether all of it is held until `release`.
            recorder: where the stream may have to be continued; one that has resumed goes on where the client is.
        """
        self._downstream = downstream
        self._headers = headers
        self._corrections = corrections
        self._limit = limit_bytes
        self._listener = listener
        self._now = now
        self.heard_s = now()
        """When something came last."""
        self._head = Head()
        self._recorder = recorder
        self._resumed = recorder is not None and recorder.resumed
        self._done = done
        self._begins = _CHOICE if choices else _DATA
        self._begun = False
        self._gated = gated
        self._ended = False
        """Whether it has ended well, and waits for `release`."""
        self._content = _CONTENT if choices else _DELTA
        """What each event with content has in it once, as this engine spells it."""
        self._heard = False
        """Whether there was an event at all that says something, before the first with content."""
        self._held = b""
        self._over = False
        self._sent_bytes = 0
        self._sent_events = 0
        self._streaming = False
        self._tail = b""
        """The beginning of an event that has not ended."""
        self._whole: list[bytes] = []
        """An answer that is no stream."""
        self._whole_bytes = 0

    def on_head(self, head: Head) -> None:
        """Decide whether this is a stream at all."""
        self.heard_s = self._now()
        self._head = head
        self._streaming = head.status == 200 and head.content_type.startswith(b"text/event-stream")

    def on_body(self, data: bytes) -> None:
        """Send on all whole events, corrected, in one write; keep the rest."""
        self.heard_s = self._now()
        if not self._streaming:
            self._gather(data)
            return
        raw = self._tail + data if self._tail else data
        if len(raw) > self._limit:
            raise ValueError(f"an event is longer than {self._limit} bytes")
        if raw.endswith(b"\n\n"):  # nearly always: an engine sends events whole
            self._tail = b""
            self._send(raw)
        else:
            end = complete_events(raw)
            self._tail = raw[end:]
            if end:
                self._send(raw[:end])

    def release(self) -> UpstreamError | None:
        """What is held may be sent now. What is wrong with it, where the exchange has not ended yet."""
        self._gated = False
        events, self._held = self._held, b""
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
        if error is None and self._tail:
            try:
                check_event(self._tail)
                self._send(self._tail + b"\n\n")
            except UpstreamRefusal as refusal:
                error = refusal
            except JSONTextError:
                error = UpstreamError("the engine's stream ends in the middle of an event")
        if self._over and self._done:  # whatever came after it, the client has everything
            error = None
        elif error is None and self._streaming and not self._over:
            how = "too early" if self._begun else "without content" if self._heard else "without an event"
            error = UpstreamError(f"the engine's stream ended {how}")
        elif error is None and self._head.status == 200 and not self._streaming and self._resumed:
            error = UpstreamError("the engine's answer is no stream, and a stream was to be continued")
        self._listener.stream_ended(self._head, b"".join(self._whole), error, self._sent_bytes, self._sent_events)

    def _worth_waiting(self) -> bool:
        """Whether it has answered. Who has not may never have met the prefill that would be waited for."""
        return self._begins.search(self._held) is not None if self._streaming else is_answer(b"".join(self._whole))

    def _gather(self, data: bytes) -> None:
        self._whole_bytes += len(data)
        if self._whole_bytes > self._limit:
            raise ValueError(f"it is longer than {self._limit} bytes")
        self._whole.append(data)

    def _send(self, events: bytes) -> None:
        """
        Raises:
            JSONTextError: an event is not what it should be.
            UpstreamRefusal: the engine says in the stream that it has failed.
        """
        if not self._begun:
            begins = None if self._gated else self._begins.search(events)
            if begins is None:  # it commits to nothing, or nobody may commit to it yet
                self._hold(events)
                if self._gated and self._begins.search(events):
                    self._listener.stream_held()
                return
            if self._begins is _CHOICE and not self._resumed:
                self._content = begins.group()
            events = self._held + events
        done = events.find(b"[DONE]") >= 0 and _DONE.search(events, max(0, len(events) - _TAIL_BYTES)) is not None
        recorder = self._recorder
        if recorder is not None:
            events = recorder.events(events)
        try:
            corrected = self._corrections.events(events)
        except UpstreamRefusal as refusal:
            if refusal.before and (self._begun or self._begins.search(refusal.before)):
                self._write(refusal.before)
            raise
        except JSONTextError:
            if recorder is not None:
                recorder.undo()
            raise
        self._write(corrected)
        if done or not self._done:
            self._over = True

    def _hold(self, events: bytes) -> None:
        """Keep events without content.

        Raises:
            JSONTextError: one is not what it should be.
            UpstreamRefusal: one is an error.
        """
        if _DATA.search(events) is not None:
            self._heard = True
            check_no_error(events)
        self._held += events
        if len(self._held) > self._limit:
            raise ValueError("it holds nothing but comments and empty events")

    def _write(self, corrected: bytes) -> None:
        if not self._begun:
            self._begun = True
            self._listener.stream_begun()
            if not self._resumed:
                self._downstream.head(200, _EVENT_STREAM + self._headers, None)
        self._downstream.body(corrected)
        self._sent_bytes += len(corrected)
        self._sent_events += corrected.count(self._content)  # one search, however many they are
