"""Reading from others: batches of keys, each batch from one place.

Invariant: a value is OK only if it was received whole, in time, and while it was held for this reader. A place that
misbehaves is left alone, and its keys are a MISS: the place failed, not this store.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvparams_connectors.store import GetOp, Result, ResultCode, Results
from kvparams_connectors.stores.extents import copy_bytes
from kvparams_connectors.stores.peer.addresses import PeerAddress, parse_peer_address
from kvparams_connectors.stores.peer.connections import PeerConnection, PeerConnections
from kvparams_connectors.stores.peer.handshake import HandshakeRefused
from kvparams_connectors.stores.peer.key_locations import KeyLocations
from kvparams_connectors.stores.peer.transfer_engine import GuardedTransferEngine
from kvparams_connectors.stores.peer.wire import (
    MOST_KEYS,
    REPLY_HEAD,
    REQUEST_HEAD,
    PeerOperation,
    PeerProtocolError,
    PeerStatus,
    PlacedValue,
    encode_keys,
    parse_found,
    parse_placement,
    parse_reply,
)

__all__ = ["PeerReader"]

_MISS: Final = Result(ResultCode.MISS)
_LOST: Final = Result(ResultCode.TIMEOUT)
"""A place that answers never says so: it stands for what was not read, until that is a MISS."""
_FAIR_S: Final = 0.25
"""A time-out with less time than this is not the place's fault."""
_ANY_ROOM: Final = 1 << 48
_PLAIN_S: Final = 60.0
"""A place from which a transfer engine could not read is read without one for so long."""


@dataclass(slots=True)
class _PeerReadItem:
    """A `_PeerReadItem` is a value to read."""

    index: int
    key: str
    parts: list[memoryview]
    room: int
    arrived: Callable[[int], None] | None
    """See `GetOp`."""


_ReadPortion = list[tuple[_PeerReadItem, PlacedValue]]
"""Values that a transfer engine reads together."""


class PeerReader:
    """Any thread may use it."""

    def __init__(self, sources: PeerConnections, located: KeyLocations, transfer: GuardedTransferEngine | None) -> None:
        """Connects to no peer yet.

        Args:
            sources: opens the connections to peers.
            located: the known locations of keys. If a place lacks a key, the key is not looked for there again without
                a new hint.
            transfer: a transfer engine for the reads; None: values come over the connections.
        """
        self._sources: Final = sources
        self._located: Final = located
        self._transfer: Final = transfer
        self._plain_until: dict[PeerAddress, float] = {}
        self._lock: Final = threading.Lock()
        self.values = 0
        """Read so far."""
        self.nbytes = 0
        """Of these."""
        self.transferred = 0
        """Of these bytes, those that a transfer engine has read."""
        self.lost = 0
        """Answers that were a MISS because a place failed, was too slow, refused, or was left alone."""

    def sizes(self, place: PeerAddress, keys: Sequence[str], deadline: float) -> Results:
        """OK with the value's size, or MISS."""
        results: Results = []
        for first in range(0, len(keys), MOST_KEYS):
            results += self._sizes(place, keys[first : first + MOST_KEYS], deadline)
        return self._final(place, keys, results)

    def get(self, place: PeerAddress, ops: Sequence[GetOp], deadline: float) -> Results:
        """Read values into the buffers."""
        results = [Result(ResultCode.INVALID)] * len(ops)
        items: list[_PeerReadItem] = []
        for index, op in enumerate(ops):
            try:
                parts = [buffer.cast("B") for buffer in op.buffers if buffer.nbytes]
            except ValueError:  # the caller released a buffer that it had leased to us
                continue
            items.append(_PeerReadItem(index, op.key, parts, sum(part.nbytes for part in parts), op.on_complete))
        for first in range(0, len(items), MOST_KEYS):
            self._get(place, items[first : first + MOST_KEYS], results, deadline)
        good = [result.nbytes for result in results if result.code is ResultCode.OK]
        with self._lock:
            self.values += len(good)
            self.nbytes += sum(good)
        return self._final(place, [op.key for op in ops], results)

    def _final(self, place: PeerAddress, keys: Sequence[str], results: Results) -> Results:
        """Returns what is not known is a MISS, and what the place does not have is not to be found there."""
        self._located.forget(
            (key for key, one in zip(keys, results, strict=True) if one.code is ResultCode.MISS), place
        )
        lost = sum(one is _LOST for one in results)
        with self._lock:
            self.lost += lost
        return [_MISS if one is _LOST else one for one in results] if lost else results

    def _sizes(self, place: PeerAddress, keys: Sequence[str], deadline: float) -> Results:
        results = [_LOST] * len(keys)
        rooms = [_ANY_ROOM] * len(keys)

        def work(link: PeerConnection) -> None:
            _, table = self._ask(link, PeerOperation.SIZES, keys, [0] * len(keys), deadline)
            results[:] = parse_found(table, rooms)

        self._with(place, deadline, work)
        return results

    def _get(self, place: PeerAddress, items: Sequence[_PeerReadItem], results: Results, deadline: float) -> None:
        for item in items:
            results[item.index] = _LOST
        left = list(items)

        def work(link: PeerConnection) -> None:
            transfer = self._transfer
            if transfer is not None and transfer.is_idle and self._plain_until.get(place, 0.0) <= time.monotonic():
                left[:] = self._fetch(transfer, link, left, results, deadline)
            if left:
                self._receive(link, left, results, deadline)

        self._with(place, deadline, work)

    def _with(self, place: PeerAddress, deadline: float, work: Callable[[PeerConnection], None]) -> None:
        """Do `work` on a connection, as far as that can be done."""
        if self._sources.is_backed_off(place):
            return
        given_s = deadline - time.monotonic()
        link: PeerConnection | None = None
        try:
            link = self._sources.acquire(place, deadline)
            work(link)
        except TimeoutError as error:
            if given_s >= _FAIR_S:
                self._sources.record_failure(place, error)
        except (HandshakeRefused, OSError) as error:
            self._sources.record_failure(place, error)
        else:
            self._sources.release(link)
            return
        if link is not None:
            link.channel.close()

    def _receive(self, link: PeerConnection, items: Sequence[_PeerReadItem], results: Results, deadline: float) -> None:
        """Have values sent, each into its buffers."""
        rooms = [item.room for item in items]
        status, table = self._ask(link, PeerOperation.GET, [item.key for item in items], rooms, deadline)
        if status is not PeerStatus.FINE:
            raise PeerProtocolError(f"{status.name} to a request for values")
        for item, found in zip(items, parse_found(table, rooms), strict=True):
            if found.code is ResultCode.OK:
                missing = found.nbytes
                for part in item.parts:
                    length = min(part.nbytes, missing)
                    link.channel.fill(part[:length])
                    missing -= length
                if item.arrived is not None:
                    item.arrived(found.nbytes)
            results[item.index] = found

    def _ask(
        self, link: PeerConnection, operation: PeerOperation, keys: Sequence[str], rooms: Sequence[int], deadline: float
    ) -> tuple[PeerStatus, bytearray]:
        """Send a request and read the table of the reply. A place that is alive begins to answer at once."""
        body = encode_keys(keys, rooms)
        milliseconds = min(max(1, int(1000 * (deadline - time.monotonic()))), 3_600_000)
        link.channel.set_deadline(min(deadline, time.monotonic() + self._sources.connect_s))
        link.channel.send_parts([REQUEST_HEAD.pack(operation, len(keys), len(body), milliseconds), body])
        reply = parse_reply(link.channel.read(REPLY_HEAD.size), len(keys))
        link.channel.set_deadline(deadline)
        return reply.status, link.channel.read(reply.nbytes)

    # ---- by a transfer engine

    def _fetch(
        self,
        transfer: GuardedTransferEngine,
        link: PeerConnection,
        items: Sequence[_PeerReadItem],
        results: Results,
        deadline: float,
    ) -> list[_PeerReadItem]:
        """Have values read from the memory there; those that have to be read in another way."""
        rooms = [item.room for item in items]
        status, table = self._ask(link, PeerOperation.HOLD, [item.key for item in items], rooms, deadline)
        if status is not PeerStatus.FINE:
            self._plainly(link.place)
            return list(items)
        placement = parse_placement(table, rooms)
        where = parse_peer_address(placement.session)
        if where is None or where.host.lower() != link.place.host.lower():
            raise PeerProtocolError(
                f"its memory is said to be at {placement.session!r}, which is another host than its own"
            )
        portions, left = _portions(items, placement.values, results, transfer.landing_area.slot_bytes)
        good: _ReadPortion = []
        for number, portion in enumerate(portions):
            if not _land(transfer, placement.session, portion, deadline):
                if time.monotonic() >= deadline:
                    raise TimeoutError("the deadline has passed")
                left += [item for later in portions[number:] for item, _ in later]
                self._plainly(link.place)
                break
            good += portion
        status, _ = self._ask(link, PeerOperation.RETURN, [], [], deadline)
        for item, placed in good:
            # If the time was over, the memory there may have had another owner meanwhile.
            results[item.index] = placed.result if status is PeerStatus.FINE else _LOST
        if status is PeerStatus.FINE:
            with self._lock:
                self.transferred += sum(placed.result.nbytes for _, placed in good)
        return left

    def _plainly(self, place: PeerAddress) -> None:
        """Read without a transfer engine from there, for a while."""
        now = time.monotonic()
        self._plain_until = {one: until for one, until in self._plain_until.items() if until > now}
        self._plain_until[place] = now + _PLAIN_S


def _portions(
    items: Sequence[_PeerReadItem], values: Sequence[PlacedValue], results: Results, slot_bytes: int
) -> tuple[list[_ReadPortion], list[_PeerReadItem]]:
    """Returns what can be read together, at most `slot_bytes` at a time; and what has to be read in another way."""
    portions: list[_ReadPortion] = []
    left: list[_PeerReadItem] = []
    room = 0
    for item, placed in zip(items, values, strict=True):
        nbytes = placed.result.nbytes
        if placed.result.code is not ResultCode.OK or not nbytes:
            results[item.index] = placed.result
        elif not placed.runs or nbytes > slot_bytes:
            left.append(item)
        else:
            if nbytes > room:
                portions.append([])
                room = slot_bytes
            portions[-1].append((item, placed))
            room -= nbytes
    return portions, left


def _land(transfer: GuardedTransferEngine, session: str, portion: _ReadPortion, deadline: float) -> bool:
    """Have the values of a portion read, and copy them to where they are wanted; whether that was possible."""
    slot = None if transfer.is_exhausted else transfer.landing_area.lease(max(0.0, deadline - time.monotonic()))
    if slot is None:
        return False
    if not transfer.read(session, slot, [run for _, placed in portion for run in placed.runs], deadline):
        return False  # the slot is not ours any more
    at = 0
    for item, placed in portion:
        end = at + placed.result.nbytes
        for part in item.parts:
            length = min(part.nbytes, end - at)
            copy_bytes(part[:length], slot.view[at : at + length])
            at += length
        at = end
    slot.release()
    return True
