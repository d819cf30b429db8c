"""Tells systemd the state of this process, as `sd_notify` does: ready, reloading, stopping, alive.

The protocol is one datagram for each message. Without `NOTIFY_SOCKET` in the environment nothing is sent.

Source: sd_notify(3) and sd_watchdog_enabled(3) of systemd 252.
"""

import asyncio
import logging
import os
import re
import socket
import time
from collections.abc import Mapping
from typing import Final

__all__ = ["ServiceNotifier"]

_log: Final = logging.getLogger(__name__)
_MARGIN_S: Final = 20.0
"""What a shutdown may take beyond the time that requests have."""
_RETRY_S: Final = 0.1
"""A message that finds no room is sent once more after this time."""
_USEC: Final = re.compile(r"[0-9]{1,15}")
_MIN_PAUSE_S: Final = 0.01
"""A shorter watchdog interval would keep the event loop busy with messages."""


class ServiceNotifier:
    """Sends the messages of one process."""

    def __init__(self, address: str | None, watchdog_s: float | None = None) -> None:
        """Creates a notifier.

        Args:
            address: the path of systemd's socket, or its abstract name behind `@`. None sends nothing.
            watchdog_s: systemd ends this process if it hears nothing for this many seconds. None: there is no
                watchdog.
        """
        self._address = "\0" + address[1:] if address is not None and address.startswith("@") else address
        self._watchdog_s = watchdog_s
        self._timer: asyncio.TimerHandle | None = None
        self._has_failed = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "ServiceNotifier":
        """Returns the notifier that systemd asks for."""
        address = environment.get("NOTIFY_SOCKET", "")
        if not address.startswith(("/", "@")):
            return cls(None)
        usec = environment.get("WATCHDOG_USEC", "")
        is_meant = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        watchdog_s = int(usec) / 1e6 if is_meant and _USEC.fullmatch(usec) else 0.0
        return cls(address, watchdog_s or None)

    def ready(self, status: str, *, is_successor: bool = False) -> None:
        """Tells that requests are served, and goes on to tell that the event loop, which calls this, is alive.

        `is_successor`: this process has taken the place of the one that systemd takes for the service.
        """
        main = f"\nMAINPID={os.getpid()}" if is_successor else ""
        self._send(f"READY=1\nSTATUS={status}{main}", can_retry=True)
        if self._address is not None and self._watchdog_s is not None:
            self._tell_alive()

    def reloading(self) -> None:
        """Tells that the configuration is being read again; `reloaded` follows."""
        now_usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send(f"RELOADING=1\nMONOTONIC_USEC={now_usec}\nSTATUS=Replacing all workers", can_retry=True)

    def reloaded(self, status: str) -> None:
        """Tells that the reload is over, whatever came of it."""
        self._send(f"READY=1\nSTATUS={status}", can_retry=True)

    def stopping(self, within_s: float) -> None:
        """Tells that the shutdown has begun, and how many seconds running requests may take."""
        extension_usec = int((within_s + _MARGIN_S) * 1e6)
        self._send(f"STOPPING=1\nSTATUS=Shutting down\nEXTEND_TIMEOUT_USEC={extension_usec}", can_retry=True)

    def close(self) -> None:
        """Ends the watchdog messages."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell_alive(self) -> None:
        self._send("WATCHDOG=1")
        pause_s = max((self._watchdog_s or 0.0) / 2, _MIN_PAUSE_S)
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._tell_alive)

    def _send(self, message: str, can_retry: bool = False) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            if can_retry and isinstance(error, BlockingIOError):
                asyncio.get_running_loop().call_later(_RETRY_S, self._send, message)
                return
            if not self._has_failed:
                _log.warning("systemd cannot be told the state of this process: %s", error)
            self._has_failed = True
