"""Manages a store's session with LMCache's multi-process server: client, registration, mapped pool, owed replies.

Before anything is asked, the pool is known to be that of the server that runs now, and we to be known to it; so
whatever a server that was started anew has forgotten is noticed before a byte moves.
"""

import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from kvparams_connectors.stores.lmcache.mp_client import (
    LMCacheMPClient,
    LMCacheMPLibrary,
    NoReplyError,
    pseudo_token_ids,
)
from kvparams_connectors.stores.lmcache.mp_shared_memory import SharedPoolMemory
from kvparams_connectors.stores.lmcache.mp_value_lease import LeaseState, ValueLease, end_leases

__all__ = ["LMCacheMPSession"]

_LOGGER: Final = logging.getLogger(__name__)
_OWED: Final = 4096
"""Visits that could not be ended, remembered; older ones are left to the server's 300 s."""
_KNOWN_S: Final = 60.0
"""A registration is refreshed as often as that; the server forgets in an hour who has done nothing."""


class LMCacheMPSession:
    """Used by one thread at a time."""

    def __init__(self, library: LMCacheMPLibrary, address: str, model: str, chunk_bytes: int) -> None:
        """Connects to no server yet; the first request does.

        Args:
            library: LMCache's own client classes.
            address: `host:port` of the server.
            model: the model name of all values at the server; it implies one size of chunks.
            chunk_bytes: the size of every value with its header, in bytes.
        """
        self._library = library
        self._address = address
        self._model = model
        self._chunk_bytes = chunk_bytes
        self.instance: Final = secrets.randbelow(1 << 62)
        """Who we are to the server."""
        self.chunk_tokens = 0
        """Tokens of a chunk there."""
        self.renewed = 0
        """How often a server was met that did not know us, the first time included."""
        self._numbers = itertools.count()
        self._link: LMCacheMPClient | None = None
        self._pool: SharedPoolMemory | None = None
        self._known_until = 0.0
        self._spoiled: list[str] = []
        self._owed: deque[ValueLease] = deque(maxlen=_OWED)

    @property
    def unreleased(self) -> int:
        """Visits that are not ended."""
        return len(self._owed)

    def ready(self, deadline: float) -> tuple[LMCacheMPClient, SharedPoolMemory]:
        """A client that is registered, and the server's memory.

        Raises:
            NoReplyError: the server did not answer by `deadline`, on the clock of `time.monotonic`.
            StoreError: it shares no memory with this machine.
        """
        if self._link is None:
            self._link = self._library.connect(self._address)
        link = self._link
        try:
            if not self.chunk_tokens:
                self.chunk_tokens = int(link.wait(link.chunk_size(), deadline))
            self._register(link, deadline)
            self._settle(link, deadline)
        except NoReplyError:
            self.drop()
            raise
        assert self._pool is not None
        return link, self._pool

    def _register(self, link: LMCacheMPClient, deadline: float) -> None:
        """Be known to the server that runs now, and have its memory."""
        current = self._pool is not None and self._pool.current
        if current and time.monotonic() < self._known_until:
            return
        registration = self._library.registration(self.instance, self._model, self._chunk_bytes)
        shared = link.wait(link.register(registration), deadline)
        self._known_until = time.monotonic() + _KNOWN_S
        if self._pool is None or not self._pool.current:
            self._forget()
            # A server that was started anew may have other settings.
            self.chunk_tokens = int(link.wait(link.chunk_size(), deadline))
            self._pool = SharedPoolMemory(shared.shm_name, shared.pool_size)
            self.renewed += 1

    def new_lease(self, key: str) -> ValueLease:
        """A visit to a key."""
        tokens, request = self.tokens(key), f"kvparams-{self.instance:x}-{next(self._numbers)}"
        shared = self._library.key(self._model, tokens, request, worker=False)
        return ValueLease(key, request, shared, self._library.key(self._model, tokens, request, worker=True))

    def tokens(self, key: str) -> tuple[int, ...]:
        """The pseudo tokens of a key."""
        return pseudo_token_ids(key, self.chunk_tokens)

    def object_name(self, key: str) -> dict[str, object]:
        """Returns what the server's HTTP interface calls it."""
        return self._library.object_name(self._model, self.tokens(key))

    def end(self, link: LMCacheMPClient, visits: Sequence[ValueLease], deadline: float) -> None:
        """End visits.

        Raises:
            NoReplyError: the server did not answer; `mark_unanswered` remembers what is owed.
        """
        self._spoiled += [visit.key for visit in end_leases(link, visits, self.instance, deadline)]

    def pop_spoiled_keys(self) -> list[str]:
        """Keys that have come to be seen with nothing of theirs in them; whoever takes them deletes them."""
        taken, self._spoiled = self._spoiled, []
        return taken

    def mark_unanswered(self, visits: Sequence[ValueLease]) -> None:
        """There was no answer: what the visits may hold is given back when there is one again."""
        self._owed.extend(visit for visit in visits if visit.holds is not LeaseState.NOTHING)
        self.drop()

    def drop(self) -> None:
        """Throw the client away, with what it has not sent."""
        self._known_until = 0.0
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def close(self, deadline: float) -> None:
        """Give back what is owed, say good-bye, and let go of everything."""
        try:
            link, _ = self.ready(deadline)
            link.wait(link.unregister(self.instance), deadline)
        except Exception as error:  # noqa: BLE001 - whatever it is, the server forgets us by itself in an hour
            _LOGGER.warning("LMCache server at %s was not told good-bye: %s", self._address, type(error).__name__)
        self.drop()
        self._forget()

    def _settle(self, link: LMCacheMPClient, deadline: float) -> None:
        """End the visits that could not be ended before."""
        while self._owed:
            visit = self._owed[0]
            self.end(link, [visit], deadline)
            self._owed.popleft()

    def _forget(self) -> None:
        """The server was another one: its memory, and what was owed to it."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
            self._owed.clear()
