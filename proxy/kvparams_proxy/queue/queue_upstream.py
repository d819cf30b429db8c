"""Connects a prefill node to all decode nodes: work goes into one queue, and answers come back through the node's own.

An attempt has an id of its own and accepts one decode node, the first that takes it. Any other node that answers it is
a duplicate and is told to stop.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from secrets import token_hex
from typing import Final

from aiormq.abc import AbstractChannel, DeliveredMessage

from kvparams_proxy.queue.acknowledger import BatchAcknowledger
from kvparams_proxy.queue.broker_connection import BrokerConnection
from kvparams_proxy.queue.messages import (
    ControlMessage,
    ControlOrder,
    MalformedMessage,
    ResultMessage,
    ResultPart,
    WorkItem,
    WorkTaken,
    read_results,
    write_control,
    write_work,
)
from kvparams_proxy.queue.outbox import DeliveryOutcome, OutboundMessage, Outbox
from kvparams_proxy.queue.pending_reply import PendingReply
from kvparams_proxy.queue.topology import QueueNames, declare_results, declare_work
from kvparams_proxy.secret import Secret
from kvparams_proxy.upstream.types import (
    ResponseSink,
    UpstreamBody,
    UpstreamError,
    UpstreamOverflow,
    UpstreamRequest,
    join_body,
)

__all__ = ["QueueUpstream"]

_log: Final = logging.getLogger(__name__)
_AWAY_S: Final = 30.0
"""While the broker is away for less, work is still taken, however short its wait."""
_MOST_BYTES: Final = 64 << 20
"""Of what the broker has not answered for: more is refused."""
_UNREAD: Final = 1000
"""Results on their way here at a time."""
_NODES: Final = 256
"""Decode nodes that are known."""
_AGAIN: Final = 16
"""Who goes on for nobody is told once in so many parts."""


class QueueUpstream:
    """An `Upstream` for all engines behind a queue."""

    def __init__(
        self, url: Secret, *, name: str = "kvparams", wait_s: float = 60.0, answer_bytes: int = 64 << 20
    ) -> None:
        """Starts to connect to the broker.

        Args:
            url: the broker's.
            name: of the pool of decode nodes: the beginning of its queues' names.
            wait_s: for how long work may wait for a decode node that has room.
            answer_bytes: what is kept of an answer while its client takes nothing.
        """
        self.shared: Final = True
        """See `Upstream.shared`."""
        self.has_own_key: Final = True
        """See `Upstream.has_own_key`. No client's credentials go through a broker: decode nodes know their engine's
        key."""
        self._loop = asyncio.get_running_loop()
        self._names = QueueNames(name)
        self._node = f"p{token_hex(8)}"
        self.wait_s: Final = wait_s
        self._away_s: Final = max(_AWAY_S, wait_s)
        """Without a broker for so long, nobody is sent here any more; before, work waits for it."""
        self.answer_bytes: Final = answer_bytes
        self._numbers = 0
        self._running: dict[str, PendingReply] = {}
        self._nodes: dict[str, None] = {}
        """Decode nodes that have taken something, whoever did so last at the end."""
        self._outbox = Outbox(_MOST_BYTES)
        self._settled = BatchAcknowledger()
        self._closed = False
        self._link = BrokerConnection(url, self._opened, self._lost)

    # as an `Upstream`

    @property
    def peer_addresses(self) -> tuple[str, ...]:
        """Returns no addresses: the node that takes the work is not known before."""
        return ()

    @property
    def open_connections(self) -> int:
        """The number of connections to the broker."""
        return int(not self._link.disconnected_for_s)

    def request(self, path: bytes, headers: bytes, body: UpstreamBody) -> UpstreamRequest:
        """See `Upstream.request`."""
        return path + b"\r\n" + headers, join_body(body)

    def get(self, path: bytes, headers: bytes = b"") -> UpstreamRequest:
        """See `Upstream.get`. It is answered here."""
        return b"", path

    def exchange(self, request: UpstreamRequest, sink: ResponseSink, *, once: bool = False) -> PendingReply:
        """See `Upstream.exchange`. Nothing is ever sent again that a decode node may have seen."""
        head, body = request
        self._numbers += 1
        id = f"{self._node}.{self._numbers:x}"
        awaited = self._running[id] = PendingReply(self, id, sink)
        if not head:
            self._loop.call_soon(self._answer_probe, awaited)
        elif self._closed or self._link.disconnected_for_s > self._away_s:
            self._loop.call_soon(awaited.finish, UpstreamError("the broker is not connected", connected=False))
        elif self._outbox.is_full:
            self._loop.call_soon(
                awaited.finish, UpstreamOverflow("too many messages wait for the broker", connected=False)
            )
        else:
            path, _, lines = head.partition(b"\r\n")
            work = write_work(WorkItem(id, path.decode("latin-1"), lines, join_body(body)))
            letter = OutboundMessage(
                self._names.work, work, awaited.on_delivery, bounded=True, expires_ms=int(self.wait_s * 1000)
            )
            awaited.message = letter
            self._outbox.put(letter)
            awaited.wait()
        return awaited

    def close(self) -> None:
        """See `Upstream.close`."""
        self._closed = True
        for awaited in list(self._running.values()):
            awaited.abort(UpstreamError("the connection to the broker is closed"))
        self._link.close()

    def _answer_probe(self, awaited: PendingReply) -> None:
        """Answers a probe by the state of the broker. Nothing is known of the engines behind it."""
        if self._closed or self._link.disconnected_for_s > self._away_s:
            awaited.finish(UpstreamError("the broker is not connected", connected=False))
        else:
            awaited.answer(404)

    # for those who are awaited

    @property
    def call_later(self) -> Callable[..., asyncio.TimerHandle]:
        """Calls the loop's `call_later`."""
        return self._loop.call_later

    @property
    def call_soon(self) -> Callable[..., asyncio.Handle]:
        """Calls the loop's `call_soon`."""
        return self._loop.call_soon

    @property
    def now(self) -> Callable[[], float]:
        """Returns the time of the loop's clock."""
        return self._loop.time

    @property
    def connected_for_s(self) -> float:
        """The seconds since the connection was made."""
        return self._link.connected_for_s

    def send_control(
        self, node: str, order: ControlOrder, id: str, settled: Callable[[DeliveryOutcome], None] | None = None
    ) -> None:
        """Sends a control message to a decode node, if it is there."""
        to = self._names.control(node)
        self._outbox.put(OutboundMessage(to, write_control(ControlMessage(order, id)), settled or _heed, durable=False))

    def withdraw(self, letter: OutboundMessage) -> None:
        """Withdraws a message that need not be sent any more."""
        self._outbox.withdraw(letter)

    def cancel_unclaimed(self, id: str) -> None:
        """Cancels work that nobody need take any more: known decode nodes hear it before the work comes to them."""
        for node in self._nodes:
            self.send_control(node, "cancel", id, partial(self._called_off, node))

    def _called_off(self, node: str, fate: DeliveryOutcome) -> None:
        if fate == "nowhere":
            self._nodes.pop(node, None)

    def forget(self, id: str) -> None:
        """Forgets a reply that nobody waits for any more."""
        self._running.pop(id, None)

    # the broker

    async def _opened(self, reads: AbstractChannel, writes: AbstractChannel) -> None:
        await declare_work(writes, self._names)
        queue = self._names.results(self._node)
        await declare_results(reads, queue)
        await reads.basic_qos(prefetch_count=_UNREAD)
        self._settled.opened(reads)
        await reads.basic_consume(queue, self._heard)
        self._outbox.opened(writes)
        for awaited in list(self._running.values()):
            awaited.on_broker_opened()

    def _lost(self) -> None:
        self._settled.closed()
        self._outbox.closed()

    async def _heard(self, message: DeliveredMessage) -> None:
        """Handles a message for this node. It never waits: messages are taken in order."""
        self._settled.acknowledge(message)
        try:
            for result in read_results(message.body):
                awaited = None if result.id is None else self._running.get(result.id)
                try:
                    self._hear(result, awaited)
                except Exception:  # noqa: BLE001  a fault of the proxy: still, it costs no other attempt
                    _log.exception("a result could not be taken")
                    if awaited is not None:
                        self._loop.call_soon(awaited.abort, UpstreamError("the proxy failed; its log says why"))
        except MalformedMessage as malformed:
            _log.warning("the rest of an invalid message is skipped: %s", malformed)

    def _hear(self, result: ResultMessage | MalformedMessage, awaited: PendingReply | None) -> None:
        if isinstance(result, WorkTaken):
            self._nodes.pop(result.node, None)
            self._nodes[result.node] = None
            if len(self._nodes) > _NODES:
                del self._nodes[next(iter(self._nodes))]
        if isinstance(result, MalformedMessage):
            _log.warning("an invalid result is skipped: %s", result)
            if awaited is not None:
                awaited.on_malformed(result)
        elif awaited is not None:
            awaited.on_result(result)
        elif isinstance(result, WorkTaken) or (
            isinstance(result, ResultPart) and not result.last and not result.number % _AGAIN
        ):
            self.send_control(result.node, "cancel", result.id)


def _heed(_: DeliveryOutcome) -> None:
    """Ignores the outcome of a delivery."""
