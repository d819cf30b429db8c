"""A decode node: pulls work when it has room, has its engine do it, and tells the answer to the node that asked.

Work is acknowledged when all of its response is with the broker, when nobody waits for it any more, or when the
requester has been told that it is not done; never before.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from secrets import token_hex
from types import MappingProxyType, TracebackType
from typing import Final, Self

from aiormq.abc import AbstractChannel, DeliveredMessage

from kvparams_proxy.event_loop.deadlines import Deadlines
from kvparams_proxy.queue.broker_connection import BrokerConnection
from kvparams_proxy.queue.consumer_prefetch import ConsumerPrefetch
from kvparams_proxy.queue.messages import (
    MalformedMessage,
    WorkItem,
    WorkLost,
    WorkRefused,
    node_of,
    read_control,
    read_work,
    write_result,
)
from kvparams_proxy.queue.outbox import OutboundMessage, Outbox
from kvparams_proxy.queue.running_work import RunningWork
from kvparams_proxy.queue.topology import QueueNames, declare_control, declare_work
from kvparams_proxy.requests.endpoints import ENDPOINTS
from kvparams_proxy.secret import Secret
from kvparams_proxy.upstream.interface import Upstream
from kvparams_proxy.upstream.types import UpstreamError

__all__ = ["WorkConsumer"]

_log: Final = logging.getLogger(__name__)
_MOST_BYTES: Final = 8 << 20
"""Of answers that the broker has not taken: more, and engines are slowed down."""
_PATHS: Final = frozenset(each.path for each in ENDPOINTS)
_FAULTS: Final = 500
_REMEMBERED: Final = 10_000
"""Ids of work that is not run when it comes."""
_TELL_S: Final = 2.0
"""For those to be told whose work does not end in time, when this ends."""


class WorkConsumer:
    """Pulls work for one decode node.

    On exit of the async context it takes no more work, and running work gets a moment to end.
    """

    def __init__(
        self,
        url: Secret,
        engine: Upstream,
        *,
        name: str = "kvparams",
        room: int = 16,
        silence_s: float = 600.0,
        probe_s: float = 5.0,
        leave_s: float = 30.0,
    ) -> None:
        """Creates the node; it takes work inside the async context.

        Args:
            url: the broker's.
            engine: the way to it.
            name: of the pool of decode nodes, see `kvparams_proxy.queue.topology.QueueNames`.
            room: how much work it does at a time.
            silence_s: the longest silence of the engine.
            probe_s: how often the engine is asked whether it is there.
            leave_s: for what runs, when this ends.
        """
        self._loop = asyncio.get_running_loop()
        self._names = QueueNames(name)
        self.node: Final = f"d{token_hex(8)}"
        """Its name, another one each time it starts."""
        self._engine = engine
        self.silence_s: Final = silence_s
        self.now: Final = self._loop.time
        self._leave_s = leave_s
        self._running: dict[str, RunningWork] = {}
        self._not_run: dict[str, bool] = {}
        """Work that is not run when it comes, the latest at the end. True: somebody has cancelled it, and it has not
        come, as a rule. False: it has run here, and the broker has it twice where a confirmation was lost."""
        self._watch = Deadlines(self._loop)
        self._outbox = Outbox(_MOST_BYTES, self._hold)
        self._reads: AbstractChannel | None = None
        self.capacity: Final = room
        """How much work it does at a time."""
        self._appetite = ConsumerPrefetch(engine, room, probe_s, self._take, self._drop)
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._counts: dict[str, int] = dict.fromkeys(("done", "cancelled", "lost", "refused"), 0)
        self._link = BrokerConnection(url, self._opened, self._lost)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._appetite.close()
        await self._ended(self._leave_s)
        for running in list(self._running.values()):
            running.abort_for_shutdown()
        await self._ended(_TELL_S)
        for running in list(self._running.values()):
            running.deliveries.clear()  # nobody was told: the broker gives it to somebody who tells
            running.abandon()
        self._link.close()
        await self._link.wait_closed()

    async def _ended(self, limit_s: float) -> None:
        """Waits until nothing runs, up to the time limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._idle.wait()

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of pieces of work by outcome."""
        return MappingProxyType(self._counts)

    @property
    def running_count(self) -> int:
        """The number of pieces of work that are running."""
        return len(self._running)

    @property
    def connected(self) -> bool:
        """True while the broker is connected."""
        return self._reads is not None

    @property
    def engine_ready(self) -> bool:
        """True while the engine is reachable and works."""
        return self._appetite.ready

    # for what runs

    def watch(self, running: RunningWork, limit_s: float) -> None:
        """See `WorkOwner.watch`."""
        self._watch.start(running, limit_s)

    def put(self, letter: OutboundMessage, to: str) -> None:
        """See `WorkOwner.put`."""
        letter.queue_name = self._names.results(to)
        self._outbox.put(letter)

    def withdraw(self, letter: OutboundMessage) -> None:
        """See `WorkOwner.withdraw`."""
        self._outbox.withdraw(letter)

    def engine_finished(self, running: RunningWork, error: UpstreamError | None, status: int) -> None:
        """See `WorkOwner.engine_finished`."""
        self._watch.stop(running)
        self._appetite.record_outcome(error, well=error is None and status < _FAULTS)

    def work_finished(self, running: RunningWork) -> None:
        """See `WorkOwner.work_finished`."""
        self._watch.stop(running)
        self._running.pop(running.id, None)
        self._remember(running.id, cancelled=False)
        self._counts["done" if running.complete else "cancelled"] += 1
        if not running.complete:
            self._appetite.release_trial()
        for tag in running.deliveries:
            self._acknowledge(tag)
        if not self._running:
            self._idle.set()

    # the broker

    async def _opened(self, reads: AbstractChannel, writes: AbstractChannel) -> None:
        await declare_work(writes, self._names)
        control = self._names.control(self.node)
        await declare_control(reads, control)
        await reads.basic_consume(control, self._told, no_ack=True)
        self._reads = reads
        self._outbox.opened(writes)
        for running in list(self._running.values()):
            running.announce_taken()  # whoever asked may have thought that it is gone
        await self._appetite.on_broker_opened(reads, self._names.work)

    def _drop(self) -> None:
        self._link.reconnect()

    def _lost(self) -> None:
        self._reads = None
        self._appetite.on_broker_closed()
        self._outbox.closed()
        for running in self._running.values():
            running.deliveries.clear()  # the broker gives it to somebody again, to us perhaps

    def _hold(self, stopped: bool) -> None:
        for running in list(self._running.values()):
            running.set_broker_backpressure(stopped)

    async def _told(self, message: DeliveredMessage) -> None:
        """Handles an order of a prefill node. It never waits, like all handlers of messages."""
        try:
            control = read_control(message.body)
        except MalformedMessage as malformed:
            _log.warning("an invalid message is skipped: %s", malformed)
            return
        running = self._running.get(control.id)
        if running is not None:
            running.on_control(control.order)
        elif control.order == "cancel":
            self._remember(control.id, cancelled=True)

    def _remember(self, id: str, *, cancelled: bool) -> None:
        self._not_run[id] = cancelled
        if len(self._not_run) > _REMEMBERED:
            del self._not_run[next(iter(self._not_run))]

    async def _take(self, message: DeliveredMessage) -> None:
        """Handles new work."""
        tag = message.delivery_tag
        if tag is None or message.channel is not self._reads:
            return
        try:
            work = read_work(message.body)
            if work.path not in _PATHS:
                raise MalformedMessage(f"nothing is served at {work.path}", work.id)
        except MalformedMessage as malformed:
            self._refuse(tag, malformed)
            return
        running = self._running.get(work.id)
        if running is not None:  # its acknowledgement, or its confirmation, was lost with a connection
            running.deliveries.append(tag)
        elif message.redelivered:  # before what is called off: somebody may wait for the node that had it
            self._counts["lost"] += 1
            self._say(tag, write_result(WorkLost(work.id, self.node)), work.id, well=True)
        elif (cancelled := self._not_run.get(work.id)) is not None:
            self._counts["cancelled"] += cancelled
            self._acknowledge(tag)
        else:
            self._begin(tag, work)

    def _begin(self, tag: int, work: WorkItem) -> None:
        running = self._running[work.id] = RunningWork(self, work)
        running.deliveries.append(tag)
        self._idle.clear()
        self._appetite.work_started()
        self._watch.start(running, self.silence_s)
        try:
            request = self._engine.request(work.path.encode(), work.headers, work.body)
            running.begin(self._engine.exchange(request, running))
        except Exception:  # noqa: BLE001  it must not raise; but its room must not stay taken, nor whoever asked wait
            _log.exception("the engine of this node could not be asked")
            running.on_done(UpstreamError("its decode node could not ask the engine", connected=False))
        if self._outbox.is_full:
            running.set_broker_backpressure(True)

    def _refuse(self, tag: int, malformed: MalformedMessage) -> None:
        """Rejects the message to the dead letters, after telling its sender where that can be read."""
        self._counts["refused"] += 1
        _log.warning("a request is moved to the dead-letter queue: %s", malformed)
        if malformed.id is None:
            self._later(self._reads, tag, well=False)
        else:
            said = write_result(WorkRefused(malformed.id, self.node, str(malformed)))
            self._say(tag, said, malformed.id, well=False)

    def _say(self, tag: int, body: bytes, id: str, *, well: bool) -> None:
        """Tells the sender; then the work is acknowledged, or put aside."""
        reads = self._reads
        self.put(OutboundMessage("", body, lambda _: self._later(reads, tag, well=well), joins=True), node_of(id))

    def _acknowledge(self, tag: int) -> None:
        self._later(self._reads, tag, well=True)

    def _later(self, reads: AbstractChannel | None, tag: int, *, well: bool) -> None:
        if reads is None or reads is not self._reads:  # it comes again over the next connection
            return
        task = self._loop.create_task(_answer(reads, tag, well=well))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _answer(channel: AbstractChannel, tag: int, *, well: bool) -> None:
    with suppress(Exception):  # the connection is lost: as above
        if well:
            await channel.basic_ack(tag, wait=False)
        else:
            await channel.basic_reject(tag, requeue=False, wait=False)
