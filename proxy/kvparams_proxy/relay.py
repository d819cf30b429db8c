"""Carries a decode engine's stream to the client as it arrives.

The one rule: nothing reaches the client before the first whole event is here, so that until then the request can still
be answered in another way; from then on events leave together as they came together, within a fixed buffer.
"""

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from time import perf_counter

from kvparams.errors import JSONTextError
from kvparams_proxy.corrections import Corrections, complete_events
from kvparams_proxy.downstream import Downstream
from kvparams_proxy.upstream import Head, UpstreamError

__all__ = ["Ended", "Relay"]


class Ended(Enum):
    """How a stream ended."""

    WELL = auto()
    """Completely."""
    ELSEWISE = auto()
    """The engine answered with something that is not a stream: see `Relay.head` and `Relay.whole`."""
    BEFORE_FIRST_EVENT = auto()
    """Nothing was sent to the client: see `Relay.error`."""
    MIDWAY = auto()
    """The client has part of it: see `Relay.error`."""


class Relay:
    """A sink for one streaming answer. `await relay.ended` says how it went."""

    __slots__ = (
        "_corrections",
        "_downstream",
        "_headers",
        "_heard",
        "_limit",
        "_parts",
        "_size",
        "_streaming",
        "_tail",
        "begun",
        "ended",
        "error",
        "first_event_at",
        "head",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        downstream: Downstream,
        headers: bytes,
        corrections: Corrections,
        limit_bytes: int,
        heard: Callable[[], None],
    ) -> None:
        """`headers` go to the client beside content-type; one event, or an answer that is no stream, fits the limit;
        `heard` is called whenever something came."""
        self.ended: asyncio.Future[Ended] = loop.create_future()
        self.head = Head()
        self.error: UpstreamError | None = None
        self.begun = False
        self.first_event_at = 0.0
        self._downstream = downstream
        self._headers = headers
        self._corrections = corrections
        self._limit = limit_bytes
        self._heard = heard
        self._parts: list[bytes] = []
        self._size = 0
        self._streaming = False
        self._tail = b""

    @property
    def whole(self) -> bytes:
        """The body of an answer that is no stream."""
        return b"".join(self._parts)

    def on_head(self, head: Head) -> None:
        """Decide whether this is a stream at all."""
        self.head = head
        self._streaming = head.status == 200 and head.content_type.startswith(b"text/event-stream")

    def on_body(self, data: bytes) -> None:
        """Gather what arrives together."""
        self._size += len(data)
        if self._size > self._limit:
            raise ValueError(f"an event is longer than {self._limit} bytes")
        self._parts.append(data)

    def on_flush(self) -> None:
        """Send on all whole events, corrected, in one write; keep the rest."""
        self._heard()
        if not self._streaming or not self._parts:
            return
        parts = self._parts
        if self._tail:
            parts.insert(0, self._tail)
        raw = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts = []
        end = complete_events(raw)
        self._tail = raw[end:]
        self._size = len(self._tail)
        if end:
            self._send(raw if end == len(raw) else raw[:end])

    def on_done(self, error: UpstreamError | None) -> None:
        """Say how it went; the executor does the rest."""
        if self.ended.done():
            return
        if error is None and self._tail:
            try:
                self._send(self._tail + b"\n\n")
            except JSONTextError:
                error = UpstreamError("the engine's stream ends in the middle of an event")
        self.error = error
        if error is None and self._streaming and not self.begun:
            self.error = UpstreamError("the engine's stream ended without an event")
        if self.error is not None:
            self.ended.set_result(Ended.MIDWAY if self.begun else Ended.BEFORE_FIRST_EVENT)
        else:
            self.ended.set_result(Ended.WELL if self._streaming else Ended.ELSEWISE)

    def _send(self, events: bytes) -> None:
        if not self.begun:
            self.begun = True
            self.first_event_at = perf_counter()
            self._downstream.head(200, b"content-type: %b\r\n%b" % (self.head.content_type, self._headers), None)
        self._downstream.body(self._corrections.events(events))
