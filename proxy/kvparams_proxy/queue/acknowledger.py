"""Acknowledges messages in batches: all that were handled within some milliseconds at once.

An acknowledgement goes to the channel that its message came from, or is dropped.
"""

import asyncio
from contextlib import suppress
from typing import Final

from aiormq.abc import AbstractChannel, DeliveredMessage

__all__ = ["BatchAcknowledger"]

_TOGETHER_S: Final = 0.01
"""What has not been acknowledged when the connection is lost comes again, and is known."""


class BatchAcknowledger:
    """Acknowledges the handled messages of one channel."""

    def __init__(self) -> None:
        self._channel: AbstractChannel | None = None
        self._last: int | None = None
        self._task: asyncio.Task[None] | None = None

    def opened(self, channel: AbstractChannel) -> None:
        """Sets the channel from which messages come from now on."""
        self._channel, self._last = channel, None

    def closed(self) -> None:
        """Forgets the channel."""
        self._channel = self._last = None

    def acknowledge(self, message: DeliveredMessage) -> None:
        """Acknowledges a message and all before it: they need not come again."""
        if message.channel is self._channel:
            self._last = message.delivery_tag
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._say())

    async def _say(self) -> None:
        while True:
            await asyncio.sleep(_TOGETHER_S)
            channel, last = self._channel, self._taken()
            if channel is None or last is None:
                return
            with suppress(Exception):  # the channel is closed: it comes again, and is known
                await channel.basic_ack(last, multiple=True, wait=False)

    def _taken(self) -> int | None:
        last, self._last = self._last, None
        return last
