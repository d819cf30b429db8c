"""Makes good what siblings told while they could not be heard: this proxy asks for it, and answers those that ask.

A request is repeated until its answer has come, because the sibling may be heard before it hears this proxy.
"""

import asyncio
import struct
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from kvparams.replication.entries import Entry
from kvparams.replication.messages import MessageKind
from kvparams.replication.siblings import Sibling

__all__ = ["MissedEntries"]

_MARGIN_S: Final = 0.5
"""So much more is asked for than the time in which nothing was heard."""
_ASK_AGAIN_S: Final = 2.0
_COLLECT_S: Final = 0.5
"""Meanwhile several siblings may ask for the same."""
_AWAY: Final = struct.Struct("<f")
_MOST_AWAY_S: Final = 1e9


class _Sender(Protocol):
    """The part of the exchange that sends."""

    def publish(self, entry: Entry) -> None:
        """Tells an entry to all siblings."""
        ...

    def flush(self) -> None:
        """Sends what was published."""
        ...

    def send_to(self, receiver: int, kind: MessageKind, payload: bytes) -> None:
        """Sends a message to one sibling."""
        ...


class _Missed:
    """A `_Missed` is the time since which one sibling was not heard, and when it was asked."""

    __slots__ = ("asked_at", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.asked_at = float("-inf")


class MissedEntries:
    """The requests of one proxy and of its siblings for what they have missed."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sender: _Sender, recent: Callable[[float], Iterator[Entry | None]]
    ) -> None:
        """Creates it.

        Args:
            loop: the event loop.
            sender: sends.
            recent: yields what this proxy has told in so many seconds; None is a place to pause.
        """
        self._loop = loop
        self._sender = sender
        self._recent = recent
        self._missed: dict[int, _Missed] = {}
        self._requests: dict[int, float] = {}
        """For how many seconds siblings have missed what this proxy told."""
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def missed(self, sibling: Sibling, seconds: float) -> None:
        """Hears that something is missing of what a sibling told in the last seconds. It lived all the time."""
        since = self._loop.time() - min(seconds, _MOST_AWAY_S)
        known = self._missed.get(sibling.id)
        if known is None:
            self._missed[sibling.id] = _Missed(since)
        else:
            known.since = min(known.since, since)

    def ask(self, sibling: Sibling) -> None:
        """Asks a sibling that has just been heard, if something of it is missing."""
        missed = self._missed.get(sibling.id)
        now = self._loop.time()
        if missed is not None and now - missed.asked_at >= _ASK_AGAIN_S:
            missed.asked_at = now
            payload = _AWAY.pack(now - missed.since + _MARGIN_S)
            self._sender.send_to(sibling.id, MessageKind.MISSED_REQUEST, payload)

    def forget(self, sibling: Sibling) -> None:
        """Hears that a sibling has told everything, or has ended."""
        self._missed.pop(sibling.id, None)

    def answer_soon(self, sibling: Sibling, payload: memoryview) -> None:
        """Tells all siblings once more what the one that asks has missed.

        Raises:
            ValueError: the request is cut off.
        """
        if len(payload) < _AWAY.size:
            raise ValueError("a request for what was missed is cut off")
        (seconds,) = _AWAY.unpack_from(payload)
        self._requests[sibling.id] = min(seconds, _MOST_AWAY_S)
        if self._timer is None:
            self._timer = self._loop.call_later(_COLLECT_S, self._begin)

    async def close(self) -> None:
        """Ends everything."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _begin(self) -> None:
        if self._task is not None and not self._task.done():
            self._timer = self._loop.call_later(_COLLECT_S, self._begin)
            return
        self._timer = None
        requests, self._requests = self._requests, {}
        self._task = self._loop.create_task(self._answer(requests), name="repeat for other proxies")

    async def _answer(self, requests: dict[int, float]) -> None:
        for entry in self._recent(max(requests.values()) + _COLLECT_S):
            if entry is None:
                await asyncio.sleep(0)
            else:
                self._sender.publish(entry)
        self._sender.flush()
        for sibling in requests:
            self._sender.send_to(sibling, MessageKind.REPEATED, b"")
