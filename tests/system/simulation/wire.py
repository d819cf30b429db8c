"""Simulates connections to the broker, as aio-pika shows them, and their faults.

A lost connection loses the data under way, and each side notices the loss in its own time.
"""

import asyncio
from collections import deque
from typing import Protocol
from urllib.parse import urlsplit

from aiormq.exceptions import AMQPConnectionError, ConnectionClosed

from tests.system.simulation.broker import Broker
from tests.system.simulation.channels import Callbacks, Channel, Event, Outer

__all__ = ["Faults", "Port", "Wire"]

_CONNECTING = ("refused", "refused", "stall", "slow")
"""How a connection comes to nothing, or late."""
_SENDING = ("lost", "lost", "lost behind", "lost behind", "late", "late", "stall")
"""What becomes of something that is sent: the connection is lost before the broker has it, or before it answers; the
answer is late; or nothing passes for a while, and then the connection is lost or not."""
_GRACE_S = 10.0
"""Who has heard nothing for longer gives up by itself. (aiormq's is longer; what opens a connection has this long.)"""


class Faults(Protocol):
    """Draws what goes wrong, and how long everything takes."""

    def delay(self) -> float:
        """How long something is on its way."""
        ...

    def trouble(self, who: str, where: str, kinds: tuple[str, ...]) -> str | None:
        """Whether something goes wrong now."""
        ...

    def choice(self, among: tuple[float, ...]) -> float:
        """One of them."""
        ...


class _Pipe:
    """One direction of a connection: everything in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop, faults: Faults) -> None:
        self._loop = loop
        self._faults = faults
        self._arrival = 0.0
        self._way: deque[Event] = deque()
        self.stalled = False
        self.cut = False

    def send(self, event: Event, more_s: float = 0.0) -> None:
        now = self._loop.time()
        self._arrival = max(self._arrival, now + self._faults.delay() + more_s)
        self._way.append(event)
        if self._arrival > now:
            self._loop.call_at(self._arrival, self._arrive)
        else:
            self._loop.call_soon(self._arrive)

    def _arrive(self) -> None:
        if not self.stalled and not self.cut and self._way:
            self._way.popleft()()

    def go_on(self) -> None:
        """What has waited arrives; what is still on its way has time."""
        self.stalled = False
        waited, self._way = self._way, deque()
        for event in waited:
            self.send(event)


class Wire:
    """One connection of one node: aio-pika's, and the broker's side of it."""

    def __init__(self, broker: Broker, faults: Faults, who: str) -> None:
        self.broker = broker
        self.who = who
        self.loop = broker.loop
        self.is_closed = False
        self.there = True
        """For the broker."""
        self.lost = False
        """For the node."""
        self.close_callbacks = Callbacks(self)
        self._faults = faults
        self._up, self._down = _Pipe(self.loop, faults), _Pipe(self.loop, faults)
        self._channels: list[Channel] = []
        self._silent = False

    def channel(self, *, publisher_confirms: bool, on_return_raises: bool = False) -> Outer:
        """See aio-pika."""
        assert not on_return_raises
        channel = Channel(self, publisher_confirms)
        self._channels.append(channel)
        return Outer(channel)

    async def close(self) -> None:
        """See aio-pika."""
        if self.is_closed:
            return
        if not self.lost:
            over: asyncio.Future[None] = self.loop.create_future()
            self.up("closes", lambda: (self.leave(), self.down(lambda: over.done() or over.set_result(None))))
            try:
                await over
            except asyncio.CancelledError:  # who gives it up has all that waits given up, too
                self._end(asyncio.CancelledError())
                raise
            else:
                self._end(ConnectionClosed(320, "closed"))
            finally:
                self.cut()
        self.is_closed = True

    def up(self, what: str, event: Event) -> None:
        """Something for the broker, unless it goes wrong."""
        fault = None if self.lost else self._faults.trouble(self.who, f"broker, {what}", _SENDING)
        if fault == "lost":
            self.cut()
        elif fault == "stall":
            self.stall(self._faults.choice((0.3, 3.0, 12.0)))
        late_s = self._faults.choice((0.05, 0.5, 2.0)) if fault == "late" else 0.0
        behind = fault == "lost behind"

        def heard() -> None:
            event()
            if behind:
                self.cut()

        self._up.send(heard, late_s)

    def down(self, event: Event) -> None:
        """Something for the node."""
        self._down.send(event)

    def nack(self) -> bool:
        """Whether the broker cannot take what was published."""
        return self._faults.trouble(self.who, "broker, what is published", ("refused",)) is not None

    def stall(self, for_s: float) -> None:
        """Nothing passes; then all of it, or the connection is lost."""
        if self._up.stalled or self._up.cut:
            return
        self._up.stalled = self._down.stalled = True

        def over() -> None:
            if for_s > 1.0:
                self._silent = for_s > _GRACE_S
                self.cut()
            else:
                self._up.go_on()
                self._down.go_on()

        self.loop.call_later(for_s, over)

    def cut(self) -> None:
        """It is lost, with all that is on its way; each side notices in its time."""
        if self._up.cut:
            return
        self._up.cut = self._down.cut = True
        notices = (0.0, 0.0, 0.001, 0.01, 2.0)
        self.loop.call_later(self._faults.choice(notices), self.leave)
        self.loop.call_later(self._faults.choice(notices), self.fail)

    def leave(self) -> None:
        """The broker lets go of it."""
        if self.there:
            self.there = False
            for channel in self._channels:
                channel.end()
            self.broker.left(self)

    def fail(self) -> None:
        """The node sees that it is lost."""
        if not self.lost:
            # where it was silent for too long, aiormq gives up its own tasks, and all that waits for them
            error = asyncio.CancelledError() if self._silent else AMQPConnectionError("lost")
            self._end(error)
            self.loop.call_soon(self.close_callbacks, error)

    def _end(self, error: BaseException) -> None:
        self.lost = True
        for channel in self._channels:
            channel.closed(error)


class Port:
    """Where the broker listens."""

    def __init__(self, broker: Broker, faults: Faults) -> None:
        self.broker = broker
        self._faults = faults
        self._wires: list[Wire] = []
        self._back_at = 0.0
        self._gone: set[str] = set()

    async def connect(self, url: str, *, heartbeat: int = 0) -> Wire:
        """See aio-pika. Who connects is the host in `url`.

        Raises:
            AMQPConnectionError: there is none.
        """
        who = urlsplit(url).hostname or ""
        fault = self._faults.trouble(who, "broker, connecting", _CONNECTING)
        if fault == "stall":
            await self.broker.loop.create_future()
        await asyncio.sleep(0.3 if fault == "slow" else self._faults.delay())
        if fault == "refused" or self.broker.loop.time() < self._back_at or who in self._gone:
            raise AMQPConnectionError("refused")
        wire = Wire(self.broker, self._faults, who)
        self._wires.append(wire)
        return wire

    def random(self) -> float:
        """Of the pause before a node connects again."""
        return self._faults.choice((0.0, 0.3, 0.9))

    @property
    def open(self) -> list[Wire]:
        """The connections that the broker has."""
        return [wire for wire in self._wires if wire.there]

    def cut(self, who: str) -> None:
        """Its connection is lost."""
        for wire in self._wires:
            if wire.who == who:
                wire.cut()

    def end(self, who: str) -> None:
        """It is dead: nothing of it comes any more."""
        self._gone.add(who)
        self.cut(who)

    def restart(self, for_s: float) -> None:
        """The broker is away for so long."""
        self._back_at = max(self._back_at, self.broker.loop.time() + for_s)
        for wire in self._wires:
            wire.leave()
            wire.cut()
        self.broker.restart()
