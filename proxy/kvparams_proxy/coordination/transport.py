"""The interface of what carries messages between the proxies of a site."""

from collections.abc import Callable
from typing import Protocol

__all__ = ["MessageReceiver", "Transport"]

MessageReceiver = Callable[[bytes], None]
"""Takes one message. It does not raise."""


class Transport(Protocol):
    """Carries messages to the other proxies of a site, or loses them; it never waits and never raises.

    Messages of one sender arrive in their order, if they arrive. Whether they arrived is the exchange's matter.
    """

    @property
    def is_connected(self) -> bool:
        """True while messages can be sent and received, as far as is known."""
        ...

    def start(self, receive: MessageReceiver) -> None:
        """Begins to connect and to receive. Returns at once."""
        ...

    def send(self, message: bytes, receiver: int = 0) -> None:
        """Sends a message to one proxy, or to all that have heard an announcement of this one."""
        ...

    def announce(self, message: bytes) -> None:
        """Sends a message to all others, also to those that know nothing of this proxy."""
        ...

    async def close(self) -> None:
        """Ends everything that it started."""
        ...
