"""Receives the KV events of all publishers in one thread, which owns their sockets.

The thread decodes messages; the event loop takes the batches out one by one (`take_batch`). The batches that wait here
are bounded in number and bytes. While the event loop is behind, nothing is read: further messages wait in ZMQ, limited
in size and number for each socket, and a replay is requested for those that ZMQ drops.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from time import monotonic
from typing import Final, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvparams.kv_events import EventBatch, EventSource, InvalidEvents, decode_msgpack
from kvparams.kv_events.zmq_frames import read_live, read_replayed, replay_request
from kvparams_proxy.fleet.kv_events.ordered_stream import OrderedEventStream, batch_weight

__all__ = ["KVEventSubscriber", "PublisherEndpoint", "ReceivedBatch"]

_log: Final = logging.getLogger(__name__)
_MESSAGE_BYTES: Final = 4 << 20
"""Of one message. vLLM's have what one step computed: some 200 KB for 32,000 tokens."""
_MESSAGES: Final = 128
"""That wait unread, of one socket: more than a second of a busy engine's, or 512 MiB of one that sends the largest."""
_AHEAD: Final = 1 << 17
"""What may be decoded and not taken out yet, by its weight: some 32 MiB."""
_REPLAY_S: Final = 10.0
"""For a replay to say something more."""
_LOOK_MS: Final = 500
_AT_ONCE: Final = 64
"""Messages of one socket, before the others have their turn."""
_AT_ONCE_BYTES: Final = 4 << 20
"""Of these; the last one may be longer."""


class PublisherEndpoint(NamedTuple):
    """The addresses at which an engine publishes."""

    endpoint: str
    replay: str | None


class ReceivedBatch(NamedTuple):
    """A batch that is to be entered."""

    who: Hashable
    batch: EventBatch | None
    """None: what was said before holds no longer."""


class KVEventSubscriber:
    """Receives the events of all publishers in a thread. Only one thread, the event loop's, may call it."""

    def __init__(self, ready: Callable[[], None]) -> None:
        """`ready` is called in the thread when there is something to take, and there was nothing before."""
        self._ready = ready
        self._orders: deque[tuple[Hashable, PublisherEndpoint | None, bool]] = deque()
        self._said: deque[ReceivedBatch] = deque()
        self._ahead = 0
        self._lock = threading.Lock()
        self._room = threading.Event()
        self._room.set()
        self._ears: dict[Hashable, _PublisherSockets] = {}
        self._wake_fd, self._woken_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)
        self._thread.start()

    def subscribe(self, who: Hashable, publisher: PublisherEndpoint) -> None:
        """Subscribes to a publisher, whose batches are marked with `who`."""
        self._order(who, publisher, anew=False)

    def request_full_replay(self, who: Hashable) -> None:
        """Requests a replay of everything that the publisher still has."""
        self._order(who, None, anew=True)

    def unsubscribe(self, who: Hashable) -> None:
        """Ends a subscription. Batches that were received may still be taken."""
        self._order(who, None, anew=False)

    def take_batch(self) -> ReceivedBatch | None:
        """Takes the next received batch."""
        with self._lock:
            if not self._said:
                return None
            said = self._said.popleft()
            self._ahead -= batch_weight(said.batch)
            if self._ahead < _AHEAD:
                self._room.set()
            return said

    @property
    def pending_weight(self) -> int:
        """The weight of batches that are decoded and not taken yet."""
        return self._ahead

    def counts(self, who: Hashable) -> tuple[bool, int, int, int, int]:
        """Returns whether it is connected, and its counts of batches, invalid messages, unfilled gaps and restarts."""
        ear = self._ears.get(who)
        if ear is None:
            return False, 0, 0, 0, 0
        return ear.connected, ear.batches, ear.refused, ear.stream.gaps, ear.stream.restarts

    def close(self) -> None:
        """Ends the thread, within half a second or so."""
        self._closed = True
        self._room.set()
        self._wake()
        self._thread.join(5.0)
        os.close(self._wake_fd)
        os.close(self._woken_fd)

    def _order(self, who: Hashable, publisher: PublisherEndpoint | None, *, anew: bool) -> None:
        if not self._closed:  # then its pipe is somebody else's file by now
            self._orders.append((who, publisher, anew))
            self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it is awake
            os.write(self._woken_fd, b".")

    # in the thread

    def _run(self) -> None:
        context = zmq.Context(io_threads=1)
        try:
            poller = zmq.Poller()
            poller.register(self._wake_fd, zmq.POLLIN)
            while not self._closed:
                ready = {place for place, _ in poller.poll(_LOOK_MS)}
                with suppress(BlockingIOError):
                    os.read(self._wake_fd, 4096)
                while self._orders:
                    self._obey(context, poller, *self._orders.popleft())
                for ear in list(self._ears.values()):
                    ear.hear(ready)
                    while not self._room.wait(_LOOK_MS / 1000) and not self._closed:
                        pass
        except Exception:  # noqa: BLE001  a thread that ends says why; requests go on without it
            _log.exception(
                "KV events are no longer received; caches are predicted from routed requests and engines' reports"
            )
        finally:
            for ear in self._ears.values():
                ear.close()
            context.destroy(linger=0)

    def _obey(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        poller: zmq.Poller,
        who: Hashable,
        at: PublisherEndpoint | None,
        anew: bool,
    ) -> None:
        ear = self._ears.get(who)
        if at is not None:
            try:
                self._ears[who] = _PublisherSockets(context, poller, at, lambda batch: self._put(who, batch))
            except zmq.ZMQError as error:
                _log.warning("cannot subscribe to the KV events at %s: %s", at.endpoint, error)
        elif ear is not None and anew:
            ear.stream.restart()
        elif ear is not None:
            del self._ears[who]
            ear.close()

    def _put(self, who: Hashable, batch: EventBatch | None) -> None:
        with self._lock:
            first = not self._said
            self._said.append(ReceivedBatch(who, batch))
            self._ahead += batch_weight(batch)
            if self._ahead >= _AHEAD:
                self._room.clear()
        if first:
            self._ready()


class _PublisherSockets:
    """The sockets of one publisher."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        poller: zmq.Poller,
        at: PublisherEndpoint,
        tell: Callable[[EventBatch | None], None],
    ) -> None:
        self._context = context
        self._poller = poller
        self._at = at
        self._tell = tell
        self._source = EventSource(at.endpoint)
        self.stream = OrderedEventStream(self._told, replays=at.replay is not None)
        self.connected = False
        self.batches = self.refused = 0
        self._replay: zmq.Socket[bytes] | None = None
        self._heard_s = 0.0
        """When the replay that runs has said something last."""
        self._live = self._socket(zmq.SUB)
        self._live.subscribe(b"")
        self._monitor = self._live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._live.connect(at.endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    def hear(self, ready: "set[object]") -> None:
        """Receives new messages and requests replays."""
        if self._monitor in ready:
            while self._monitor.poll(0):
                self.connected = recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
                if self.connected:
                    self.stream.on_connected()
        if self._replay is not None and self._replay in ready:
            self._hear_replay(self._replay)
        if self._live in ready:
            for frames in _received(self._live):
                try:
                    live = read_live(frames)
                    batch = decode_msgpack(live.payload, self._source, live.sequence, max_bytes=_MESSAGE_BYTES)
                except InvalidEvents as error:
                    self._refuse(error)
                else:
                    self.stream.on_live_batch(batch)
        if self.stream.replay_wanted_from is not None:
            self._ask(self.stream.replay_wanted_from)
        elif self._replay is not None and monotonic() > self._heard_s + _REPLAY_S:
            self._hang_up()
            self.stream.on_replay_end()

    def close(self) -> None:
        self._hang_up()
        self._poller.unregister(self._monitor)
        self._poller.unregister(self._live)
        self._live.disable_monitor()
        self._monitor.close(linger=0)
        self._live.close(linger=0)

    def _told(self, batch: EventBatch | None) -> None:
        self.batches += batch is not None
        self._tell(batch)

    def _hear_replay(self, socket: "zmq.Socket[bytes]") -> None:
        self._heard_s = monotonic()
        for frames in _received(socket):
            try:
                again = read_replayed(frames)
                if again is None:
                    self._hang_up()
                    self.stream.on_replay_end()
                    return
                batch = decode_msgpack(again.payload, self._source, again.sequence, max_bytes=_MESSAGE_BYTES)
            except InvalidEvents as error:
                self._refuse(error)
            else:
                self.stream.on_replayed_batch(batch)

    def _ask(self, first: int) -> None:
        """Requests a replay on a new socket, so that answers to an earlier request are dropped."""
        self.stream.replay_wanted_from = None
        self._hang_up()
        try:
            self._replay = self._socket(zmq.DEALER)
            self._replay.connect(self._at.replay or "")
        except zmq.ZMQError as error:  # the others are heard all the same
            _log.warning("cannot request lost KV events at %s: %s", self._at.replay, error)
            self._hang_up()
            self.stream.on_replay_end()
            return
        self._heard_s = monotonic()
        with suppress(zmq.Again):
            self._replay.send_multipart(replay_request(first), zmq.NOBLOCK)

    def _hang_up(self) -> None:
        if self._replay is not None:
            self._poller.unregister(self._replay)
            self._replay.close(linger=0)
            self._replay = None

    def _refuse(self, error: InvalidEvents) -> None:
        self.refused += 1
        if self.refused == 1:
            _log.warning("%s sends invalid KV events: %s", self._at.endpoint, error)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
        self._poller.register(socket, zmq.POLLIN)
        return socket


def _received(socket: "zmq.Socket[bytes]") -> "list[list[bytes]]":
    """Receives a bounded number of the messages that are available now."""
    found: list[list[bytes]] = []
    size = 0
    with suppress(zmq.Again):
        while len(found) < _AT_ONCE and size < _AT_ONCE_BYTES:
            found.append(socket.recv_multipart(zmq.NOBLOCK))
            size += sum(map(len, found[-1]))
    return found
