"""Connections to those that are read from: opened when needed, kept while they are in a known state.

A connection is made only to a place that is allowed, here, whoever asks; and a place that has failed is left alone for
a while, so that nobody waits for it again and again.
"""

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from kvparams_connectors.stores.deadline_socket import tcp_socket
from kvparams_connectors.stores.peer.addresses import AllowedPeers, PeerAddress
from kvparams_connectors.stores.peer.channel import PeerChannel
from kvparams_connectors.stores.peer.handshake import connect_handshake

__all__ = ["PeerConnection", "PeerConnections"]

_LOGGER: Final = logging.getLogger(__name__)

_KEPT: Final = 16
"""Idle connections to one place."""
_MOST_PLACES: Final = 1024
_RESTS_S: Final = (1.0, 30.0)
"""A place that has failed is left alone for so long, and each time in a row twice as long, up to the second."""


@dataclass(frozen=True, slots=True)
class PeerConnection:
    """A connection that may be used."""

    place: PeerAddress
    channel: PeerChannel


@dataclass(slots=True)
class _PeerBackoff:
    idle: list[PeerConnection] = field(default_factory=list[PeerConnection])
    rest_s: float = 0.0
    rests_until: float = 0.0


class PeerConnections:
    """Everybody this process reads from. Any thread may use it."""

    def __init__(self, allowed: AllowedPeers, *, secret: bytes, connect_s: float) -> None:
        self._allowed: Final = allowed
        self._secret: Final = secret
        self._connect_s: Final = connect_s
        self._lock: Final = threading.Lock()
        self._states: Final[OrderedDict[PeerAddress, _PeerBackoff]] = OrderedDict()
        self.opened = 0
        """How many connections were begun so far."""

    @property
    def connect_s(self) -> float:
        """Returns how long a place may say nothing."""
        return self._connect_s

    @property
    def backed_off_count(self) -> int:
        """Returns how many places are left alone at the moment."""
        now = time.monotonic()
        with self._lock:
            return sum(state.rests_until > now for state in self._states.values())

    def is_backed_off(self, place: PeerAddress) -> bool:
        """Returns whether it is left alone at the moment."""
        with self._lock:
            state = self._states.get(place)
            return state is not None and state.rests_until > time.monotonic()

    def acquire(self, place: PeerAddress, deadline: float) -> PeerConnection:
        """An idle connection or a new one, with this deadline in force.

        Raises:
            PermissionError: the place is not allowed; nothing was sent to anybody.
            HandshakeRefused: the two do not trust each other.
            TimeoutError: the deadline, or the time for connecting, has passed.
            OSError: it cannot be reached, or is no peer.
        """
        if place not in self._allowed:
            raise PermissionError(f"{place} is not among the peers")
        while True:
            with self._lock:
                state = self._state(place)
                link = state.idle.pop() if state.idle else None
                self.opened += link is None
            if link is None:
                link = self._connect(place, deadline)
            elif not link.channel.is_silent:  # it has gone meanwhile, or speaks unasked
                link.channel.close()
                continue
            link.channel.set_deadline(deadline)
            return link

    def release(self, link: PeerConnection) -> None:
        """It has been answered in full: keep it for the next."""
        with self._lock:
            state = self._state(link.place)
            state.rest_s = 0.0
            keep = len(state.idle) < _KEPT
            if keep:
                state.idle.append(link)
        if not keep:
            link.channel.close()

    def record_failure(self, place: PeerAddress, error: Exception) -> None:
        """Leave it alone for a while."""
        with self._lock:
            state = self._state(place)
            idle, state.idle = state.idle, []
            first = state.rest_s == 0.0
            state.rest_s = min(_RESTS_S[1], max(_RESTS_S[0], 2 * state.rest_s))
            state.rests_until = time.monotonic() + state.rest_s
        for link in idle:
            link.channel.close()
        if first:
            _LOGGER.warning("peer: %s is not used for a while: %s", place, error)

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            states = list(self._states.values())
            self._states.clear()
        for state in states:
            for link in state.idle:
                link.channel.close()

    def _state(self, place: PeerAddress) -> _PeerBackoff:
        """The lock is held."""
        state = self._states.setdefault(place, _PeerBackoff())
        self._states.move_to_end(place)
        if len(self._states) > _MOST_PLACES:
            _, oldest = self._states.popitem(last=False)
            for link in oldest.idle:
                link.channel.close()
        return state

    def _sweep(self) -> None:
        """Close idle connections that the other side has ended."""
        gone: list[PeerConnection] = []
        with self._lock:
            for state in self._states.values():
                if ended := [link for link in state.idle if not link.channel.is_silent]:
                    gone += ended
                    state.idle = [link for link in state.idle if link not in ended]
        for link in gone:
            link.channel.close()

    def _connect(self, place: PeerAddress, deadline: float) -> PeerConnection:
        until = min(deadline, time.monotonic() + self._connect_s)
        if until <= time.monotonic():
            raise TimeoutError("the deadline has passed")
        self._sweep()
        channel = PeerChannel(tcp_socket(place.host, place.port, until))
        try:
            channel.set_deadline(until)
            connect_handshake(channel, self._secret)
            return PeerConnection(place, channel)
        except BaseException:
            channel.close()
            raise
