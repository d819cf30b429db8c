"""A piece of work on a decode node: sends its engine's response in numbered parts to the node that asked.

Work is acknowledged only when the broker has all of its response.
"""

from collections.abc import Callable
from typing import Final, Protocol

from kvparams_proxy.queue.messages import (
    ControlOrder,
    ResultEnd,
    ResultFailure,
    ResultHead,
    ResultPart,
    WorkItem,
    WorkTaken,
    node_of,
    validated_head,
    write_part,
    write_result,
)
from kvparams_proxy.queue.outbox import DeliveryOutcome, OutboundMessage
from kvparams_proxy.upstream import types
from kvparams_proxy.upstream.interface import ExchangeHandle
from kvparams_proxy.upstream.types import UpstreamError, UpstreamOverflow, UpstreamTimeout

__all__ = ["RunningWork"]

_ON_THE_WAY: Final = 16
"""Parts that the broker has not answered for; what comes meanwhile is gathered ..."""
_MOST_BYTES: Final = 1 << 20
"""... up to so much: then the engine waits. No part is longer."""


class WorkOwner(Protocol):
    """The decode node, as its running work sees it."""

    @property
    def node(self) -> str:
        """The node's name."""
        ...

    @property
    def silence_s(self) -> float:
        """The longest silence of the engine, in seconds."""
        ...

    @property
    def now(self) -> Callable[[], float]:
        """Returns the time of the loop's clock."""
        ...

    def watch(self, running: "RunningWork", limit_s: float) -> None:
        """Has the work checked when this time is over."""
        ...

    def put(self, letter: OutboundMessage, to: str) -> None:
        """Sends a message to the node of that name, and fills in its `to`."""
        ...

    def withdraw(self, letter: OutboundMessage) -> None:
        """Withdraws a message that need not be sent any more."""
        ...

    def engine_finished(self, running: "RunningWork", error: UpstreamError | None, status: int) -> None:
        """Hears how the engine's exchange has ended."""
        ...

    def work_finished(self, running: "RunningWork") -> None:
        """Hears that the work is finished: its deliveries may be acknowledged."""
        ...


class RunningWork:
    """A sink for the engine's answer."""

    __slots__ = (
        "_body",
        "_broken_off",
        "_dirty",
        "_end",
        "_handle",
        "_head",
        "_heard_s",
        "_last",
        "_letters",
        "_number",
        "_over",
        "_owner",
        "_paused",
        "_status",
        "_stopped",
        "complete",
        "deliveries",
        "id",
    )

    def __init__(self, owner: WorkOwner, work: WorkItem) -> None:
        self._owner = owner
        self.id: Final = work.id
        self.deliveries: list[int] = []
        """The tags under which the broker has handed it to this node over the connection that is there now."""
        self._handle: ExchangeHandle | None = None
        self._letters: set[OutboundMessage] = set()
        """On their way."""
        self._number = 0
        self._head: ResultHead | None = None
        self._status = 0
        self._body = bytearray()
        """What is on no letter yet."""
        self._last = False
        self._end: ResultEnd | None = None
        self._paused = False
        """By the node that asked."""
        self._stopped = False
        """Because the broker does not keep up."""
        self._broken_off = False
        """Because a part was larger than the broker takes."""
        self._over = False
        """Nothing is left to do."""
        self.complete = False
        """Whether all of the answer is with the broker."""
        self._dirty = False
        """Whether there is something to tell that is on no letter yet."""
        self._heard_s = owner.now()

    def begin(self, handle: ExchangeHandle) -> None:
        """Hears that the engine has been asked."""
        if not self._over and not self._last:
            self._handle = handle
        self.announce_taken()

    def announce_taken(self) -> None:
        """Tells the requesting node which node has the work."""
        if not self._over:
            self._post(write_result(WorkTaken(self.id, self._owner.node)))

    def on_control(self, order: ControlOrder) -> None:
        """Handles an order of the requesting node."""
        if order == "cancel":
            self.abandon()
        elif order == "ask":
            self.announce_taken()
        else:
            self._paused = order == "pause"
            self._throttle()

    def set_broker_backpressure(self, stopped: bool) -> None:
        """Starts or ends throttling for a broker that does not keep up."""
        self._stopped = stopped
        self._throttle()

    def abandon(self) -> None:
        """Ends work that nobody waits for."""
        if self._over:
            return
        self._over = True
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.discard()
        for letter in self._letters:
            self._owner.withdraw(letter)
        self._letters.clear()
        self._owner.work_finished(self)

    def abort_for_shutdown(self) -> None:
        """Ends work because the node shuts down, and tells the requesting node."""
        if self._handle is not None:
            self._handle.abort(UpstreamError("its decode node is shutting down"))

    def expire(self) -> None:
        """Ends work whose engine may have been silent for too long; the watch calls it."""
        left_s = self._owner.silence_s - (self._owner.now() - self._heard_s)
        if self._paused or self._stopped or left_s > 0:
            self._owner.watch(self, max(left_s, 1.0))
        elif self._handle is not None:
            self._handle.abort(UpstreamTimeout("sent nothing for longer than its time-out"))

    # as a `ResponseSink`

    def on_head(self, head: types.ResponseHead) -> None:
        """See `ResponseSink.on_head`.

        Raises:
            ValueError: it cannot be told.
        """
        self._status = head.status
        self._head = validated_head(ResultHead(head.status, head.content_type, head.retry_after))

    def on_body(self, data: bytes) -> None:
        """See `ResponseSink.on_body`."""
        self._heard_s = self._owner.now()
        self._body += data
        self._dirty = True
        self._send()
        if len(self._body) > _MOST_BYTES:
            self._throttle()

    def on_done(self, error: UpstreamError | None) -> None:
        """See `ResponseSink.on_done`."""
        self._handle = None
        self._last = self._dirty = True
        if error is not None:
            self._end = ResultEnd(_failure(error), error.reason, error.sent)
        self._owner.engine_finished(self, error, self._status)
        self._send()

    # inside

    def _send(self) -> None:
        """Sends the buffered response, unless many parts are in flight."""
        crowded = len(self._body) > _MOST_BYTES
        while self._dirty and not self._over and len(self._letters) < _ON_THE_WAY:
            body = bytes(self._body[:_MOST_BYTES])
            del self._body[:_MOST_BYTES]  # from the front: nothing is moved (CPython 3.11, Objects/bytearrayobject.c)
            self._dirty = bool(self._body)
            head, self._head = self._head, None
            last = self._last and not self._body
            part = ResultPart(self.id, self._owner.node, self._number, head, body, last, self._end if last else None)
            self._number += 1
            self._post(write_part(part), part.number)
        if crowded:
            self._throttle()

    def _post(self, body: bytes, number: int | None = None) -> None:
        """Sends a message; `number` is that of a part of the response."""

        def settled(fate: DeliveryOutcome) -> None:
            self._letters.discard(letter)
            self._settled(fate, number)

        letter = OutboundMessage("", body, settled, joins=True)
        self._letters.add(letter)
        self._owner.put(letter, node_of(self.id))

    def _settled(self, fate: DeliveryOutcome, number: int | None) -> None:
        if self._over:
            return
        if fate == "too large" and number is not None:
            self._break_off(number)
        elif fate != "kept":  # the node that asked is gone
            self.abandon()
        elif self._dirty:
            self._send()
        elif self._last and not self._letters:
            self._over, self.complete = True, not self._broken_off
            self._owner.work_finished(self)

    def _break_off(self, number: int) -> None:
        """Ends the response at a part that cannot be sent: no later part can follow it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.discard()
        self._broken_off = self._last = True
        self._dirty = False
        end = ResultEnd("failed", "a part of the answer is larger than the broker's max_message_size", True)
        self._post(write_part(ResultPart(self.id, self._owner.node, number, None, b"", True, end)))

    def _throttle(self) -> None:
        if self._handle is not None:
            if self._paused or self._stopped or len(self._body) > _MOST_BYTES:
                self._handle.pause()
            else:
                self._handle.resume()


def _failure(error: UpstreamError) -> ResultFailure:
    if isinstance(error, UpstreamOverflow):
        return "full"
    return "timeout" if isinstance(error, UpstreamTimeout) else "failed"
