"""The exchange: sends this proxy's entries in batches, and hands on those of its siblings.

Nothing here waits for a sibling or for the transport. What cannot be sent is lost, and each side notices: a gap in the
sequence numbers, or a lease that ends, tells a reader what it no longer knows.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Final, Protocol

from kvparams.replication.entries import EngineLoad, Entry
from kvparams.replication.entry_codec import decode_entries, decode_heartbeat, encode_entry, encode_heartbeat
from kvparams.replication.messages import AuthenticationError, Message, MessageAuthenticator, MessageError, MessageKind
from kvparams.replication.siblings import Arrival, Sibling, SiblingTable
from kvparams_proxy.coordination.missed_entries import MissedEntries
from kvparams_proxy.coordination.transport import Transport

__all__ = ["HEARTBEAT_S", "LEASE_S", "Exchange", "ExchangeListener"]

LEASE_S: Final = 2.0
"""A sibling that is not heard from for so long has ended."""
HEARTBEAT_S: Final = 0.5
_WATCH_S: Final = 0.1
_BATCH_S: Final = 0.01
"""Messages are at least so far apart; entries are collected meanwhile."""
_BATCH_BYTES: Final = 32 << 10
_SNAPSHOT_WAIT_S: Final = 3.0
"""A snapshot that has not ended after so long is asked for again, of another sibling."""
_LOG_EVERY_S: Final = 30.0
_log: Final = logging.getLogger(__name__)


class ExchangeListener(Protocol):
    """Applies what siblings tell, and knows what to tell them."""

    def apply_entry(self, sibling: Sibling, entry: Entry) -> None:
        """Applies one entry."""
        ...

    def apply_loads(self, sibling: Sibling, loads: Mapping[int, tuple[int, int]]) -> None:
        """Replaces everything that is known of the sibling's load."""
        ...

    def forget_legs(self, sibling: Sibling) -> None:
        """Hears that messages of the sibling are lost, or that it has ended: its legs are not known any more."""
        ...

    def sibling_returned(self) -> None:
        """Hears that a sibling can be heard that has worked for a while without this proxy."""
        ...

    def check_info(self, sibling: Sibling) -> None:
        """Hears that a sibling says something else about itself than before."""
        ...

    def siblings_changed(self) -> None:
        """Hears that a sibling has come or gone."""
        ...

    def beat(self) -> None:
        """Hears that a heartbeat is about to be sent."""
        ...

    def changed_loads(self) -> Iterable[EngineLoad]:
        """Returns this proxy's own loads that have changed since the last call."""
        ...

    def loads(self) -> Iterable[EngineLoad]:
        """Returns this proxy's own load: engines without any are left out."""
        ...

    def snapshot(self) -> Iterator[Entry | None]:
        """Yields what this proxy knows. None is a place where the event loop may do something else."""
        ...

    def recent(self, seconds: float) -> Iterator[Entry | None]:
        """Yields what this proxy has told in the last seconds and is still true, and None as `snapshot` does."""
        ...


class Exchange:
    """Sends and receives the messages of one proxy."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        own_id: int,
        transport: Transport,
        authenticator: MessageAuthenticator,
        listener: ExchangeListener,
        info: Callable[[], Mapping[str, object]],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Creates an exchange that is not started.

        Args:
            loop: the event loop.
            own_id: 64 bits, not 0, that no other run of a proxy has.
            transport: what carries messages.
            authenticator: seals and opens them.
            listener: applies entries.
            info: what this proxy says of itself; JSON.
            wall_clock: seconds since 1970.
        """
        self.id: Final = own_id
        self.siblings: Final = SiblingTable(self.id, LEASE_S)
        self.refused: Final[Counter[str]] = Counter()
        """Messages that were not believed, by reason."""
        self.sent_bytes = 0
        self.sent_messages = 0
        self.gaps = 0
        """How often messages of a sibling were missing."""
        self._loop = loop
        self._transport = transport
        self._authenticator = authenticator
        self._listener = listener
        self._info = info
        self._wall_clock = wall_clock
        self._sequence = 0
        self._has_untold = False
        """Whether entries were kept from everybody since the last message: who hears the next one sees a gap."""
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._flush_timer: asyncio.Handle | None = None
        self._flushed_at = 0.0
        self._beat_timer: asyncio.TimerHandle | None = None
        self._watch_timer: asyncio.TimerHandle | None = None
        self._snapshots: set[asyncio.Task[None]] = set()
        self._missed = MissedEntries(loop, self, listener.recent)
        self._asked: dict[int, float] = {}
        """When which sibling was asked for a snapshot."""
        self._has_snapshot = asyncio.Event()
        self._began = loop.time()
        self._last_logged = 0.0
        self.is_degraded = False
        """Whether the transport is not connected."""

    def start(self) -> None:
        """Begins to send and to receive."""
        self._transport.start(self._receive)
        self._beat()
        self._watch()

    def publish(self, entry: Entry) -> None:
        """Tells the siblings, within milliseconds. Without siblings nothing is kept.

        One that this proxy does not hear may hear this proxy, and has then missed it.
        """
        if not self.siblings.alive:
            self._has_untold = True
            return
        encoded = encode_entry(entry)
        self._batch.append(encoded)
        self._batch_bytes += len(encoded)
        if self._batch_bytes >= _BATCH_BYTES:
            self.flush()
        else:
            self.flush_soon()

    def flush_soon(self) -> None:
        """Sends what there is to tell, within milliseconds."""
        if self._flush_timer is None:
            # With little to do a message leaves at the end of this turn; with much to do, many entries share one.
            wait_s = self._flushed_at + _BATCH_S - self._loop.time()
            if wait_s > 0.0:
                self._flush_timer = self._loop.call_later(wait_s, self.flush)
            else:
                self._flush_timer = self._loop.call_soon(self.flush)

    async def close(self) -> None:
        """Says goodbye and ends everything."""
        for timer in (self._flush_timer, self._beat_timer, self._watch_timer):
            if timer is not None:
                timer.cancel()
        await self._missed.close()
        for task in list(self._snapshots):
            task.cancel()
        if self._snapshots:
            await asyncio.wait(self._snapshots)
        self._send_in_order(MessageKind.GOODBYE, b"")
        await self._transport.close()

    # sending

    def send_to(self, receiver: int, kind: MessageKind, payload: bytes) -> None:
        """Sends a message to one sibling."""
        self._send(kind, payload, receiver, 0)

    def flush(self) -> None:
        """Sends what there is to tell."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        # Loads come first: who hears that a leg waits no longer must know that it runs.
        loads = map(encode_entry, self._listener.changed_loads())
        payload = b"".join((*loads, *self._batch))
        self._has_untold |= bool(self._batch) and not self.siblings.alive
        self._batch.clear()
        self._batch_bytes = 0
        if payload and self.siblings.alive:
            self._flushed_at = self._loop.time()
            self._send_in_order(MessageKind.ENTRIES, payload)

    def _send_in_order(self, kind: MessageKind, payload: bytes) -> None:
        self._sequence += 2 if self._has_untold else 1
        self._has_untold = False
        self._send(kind, payload, 0, self._sequence)

    def _send(self, kind: MessageKind, payload: bytes, receiver: int, sequence: int) -> None:
        message = self._authenticator.seal(kind, self.id, receiver, sequence, self._wall_clock(), payload)
        self.sent_bytes += len(message)
        self.sent_messages += 1
        if kind == MessageKind.HEARTBEAT:
            self._transport.announce(message)
        else:
            self._transport.send(message, receiver)

    def _beat(self) -> None:
        """Says that this proxy lives, and what runs there."""
        self._beat_timer = self._loop.call_later(HEARTBEAT_S, self._beat)
        self._listener.beat()
        self.flush()
        self._send_in_order(MessageKind.HEARTBEAT, encode_heartbeat(self._info(), self._listener.loads()))
        self._say_whether_connected()
        self._ask_for_snapshot(self._loop.time())

    def _watch(self) -> None:
        """Forgets siblings whose lease has ended."""
        self._watch_timer = self._loop.call_later(_WATCH_S, self._watch)
        for sibling in self.siblings.expire(self._loop.time()):
            self._end(sibling, "is not heard from any more")

    def _say_whether_connected(self) -> None:
        degraded = not self._transport.is_connected and self._loop.time() - self._began > LEASE_S
        if degraded and not self.is_degraded:
            _log.warning("the other proxies cannot be reached: this one goes on with what it knows")
        elif self.is_degraded and not degraded:
            _log.info("the other proxies can be reached again")
        self.is_degraded = degraded

    def _ask_for_snapshot(self, now: float) -> None:
        """Asks the sibling that knows most, once several had the time to say so."""
        if self.has_snapshot or now - self._began < HEARTBEAT_S:
            return
        candidates = [each for each in self.siblings.alive.values() if each.info.get("has_snapshot")]
        if not candidates:
            # Nobody knows more than this proxy: siblings say so at once, and each is heard twice a second.
            is_alone = self._transport.is_connected and not self.siblings.alive
            if now - self._began > (2 if is_alone else 4) * HEARTBEAT_S:
                self._has_snapshot.set()
            return
        if any(now - at < _SNAPSHOT_WAIT_S for at in self._asked.values()):
            return
        chosen = min(candidates, key=lambda each: (self._asked.get(each.id, 0.0), -_number(each.info.get("blocks"))))
        self._asked[chosen.id] = now
        self._send(MessageKind.SNAPSHOT_REQUEST, b"", chosen.id, 0)

    @property
    def has_snapshot(self) -> bool:
        """This is true once a sibling has told all that it knows, or when there was none to ask."""
        return self._has_snapshot.is_set()

    async def wait_for_snapshot(self, within_s: float) -> None:
        """Waits until a sibling has told what it knows or there is none, but no longer than this."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._has_snapshot.wait()

    # receiving

    def _receive(self, data: bytes) -> None:
        try:
            message = self._authenticator.open(data, self._wall_clock())
            if message.sender == self.id or message.receiver not in (0, self.id):
                return
            self._handle(message)
        except MessageError as error:
            kind = "authentication" if isinstance(error, AuthenticationError) else "format"
            self._refuse(kind, str(error))
        except ValueError as error:
            self._refuse("format", str(error))
        except Exception:  # noqa: BLE001  a fault of the proxy costs this message, not the exchange
            self.refused["fault"] += 1
            _log.exception("a message between proxies could not be processed")

    def _handle(self, message: Message) -> None:
        before = len(self.siblings)
        arrival, sibling = self.siblings.hear(message.sender, message.sequence, self._loop.time())
        if sibling is None:
            return
        if len(self.siblings) != before:
            self._listener.siblings_changed()
            _log.info("proxy %016x is heard; proxies that share this fleet: %d", sibling.id, len(self.siblings) + 1)
        if arrival is Arrival.AFTER_GAP:
            self.gaps += 1
            self._listener.forget_legs(sibling)
            self._missed.missed(sibling, 2 * HEARTBEAT_S)  # it is heard twice in this time
        kind, payload = message.kind, message.payload
        if kind == MessageKind.ENTRIES:
            for entry in decode_entries(payload):
                self._listener.apply_entry(sibling, entry)
        elif kind == MessageKind.HEARTBEAT:
            self._handle_heartbeat(sibling, payload)
        elif kind == MessageKind.SNAPSHOT:
            self._handle_snapshot(sibling, payload)
        elif kind == MessageKind.SNAPSHOT_REQUEST:
            self._begin_snapshot(sibling)
        elif kind == MessageKind.MISSED_REQUEST:
            self._missed.answer_soon(sibling, payload)
        elif kind == MessageKind.REPEATED:
            self._missed.forget(sibling)
        elif kind == MessageKind.GOODBYE:
            self.siblings.end(sibling.id)
            self._end(sibling, "has ended")

    def _handle_heartbeat(self, sibling: Sibling, payload: memoryview) -> None:
        info, entries = decode_heartbeat(payload)
        if sibling.info != info:
            is_first = not sibling.info
            sibling.info = info
            if is_first and info.get("has_snapshot") and self.has_snapshot:
                self._missed.missed(sibling, sibling.away_s)  # both have lived for a while without hearing each other
                self._listener.sibling_returned()
            self._listener.check_info(sibling)
        self._missed.ask(sibling)
        loads = {each.engine: (each.in_flight, each.tokens) for each in entries if isinstance(each, EngineLoad)}
        self._listener.apply_loads(sibling, loads)

    def _handle_snapshot(self, sibling: Sibling, payload: memoryview) -> None:
        if sibling.id not in self._asked:
            self._refuse("unasked", "a snapshot that nobody asked for")
            return
        self._asked[sibling.id] = self._loop.time()
        if not payload:
            self._has_snapshot.set()
            self._asked.clear()
            _log.info("proxy %016x has told what it knows", sibling.id)
        for entry in decode_entries(payload):
            self._listener.apply_entry(sibling, entry)

    def _begin_snapshot(self, sibling: Sibling) -> None:
        if len(self._snapshots) >= 4:  # they ask again
            return
        task = self._loop.create_task(self._send_snapshot(sibling.id), name="snapshot for another proxy")
        self._snapshots.add(task)
        task.add_done_callback(self._snapshots.discard)

    async def _send_snapshot(self, receiver: int) -> None:
        """Sends what this proxy knows.

        Invariant: each entry is sent in the turn of the event loop in which the listener yields it. Otherwise the
        receiver may hear first that a leg has ended or a block is gone, and then that it is there.
        """
        pieces: list[bytes] = []
        size = 0
        for entry in self._listener.snapshot():
            if entry is not None:
                pieces.append(encode_entry(entry))
                size += len(pieces[-1])
                if size < _BATCH_BYTES:
                    continue
            if pieces:
                self._send_piece(pieces, receiver)
                size = 0
            await asyncio.sleep(0)
        if pieces:
            self._send_piece(pieces, receiver)
        self._send(MessageKind.SNAPSHOT, b"", receiver, 0)

    def _send_piece(self, pieces: list[bytes], receiver: int) -> None:
        """Sends a piece of a snapshot, behind the legs that have begun: their blocks may be in it."""
        self.flush()
        self._send(MessageKind.SNAPSHOT, b"".join(pieces), receiver, 0)
        pieces.clear()

    def _end(self, sibling: Sibling, why: str) -> None:
        self._asked.pop(sibling.id, None)
        self._missed.forget(sibling)
        self._listener.apply_loads(sibling, {})
        self._listener.forget_legs(sibling)
        self._listener.siblings_changed()
        _log.warning("proxy %016x %s; proxies that share this fleet: %d", sibling.id, why, len(self.siblings) + 1)

    def _refuse(self, reason: str, text: str) -> None:
        self.refused[reason] += 1
        now = self._loop.time()
        if now - self._last_logged >= _LOG_EVERY_S or not self._last_logged:
            self._last_logged = now
            hint = ""
            if reason == "authentication":
                hint = ": another site uses the same prefix, or its proxies have other keys"
            _log.warning(
                "a message between proxies is not believed: %s%s (%d so far)", text, hint, self.refused.total()
            )


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0.0
