"""The side that is read from: values of this process's own memory, sent or held for others.

A thread for each reader. What a reader gets is pinned while it gets it, so it is never overwritten under it. The one
rule: a reader is given so much time and no more; then it is cut off, and what was pinned for it is free again.
"""

import logging
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from secrets import token_bytes
from typing import Final

from kvparams_connectors.store import Code, Result, Results
from kvparams_connectors.stores.memory import Held, MemoryStore
from kvparams_connectors.stores.peer.channel import Channel
from kvparams_connectors.stores.peer.handshake import RUN_BYTES, welcome
from kvparams_connectors.stores.peer.wire import (
    REPLY_HEAD,
    REQUEST_HEAD,
    Operation,
    Placed,
    Placement,
    ProtocolError,
    Status,
    found_table,
    parse_keys,
    parse_request,
    placement_table,
    sizes_table,
)

__all__ = ["Server"]

_LOGGER: Final = logging.getLogger(__name__)

_MOST_READERS: Final = 128
_BEGIN_S: Final = 5.0
"""For the handshake, and for a request once its first byte has come."""
_LONGEST_S: Final = 30.0
"""For an answer, and for what is held."""
_IDLE_S: Final = 300.0
_CLOSE_S: Final = 5.0


class Server:
    """Lets others read what is in `memory`."""

    def __init__(self, memory: MemoryStore, listener: socket.socket, secret: bytes, session: str) -> None:
        """Args:
        memory: stays the caller's.
        listener: bound and listening; from now on ours to close.
        secret: what readers have to know; empty: nothing.
        session: how a transfer engine that reads this memory calls this process; empty: there is none.
        """
        self._memory = memory
        self._listener = listener
        self._secret = secret
        self._session = session
        self._run: Final = token_bytes(RUN_BYTES)
        self._lock = threading.Lock()
        self._readers: dict[Channel, threading.Thread] = {}
        self._closed = False
        self.values = 0
        """Sent, or held for others to read, so far."""
        self.nbytes = 0
        """Of these."""
        self.turned_away = 0
        """Readers that did not know the secret, or were too many."""
        self._accepting = threading.Thread(target=self._accept, name="kvparams-peer-accept", daemon=True)
        self._accepting.start()

    @property
    def readers(self) -> int:
        """Connections now."""
        with self._lock:
            return len(self._readers)

    def close(self) -> None:
        """Accept nobody any more and cut all readers off; nothing is pinned afterwards."""
        with self._lock:
            self._closed = True
            readers = dict(self._readers)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()
        for channel in readers:
            channel.hang_up()
        for thread in (self._accepting, *readers.values()):
            thread.join(_CLOSE_S)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.01)  # no more file descriptors, most likely: some come free
                continue
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                channel = Channel(sock)
            except OSError:  # gone again
                sock.close()
                continue
            thread = threading.Thread(target=self._attend, args=(channel,), name="kvparams-peer-reader", daemon=True)
            with self._lock:
                admitted = not self._closed and len(self._readers) < _MOST_READERS
                if admitted:
                    self._readers[channel] = thread
                else:
                    self.turned_away += 1
            if admitted:
                thread.start()
            else:
                channel.close()

    def _attend(self, channel: Channel) -> None:
        held: list[Held] = []
        try:
            channel.until(time.monotonic() + _BEGIN_S)
            if not welcome(channel, self._secret, self._run):
                with self._lock:
                    self.turned_away += 1
                return
            self._answer(channel, held)
        except ProtocolError as error:
            _LOGGER.warning("peer: a reader does not speak as it should: %s", error)
        except OSError:  # it went, or its time was over
            pass
        except Exception:
            _LOGGER.exception("peer: serving a reader failed")
        finally:
            self._memory.let_go(held)
            with self._lock:
                self._readers.pop(channel, None)
            channel.close()

    def _answer(self, channel: Channel, held: list[Held]) -> None:
        """Answer requests until there are no more. What is in `held` when this ends or raises is still pinned."""
        hold_until = 0.0
        while True:
            now = time.monotonic()
            if not channel.spoken(hold_until - now if held else _IDLE_S):
                if not held:
                    return
                self._memory.let_go(held)
                held.clear()
                continue
            channel.until(time.monotonic() + _BEGIN_S)
            request = parse_request(channel.read(REQUEST_HEAD.size))
            keys, rooms = parse_keys(channel.read(request.nbytes), request.count)
            deadline = time.monotonic() + min(_LONGEST_S, request.give_up_s)
            channel.until(deadline)
            if request.operation is Operation.RETURN:
                status = Status.FINE if held and not keys and time.monotonic() < hold_until else Status.OVER
                self._memory.let_go(held)
                held.clear()
                channel.send_parts([REPLY_HEAD.pack(status, 0, 0)])
            elif request.operation is Operation.HOLD:
                self._memory.let_go(held)
                held.clear()
                hold_until = deadline
                self._hold(channel, keys, rooms, held)
            elif request.operation is Operation.SIZES:
                table = sizes_table(self._memory.sizes(keys))
                channel.send_parts([REPLY_HEAD.pack(Status.FINE, len(keys), len(table)), table])
            else:
                self._send(channel, keys, rooms)

    def _send(self, channel: Channel, keys: Sequence[str], rooms: Sequence[int]) -> None:
        values = self._memory.hold(keys)
        try:
            results = _results(rooms, values)
            table = found_table(results)
            parts: list[bytes | memoryview] = [REPLY_HEAD.pack(Status.FINE, len(keys), len(table)), table]
            for value, result in zip(values, results, strict=True):
                if value is not None and result.code is Code.OK:
                    parts += value.views
            channel.send_parts(parts)
            self._count(results)
        finally:
            self._memory.let_go([value for value in values if value is not None])

    def _hold(self, channel: Channel, keys: Sequence[str], rooms: Sequence[int], held: list[Held]) -> None:
        if not self._session:
            channel.send_parts([REPLY_HEAD.pack(Status.UNABLE, 0, 0)])
            return
        values = self._memory.hold(keys)
        held += [value for value in values if value is not None]
        results = _results(rooms, values)
        placed = [
            Placed(result, value.generation, value.addresses)
            if value is not None and result.code is Code.OK
            else Placed(result)
            for value, result in zip(values, results, strict=True)
        ]
        table = placement_table(Placement(self._session, placed))
        channel.send_parts([REPLY_HEAD.pack(Status.FINE, len(keys), len(table)), table])
        self._count(results)

    def _count(self, results: Results) -> None:
        with self._lock:
            self.values += sum(result.code is Code.OK for result in results)
            self.nbytes += sum(result.nbytes for result in results if result.code is Code.OK)


def _results(rooms: Sequence[int], values: Sequence[Held | None]) -> Results:
    return [
        Result(Code.MISS)
        if value is None
        else Result(Code.OK if value.nbytes <= room else Code.TOO_LARGE, value.nbytes)
        for room, value in zip(rooms, values, strict=True)
    ]
