"""The side that is read from: values of this process's own memory, sent or held for others.

Each reader has a thread. A value is pinned while a reader receives it, so it is not overwritten meanwhile.

Invariant: a reader has a limited time, and less if it takes no bytes. Then it is cut off, and its pinned values are
free again. A connection that has not proved its right to read takes no reader's place.
"""

import logging
import math
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from secrets import token_bytes
from typing import Final

from kvparams_connectors.log_rate_limiter import LogRateLimiter
from kvparams_connectors.store import Result, ResultCode, Results
from kvparams_connectors.stores.memory.store import MemoryStore
from kvparams_connectors.stores.peer.channel import PeerChannel
from kvparams_connectors.stores.peer.handshake import RUN_BYTES, accept_handshake
from kvparams_connectors.stores.peer.wire import (
    REPLY_HEAD,
    REQUEST_HEAD,
    PeerOperation,
    PeerProtocolError,
    PeerStatus,
    PlacedValue,
    PlacementTable,
    encode_found,
    encode_placement,
    encode_sizes,
    parse_keys,
    parse_request,
)
from kvparams_connectors.value_memory import PinnedValue

__all__ = ["PeerServer"]

_LOGGER: Final = logging.getLogger(__name__)

_MOST_READERS: Final = 128
_MOST_STRANGERS: Final = 128
"""Connections whose handshake is not over. The oldest goes when there is one more: a reader needs milliseconds."""
_BEGIN_S: Final = 5.0
"""For the handshake, and for a request once its first byte has come."""
_LONGEST_S: Final = 30.0
"""For an answer, and for what is held."""
_STRETCH: Final = 4 << 20
_STRETCH_S: Final = 2.0
"""A reader that takes fewer bytes than a stretch in this time is cut off: it pins what it was promised."""
_IDLE_S: Final = 300.0
_SHORT_S: Final = 0.01
"""Until somebody who ends may have given back what was short."""


class PeerServer:
    """Lets others read what is in `memory`."""

    def __init__(self, memory: MemoryStore, listener: socket.socket, secret: bytes, session: str) -> None:
        """Starts the thread that accepts readers.

        Args:
            memory: the store whose values are read; the caller closes it.
            listener: a bound, listening socket; `close` closes it.
            secret: the secret that readers have to prove; empty: readers need none.
            session: the transfer engine's name of this process, for readers that use one; empty: there is none.
        """
        self._memory = memory
        self._listener = listener
        self._secret = secret
        self._session = session
        self._run: Final = token_bytes(RUN_BYTES)
        self._lock = threading.Lock()
        self._readers: dict[PeerChannel, threading.Thread] = {}
        self._strangers: dict[PeerChannel, threading.Thread] = {}
        self._complaints = LogRateLimiter()
        self._closed = False
        self.values = 0
        """Sent, or held for others to read, so far."""
        self.nbytes = 0
        """Of these."""
        self.turned_away = 0
        """Readers that did not know the secret, said nothing that makes sense, or were too many."""
        self._accepting = threading.Thread(target=self._accept, name="kvparams-peer-accept", daemon=True)
        self._accepting.start()

    @property
    def readers(self) -> int:
        """Connections now, without those that have not shown yet that they may read."""
        with self._lock:
            return len(self._readers)

    def close(self, timeout_s: float) -> None:
        """Accept nobody any more and cut all readers off; nothing is pinned afterwards. All of it takes no longer."""
        give_up = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            readers = self._readers | self._strangers
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()
        for channel in readers:
            channel.hang_up()
        for thread in (self._accepting, *readers.values()):
            thread.join(max(0.0, give_up - time.monotonic()))

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_SHORT_S)  # no more file descriptors, most likely: some come free
                continue
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                channel = PeerChannel(sock)
            except OSError:  # gone again
                sock.close()
                continue
            self._admit(channel)

    def _admit(self, channel: PeerChannel) -> None:
        """Attend to somebody new, by a thread."""
        thread = threading.Thread(target=self._attend, args=(channel,), name="kvparams-peer-reader", daemon=True)
        with self._lock:
            if self._closed:
                channel.close()
                return
            if len(self._strangers) >= _MOST_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.hang_up()  # its thread closes it
                self.turned_away += 1
            self._strangers[channel] = thread
            try:
                thread.start()
            except RuntimeError:  # no more threads, or no memory for one: some end
                del self._strangers[channel]
                self.turned_away += 1
            else:
                return
        channel.close()
        if self._complaints.is_due():
            _LOGGER.warning("peer: no thread for one more reader")
        time.sleep(_SHORT_S)

    def _promoted(self, channel: PeerChannel) -> bool:
        """It may read; whether there is room for one more."""
        with self._lock:
            thread = self._strangers.pop(channel, None)
            if thread is None or self._closed or len(self._readers) >= _MOST_READERS:
                return False
            self._readers[channel] = thread
        return True

    def _attend(self, channel: PeerChannel) -> None:
        held: list[PinnedValue] = []
        try:
            channel.set_deadline(time.monotonic() + _BEGIN_S)
            if not accept_handshake(channel, self._secret, self._run) or not self._promoted(channel):
                with self._lock:
                    self.turned_away += 1
                return
            self._answer(channel, held)
        except PeerProtocolError as error:
            with self._lock:
                self.turned_away += 1
            if self._complaints.is_due():
                _LOGGER.warning("peer: a reader does not speak as it should: %s", error)
        except OSError:  # it went, or its time was over
            pass
        except Exception:
            _LOGGER.exception("peer: serving a reader failed")
        finally:
            self._memory.unpin_values(held)
            with self._lock:
                self._readers.pop(channel, None)
                self._strangers.pop(channel, None)
            channel.close()

    def _answer(self, channel: PeerChannel, held: list[PinnedValue]) -> None:
        """Answer requests until there are no more. What is in `held` when this ends or raises is still pinned."""
        hold_until = 0.0
        while True:
            spoken = channel.wait_readable(hold_until - time.monotonic() if held else _IDLE_S)
            over = bool(held) and (not spoken or time.monotonic() >= hold_until)
            if over:
                self._let_go(held)
            if not spoken:
                if over:
                    continue
                return
            # What is held is let go when its time is over, whatever else the reader asks for: then it is cut off.
            most = hold_until if held else math.inf
            channel.set_deadline(min(most, time.monotonic() + _BEGIN_S))
            request = parse_request(channel.read(REQUEST_HEAD.size))
            keys, rooms = parse_keys(channel.read(request.nbytes), request.count)
            deadline = time.monotonic() + min(_LONGEST_S, request.give_up_s)
            channel.set_deadline(min(most, deadline))
            if request.operation is PeerOperation.RETURN:
                status = PeerStatus.FINE if held and not keys else PeerStatus.OVER
                self._let_go(held)
                channel.set_deadline(deadline)
                channel.send_parts([REPLY_HEAD.pack(status, 0, 0)])
            elif request.operation is PeerOperation.HOLD:
                self._let_go(held)
                hold_until = deadline
                channel.set_deadline(deadline)
                self._hold(channel, keys, rooms, held)
            elif request.operation is PeerOperation.SIZES:
                table = encode_sizes(self._memory.sizes(keys))
                channel.send_parts([REPLY_HEAD.pack(PeerStatus.FINE, len(keys), len(table)), table])
            else:
                self._send(channel, keys, rooms, min(most, deadline))

    def _let_go(self, held: list[PinnedValue]) -> None:
        self._memory.unpin_values(held)
        held.clear()

    def _send(self, channel: PeerChannel, keys: Sequence[str], rooms: Sequence[int], deadline: float) -> None:
        values = self._memory.pin_values(keys)
        try:
            results = _results(rooms, values)
            table = encode_found(results)
            parts: list[bytes | memoryview] = [REPLY_HEAD.pack(PeerStatus.FINE, len(keys), len(table)), table]
            for value, result in zip(values, results, strict=True):
                if value is not None and result.code is ResultCode.OK:
                    parts += value.views
            for stretch in _stretches(parts):
                channel.set_deadline(min(deadline, time.monotonic() + _STRETCH_S))
                channel.send_parts(stretch)
            self._count(results)
        finally:
            self._memory.unpin_values([value for value in values if value is not None])

    def _hold(self, channel: PeerChannel, keys: Sequence[str], rooms: Sequence[int], held: list[PinnedValue]) -> None:
        if not self._session:
            channel.send_parts([REPLY_HEAD.pack(PeerStatus.UNABLE, 0, 0)])
            return
        values = self._memory.pin_values(keys)
        held += [value for value in values if value is not None]
        results = _results(rooms, values)
        placed = [
            PlacedValue(result, value.generation, value.addresses)
            if value is not None and result.code is ResultCode.OK
            else PlacedValue(result)
            for value, result in zip(values, results, strict=True)
        ]
        table = encode_placement(PlacementTable(self._session, placed))
        channel.send_parts([REPLY_HEAD.pack(PeerStatus.FINE, len(keys), len(table)), table])
        self._count(results)

    def _count(self, results: Results) -> None:
        with self._lock:
            self.values += sum(result.code is ResultCode.OK for result in results)
            self.nbytes += sum(result.nbytes for result in results if result.code is ResultCode.OK)


def _stretches(parts: Sequence[bytes | memoryview]) -> Iterator[list[bytes | memoryview]]:
    """The same bytes in the same order, about `_STRETCH` at a time."""
    stretch: list[bytes | memoryview] = []
    room = _STRETCH
    for part in parts:
        left = memoryview(part)
        while left.nbytes > room:
            yield [*stretch, left[:room]]
            left, stretch, room = left[room:], [], _STRETCH
        stretch.append(left)
        room -= left.nbytes
    yield stretch


def _results(rooms: Sequence[int], values: Sequence[PinnedValue | None]) -> Results:
    return [
        Result(ResultCode.MISS)
        if value is None
        else Result(ResultCode.OK if value.nbytes <= room else ResultCode.TOO_LARGE, value.nbytes)
        for room, value in zip(rooms, values, strict=True)
    ]
