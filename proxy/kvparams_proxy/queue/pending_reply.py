"""A prefill node's attempt in the queue, and the response that it waits for: an `ExchangeHandle`.

The sink receives the parts of one node's response in order, each once, and nothing after the end.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from kvparams_proxy.queue import messages
from kvparams_proxy.queue.messages import (
    ControlOrder,
    MalformedMessage,
    ResultEnd,
    ResultMessage,
    ResultPart,
    WorkLost,
    WorkRefused,
    WorkTaken,
)
from kvparams_proxy.queue.outbox import DeliveryOutcome, OutboundMessage
from kvparams_proxy.upstream.types import (
    MAX_BYTES_PER_TURN,
    ResponseHead,
    ResponseSink,
    UpstreamError,
    UpstreamOverflow,
    UpstreamTimeout,
)

__all__ = ["PendingReply"]

_log: Final = logging.getLogger(__name__)
_ASK_S: Final = 1.0
_EARLY: Final = 256
"""Parts that came before one that is missing; a node has 16 on their way."""
_PART_BYTES: Final = 256
"""What a part takes in memory beside its body."""
_TOO_LARGE: Final = (
    b'{"error":{"message":"the request is larger than the broker between prefill and decode takes",'
    b'"type":"invalid_request_error","code":"too_large"}}'
)
_SILENT_S: Final = 6.0
"""A node that is in doubt and has said nothing for so long is gone. One that has lost the broker comes back sooner."""


class ReplyOwner(Protocol):
    """The upstream, as its pending replies see it."""

    @property
    def wait_s(self) -> float:
        """The longest wait for a decode node, in seconds."""
        ...

    @property
    def answer_bytes(self) -> int:
        """The bytes that may be kept for a client that does not read."""
        ...

    @property
    def connected_for_s(self) -> float:
        """The seconds since the connection to the broker was made."""
        ...

    @property
    def call_later(self) -> Callable[..., asyncio.TimerHandle]:
        """Calls the loop's `call_later`."""
        ...

    @property
    def call_soon(self) -> Callable[..., asyncio.Handle]:
        """Calls the loop's `call_soon`."""
        ...

    @property
    def now(self) -> Callable[[], float]:
        """Returns the time of the loop's clock."""
        ...

    def send_control(
        self, node: str, order: ControlOrder, id: str, settled: Callable[[DeliveryOutcome], None] | None = None
    ) -> None:
        """Sends a control message to a decode node."""
        ...

    def withdraw(self, letter: OutboundMessage) -> None:
        """Withdraws a message that need not be sent any more."""
        ...

    def cancel_unclaimed(self, id: str) -> None:
        """Cancels work that no known node has taken, and that need not be taken any more."""
        ...

    def forget(self, id: str) -> None:
        """Forgets a reply that nobody waits for any more."""
        ...


class PendingReply:
    """See the module."""

    __slots__ = (
        "_asked",
        "_early",
        "_heard_s",
        "_id",
        "_kept",
        "_kept_bytes",
        "_more",
        "_next",
        "_node",
        "_owner",
        "_paused",
        "_sink",
        "_throttled",
        "_throttles",
        "_timer",
        "message",
    )

    def __init__(self, owner: ReplyOwner, id: str, sink: ResponseSink) -> None:
        self._owner = owner
        self._id = id
        self._sink: ResponseSink | None = sink
        self.message: OutboundMessage | None = None
        """The work itself, as long as nobody is known to have it."""
        self._node: str | None = None
        self._next = 0
        """The number of the part that comes next."""
        self._early: dict[int, ResultPart] = {}
        self._kept: deque[ResultPart] = deque()
        """For a client that takes nothing now."""
        self._kept_bytes = 0
        self._more = False
        """Whether a further turn will deliver what is kept."""
        self._paused = False
        self._throttled: bool = False
        """Whether the node was told so."""
        self._throttles: bool = False
        """Whether it was ever told."""
        self._heard_s = 0.0
        self._asked = False
        """Whether the node, or what it said last, is in doubt: nobody else would tell."""
        self._timer: asyncio.TimerHandle | None = None

    # as a `ExchangeHandle`

    def abort(self, error: UpstreamError) -> None:
        """See `ExchangeHandle.abort`."""
        sink = self._sink
        if sink is not None:
            error.connected = error.sent = self.message is None or self.message.sent
            self.discard()
            sink.on_done(error)

    def discard(self) -> None:
        """See `ExchangeHandle.discard`."""
        if self._sink is None:
            return
        if self._node is not None:
            self._owner.send_control(self._node, "cancel", self._id)
        elif self._timer is not None and (self.message is None or self.message.sent):
            self._owner.cancel_unclaimed(self._id)
        self._end()

    def half_close(self) -> bool:
        """See `ExchangeHandle.half_close`: there is no such thing here."""
        return False

    def pause(self) -> None:
        """See `ExchangeHandle.pause`."""
        self._paused = True
        self._throttle()

    def resume(self) -> None:
        """See `ExchangeHandle.resume`. Delivered is in a turn of its own."""
        self._paused = False
        self._throttle()
        if self._kept and not self._more:
            self._more = True
            self._owner.call_soon(self._deliver)

    # for its owner

    def wait(self) -> None:
        """Waits for a node that takes the work."""
        self._timer = self._owner.call_later(self._owner.wait_s, self._waited)

    def on_delivery(self, fate: DeliveryOutcome) -> None:
        """Handles the outcome of the work's delivery to the broker."""
        self.message = None
        if fate == "too large":
            self.answer(413, _TOO_LARGE)
        elif fate == "full":
            self.finish(UpstreamOverflow("the queue of work is full", connected=False))
        elif fate == "nowhere":
            self.finish(UpstreamError("the queue of work is gone", connected=False))

    def answer(self, status: int, body: bytes = b"") -> None:
        """Answers in place of an engine."""
        if self._sink is not None:
            head = messages.ResultHead(status, b"application/json", b"")
            self._pass(ResultPart(self._id, "", 0, head, body, True, None), self._sink)

    def finish(self, error: UpstreamError | None) -> None:
        """Ends the exchange; the node knows that already."""
        sink = self._sink
        self._end()
        if sink is not None:
            sink.on_done(error)

    def on_result(self, result: ResultMessage) -> None:
        """Handles a result message of a node."""
        if isinstance(result, WorkLost):
            self._lost()
            return
        if isinstance(result, WorkRefused):
            if self._node is None:
                refused = UpstreamError(f"a decode node refuses the request: {result.reason}")
                refused.sent = False
                self.finish(refused)
            return
        if self._node is None:
            self._take(result.node)
        elif result.node != self._node:  # the broker had the work twice
            self._owner.send_control(result.node, "cancel", self._id)
            return
        self._heard_s = self._owner.now()
        if isinstance(result, WorkTaken):
            if self._throttles:  # it may have forgotten, or never heard, whichever was the last word
                self._owner.send_control(result.node, "pause" if self._paused else "resume", self._id)
            return
        if result.number >= self._next and result.number not in self._early:
            self._early[result.number] = result
            self._kept_bytes += len(result.body) + _PART_BYTES
            while (part := self._early.pop(self._next, None)) is not None:
                self._next += 1
                self._kept.append(part)
        if len(self._early) > _EARLY:
            self._fail(UpstreamError("the decode node left out a part of the answer"))
        if not self._more:
            self._deliver()

    def on_broker_opened(self) -> None:
        """Handles a new connection to the broker: results may be lost, with a queue that has expired meanwhile."""
        if self._node is not None:
            self._doubt()

    def on_malformed(self, malformed: MalformedMessage) -> None:
        """Handles a message that cannot be parsed: the response would have a gap."""
        if self._node is None:
            self._node = malformed.node
        if malformed.node in (None, self._node):
            self._fail(UpstreamError(f"the decode node sent an invalid message ({malformed})"))

    # inside

    def _end(self) -> None:
        self._sink = None
        self._kept.clear()
        self._early.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self.message is not None:
            self._owner.withdraw(self.message)
        self._owner.forget(self._id)

    def _take(self, node: str) -> None:
        self._node = node
        if self._timer is not None:
            self._timer.cancel()
        if self.message is not None:
            self._owner.withdraw(self.message)
            self.message = None
        self._throttle()

    def _throttle(self) -> None:
        """Tells the node whether the client reads, if that has changed."""
        if self._node is not None and self._sink is not None and self._paused is not self._throttled:
            self._throttled = self._paused
            self._throttles = True
            self._owner.send_control(self._node, "pause" if self._paused else "resume", self._id)

    def _deliver(self) -> None:
        """Delivers a part of the buffered response, and the rest in further turns."""
        self._more = False
        turn_bytes = 0
        while self._kept and not self._paused and self._sink is not None:
            if turn_bytes >= MAX_BYTES_PER_TURN:
                self._more = True
                self._owner.call_soon(self._deliver)
                break
            part = self._kept.popleft()
            if len(part.body) > MAX_BYTES_PER_TURN:
                rest = part._replace(head=None, body=part.body[MAX_BYTES_PER_TURN:])
                self._kept.appendleft(rest)
                part = part._replace(body=part.body[:MAX_BYTES_PER_TURN], last=False)
            else:
                self._kept_bytes -= _PART_BYTES
            self._kept_bytes -= len(part.body)
            turn_bytes += len(part.body) + _PART_BYTES
            self._pass(part, self._sink)
        if self._kept_bytes > self._owner.answer_bytes:
            self._fail(UpstreamError("the answer grew faster than its client reads it"))

    def _pass(self, part: ResultPart, sink: ResponseSink) -> None:
        try:
            if part.head is not None:
                sink.on_head(ResponseHead(part.head.status, part.head.content_type, True, part.head.retry_after))
            if part.body:
                sink.on_body(part.body)
        except UpstreamError as error:  # the sink has seen enough
            self._fail(error)
        except ValueError as error:
            self._fail(UpstreamError(f"the engine's answer is not usable ({error})"))
        except Exception:  # noqa: BLE001  a fault of the proxy: still, this ends and the node is told
            _log.exception("an answer could not be taken")
            self._fail(UpstreamError("the proxy failed; its log says why"))
        else:
            if part.last:
                self.finish(None if part.end is None else _error(part.end))

    def _fail(self, error: UpstreamError) -> None:
        sink = self._sink
        self.discard()
        if sink is not None:
            sink.on_done(error)

    def _waited(self) -> None:
        said = f"no decode node has taken the request within {self._owner.wait_s:g} s"
        self.abort(UpstreamOverflow(said))

    # whether the node is still there

    def _lost(self) -> None:
        """Handles work that the broker has given to another node, too. The first may only have lost its connection."""
        if self._node is None:
            self._gone()
        elif not self._asked:
            self._doubt()

    def _doubt(self) -> None:
        """Asks the node until the answer ends, beginning now."""
        if self._timer is not None:
            self._timer.cancel()
        self._asked = True
        self._heard_s = self._owner.now()
        self._ask()

    def _ask(self) -> None:
        if self._node is None:
            return
        if min(self._owner.now() - self._heard_s, self._owner.connected_for_s) > _SILENT_S:
            self._gone()
            return
        self._owner.send_control(self._node, "ask", self._id, self._asked_at)
        self._timer = self._owner.call_later(_ASK_S, self._ask)

    def _asked_at(self, fate: DeliveryOutcome) -> None:
        """Handles a node whose queue is gone. Unless the broker has just come back, the node is gone too."""
        if fate == "nowhere" and self._sink is not None and self._owner.connected_for_s > _SILENT_S:
            self._gone()

    def _gone(self) -> None:
        self.finish(UpstreamError("the decode node of the request is gone"))


def _error(end: ResultEnd) -> UpstreamError:
    """Converts the failure of a node to an error. The broker was reached, so the way to it works."""
    kinds = {"failed": UpstreamError, "timeout": UpstreamTimeout, "full": UpstreamOverflow}
    error = kinds[end.failure](end.reason)
    error.sent = end.sent
    return error
