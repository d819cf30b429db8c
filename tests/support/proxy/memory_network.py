"""Provides a network between the exchanges of one process: with delays, losses and partitions that a test decides."""

import asyncio
from collections.abc import Callable

from kvparams_proxy.coordination.transport import MessageReceiver

__all__ = ["MemoryNetwork", "MemoryTransport"]


class MemoryNetwork:
    """Connects `MemoryTransport`s. Messages of one sender to one receiver never overtake each other."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        delay_s: Callable[[], float] = lambda: 0.0005,
        is_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        self.loop = loop
        self.delay_s = delay_s
        self.is_lost = is_lost
        self.transports: list[MemoryTransport] = []
        self.separated: set[frozenset[int]] = set()
        """Pairs of numbers between which nothing arrives."""

    def deliver(self, sender: "MemoryTransport", message: bytes) -> None:
        """Brings a message to all others. One that has vanished sends nothing."""
        if sender not in self.transports:
            return
        for receiver in self.transports:
            apart = frozenset((sender.number, receiver.number)) in self.separated
            if receiver is sender or apart or not sender.is_connected or self.is_lost():
                continue
            at = max(self.loop.time() + self.delay_s(), receiver.last_at.get(sender.number, 0.0))
            receiver.last_at[sender.number] = at
            self.loop.call_at(at, receiver.take, message)


class MemoryTransport:
    """A `Transport` in a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, number: int) -> None:
        self.number = number
        self.last_at: dict[int, float] = {}
        self.is_connected = True
        self.is_deaf = False
        """Whether it receives nothing, though it sends."""
        self._network = network
        self._receive: MessageReceiver | None = None

    def start(self, receive: MessageReceiver) -> None:
        """See `Transport`."""
        self._receive = receive
        self._network.transports.append(self)

    def send(self, message: bytes, receiver: int = 0) -> None:
        """See `Transport`. A message for one is brought to all, who ignore it."""
        self._network.deliver(self, message)

    def announce(self, message: bytes) -> None:
        """See `Transport`."""
        self.send(message)

    def take(self, message: bytes) -> None:
        """Hands a message on, unless this end is closed or cut off."""
        if self._receive is not None and self.is_connected and not self.is_deaf:
            self._receive(message)

    def reconnect(self) -> None:
        """Connects again after `is_connected` was False."""
        self.is_connected = True

    def vanish(self) -> None:
        """Ends without a word, as a process that is killed."""
        self._receive = None
        self._network.transports.remove(self)

    async def close(self) -> None:
        """See `Transport`."""
        if self in self._network.transports:
            self.vanish()
