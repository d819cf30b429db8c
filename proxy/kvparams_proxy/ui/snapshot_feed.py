"""Makes a snapshot each second, or somewhat less often, while somebody looks, and gives all viewers the same bytes.

A viewer who is slower than that misses snapshots: only the latest one is kept for each. Nothing is collected while
nobody looks.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from time import thread_time, time
from typing import Final, cast

from kvparams_proxy.errors import ProxyError
from kvparams_proxy.ui.snapshot import SnapshotBuilder, hide_addresses
from kvparams_proxy.ui.worker_part import ENDED_WORKERS, EngineFacts

__all__ = ["MOST_VIEWERS", "SnapshotFeed", "Viewer"]

MOST_VIEWERS: Final = 32
"""At a time, of one process."""
_EVERY_S: Final = 1.0
_COST: Final = 150.0
"""The interval is at least so many times the CPU time that a snapshot takes, so that the page takes under 1 %."""
_LONGEST_S: Final = 4.0
_POLLED_S: Final = 10.0
"""For so long after a single snapshot was asked for somebody counts as looking: the next one has rates."""
_FRESH_S: Final = 0.9

_Parts = Iterable[Mapping[str, object]]


class Viewer:
    """A viewer, and the latest snapshot that it has not been given."""

    __slots__ = ("_event", "_latest", "is_admin", "is_closed")

    def __init__(self, *, is_admin: bool) -> None:
        self.is_admin = is_admin
        """Whether it may see names that contain addresses."""
        self.is_closed = False
        self._latest: bytes | None = None
        self._event = asyncio.Event()

    def offer(self, snapshot: bytes) -> None:
        """Replaces the snapshot that it will be given next."""
        self._latest = snapshot
        self._event.set()

    def close(self) -> None:
        """Ends the wait for further snapshots."""
        self.is_closed = True
        self._event.set()

    async def next(self) -> bytes | None:
        """Waits for a snapshot. Returns None once the viewer is closed."""
        await self._event.wait()
        self._event.clear()
        latest, self._latest = self._latest, None
        return None if self.is_closed else latest


class SnapshotFeed:
    """The snapshots of one process, as JSON."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        version: str,
        collect: Callable[[], Awaitable[_Parts]],
    ) -> None:
        """Creates a feed that nobody looks at.

        Args:
            loop: whose thread calls everything here.
            version: of kvparams.
            collect: returns the parts of a snapshot: see `SnapshotBuilder.build`. One is taken in each step.
        """
        self._loop = loop
        self._collect = collect
        self._builder = SnapshotBuilder(version)
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._encoded: dict[bool, bytes] = {}
        """The last snapshot, by whether it is for admins."""
        self._taken_s = float("-inf")
        self._took_s = 0.0
        """The CPU time of the last snapshot."""
        self._taking = asyncio.Lock()
        self._polled_until_s = float("-inf")
        self._is_closed = False

    def __len__(self) -> int:
        """Returns the number of viewers."""
        return len(self._viewers)

    def join(self, *, is_admin: bool) -> Viewer:
        """Adds a viewer, until `leave`.

        Raises:
            ProxyError: 503, because there are too many, or the proxy is shutting down.
        """
        self._require_open()
        if len(self._viewers) >= MOST_VIEWERS:
            message = f"{MOST_VIEWERS} others look at the page; close one of theirs, or try again later"
            raise ProxyError(503, "service_unavailable", message, code="too_many_viewers", retry_after_s=5)
        viewer = Viewer(is_admin=is_admin)
        if self._loop.time() - self._taken_s < _FRESH_S:
            viewer.offer(self._encoded[is_admin])
        self._viewers.add(viewer)
        self._start()
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Removes a viewer."""
        self._viewers.discard(viewer)

    async def latest(self, *, is_admin: bool) -> bytes:
        """Returns a snapshot that is less than a second old.

        Raises:
            ProxyError: 503, because the proxy is shutting down, or its workers do not answer.
        """
        self._require_open()
        self._polled_until_s = self._loop.time() + _POLLED_S
        async with self._taking:
            if self._loop.time() - self._taken_s >= _FRESH_S:
                await self._take()
        self._start()
        return self._encoded[is_admin]

    def end_viewers(self) -> None:
        """Ends all streams, for the process is about to stop."""
        self._is_closed = True
        for viewer in self._viewers:
            viewer.close()

    async def close(self) -> None:
        """Ends all streams and the task behind them."""
        self.end_viewers()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _require_open(self) -> None:
        if self._is_closed:
            message = "the proxy is shutting down"
            raise ProxyError(503, "service_unavailable", message, code="shutting_down", retry_after_s=5)

    def _start(self) -> None:
        if self._task is None:
            self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            while self._viewers or self._loop.time() < self._polled_until_s:
                began_s = self._loop.time()
                await self._tick()
                interval_s = min(_LONGEST_S, max(_EVERY_S, _COST * self._took_s))
                await asyncio.sleep(max(0.0, began_s + interval_s - self._loop.time()))
        finally:
            for viewer in self._viewers:  # if this has failed, their pages connect again
                viewer.close()
            self._task = None
            self._builder.forget()

    async def _tick(self) -> None:
        async with self._taking:
            if self._loop.time() - self._taken_s >= _FRESH_S:
                try:
                    await self._take()
                except ProxyError:  # the workers do not answer in time: viewers see how old the last snapshot is
                    return
        for viewer in self._viewers:
            viewer.offer(self._encoded[viewer.is_admin])

    async def _take(self) -> None:
        parts = await self._collect()
        taken_s, took_s = self._loop.time(), 0.0
        steps = self._encode_snapshot(parts, taken_s)
        while True:
            began_s = thread_time()
            is_done = next(steps, True)
            took_s += thread_time() - began_s
            if is_done:
                break
            await asyncio.sleep(0)
        self._taken_s, self._took_s = taken_s, took_s

    def _encode_snapshot(self, parts: _Parts, taken_s: float) -> Generator[None, None, None]:
        """Makes the bytes of a snapshot. Yields after every few milliseconds, for requests go on meanwhile.

        Raises:
            ProxyError: 503, because no worker has answered.
        """
        read: list[Mapping[str, object]] = []
        for part in parts:
            read.append(part)
            yield
        if all(ENDED_WORKERS in part for part in read):
            message = "no worker has answered in time; try again later"
            raise ProxyError(503, "service_unavailable", message, code="snapshot_timeout", retry_after_s=5)
        snapshot = yield from self._builder.build(read, taken_s, time())
        shown = hide_addresses(snapshot, _public_names(read))
        yield
        everything = shortened = _encode(snapshot)
        if shown is not snapshot:
            yield
            shortened = _encode(shown)
        self._encoded = {True: everything, False: shortened}


def _public_names(parts: Iterable[Mapping[str, object]]) -> dict[str, str]:
    """Returns the names of the engines for viewers, by id."""
    engines = (EngineFacts._make(each) for part in parts for each in cast("list[EngineFacts]", part.get("engines", ())))
    return {each.id: each.public_id for each in engines}


def _encode(snapshot: object) -> bytes:
    return json.dumps(snapshot, separators=(",", ":"), allow_nan=False).encode()
