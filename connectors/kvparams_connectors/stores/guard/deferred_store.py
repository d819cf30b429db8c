"""A store that nobody could reach when the engine began: it is opened later, in the background.

An engine that starts, or restarts, while its store is away computes everything itself until the store is there, as it
does when the store goes away later. Nobody waits for the opening; until it is done every operation is UNAVAILABLE, at
once.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvparams_connectors.jobs import Job, WorkerPool, finished_job
from kvparams_connectors.store import (
    DEFAULT_DEADLINE_S,
    Capabilities,
    GetOp,
    KVStore,
    PutOp,
    Result,
    ResultCode,
    Results,
)
from kvparams_connectors.store_url import StoreError, StoreUnreachable

if TYPE_CHECKING:
    from kvparams_connectors.arena import Arena

__all__ = ["DeferredStore"]

_LOGGER: Final = logging.getLogger(__name__)

_PAUSE_S: Final = 1.0
"""Between two attempts at least; a guard that has given the store up asks less often."""
_LONGEST_S: Final = 60.0
"""An attempt is bounded by the store's own limit for a connection; this is for what a library may do beside."""
_EXPECTED: Final = Capabilities(persistent=True, shared=True, max_value_bytes=1 << 29, reports_sizes=False)
"""Only servers can be out of reach, and what they take is seen when they are there."""


class DeferredStore(KVStore):
    """The store that `opens` makes, as soon as it can."""

    def __init__(self, opens: Callable[[], KVStore], name: str, *, pause_s: float = _PAUSE_S) -> None:
        """Waits for `pause_s` before its first attempt, because the caller has just failed to open the store.

        Args:
            opens: opens the store, or raises StoreError.
            name: the name in the log and of the thread; a scheme, never a URL, which may hold a secret.
            pause_s: the least time between two attempts, in seconds.
        """
        self._opens = opens
        self._name = name
        self._pause_s = pause_s
        self._lane = WorkerPool(f"kvparams-open-{name}")
        self._lock = threading.Lock()
        self._store: KVStore | None = None
        self._arena: Arena | None = None
        self._next_s = time.monotonic() + pause_s  # it has just been tried
        self._trying = False
        self._closed = False
        self._said = ""

    @property
    def capabilities(self) -> Capabilities:
        """Returns the capabilities of a server, until the real ones are known."""
        return _EXPECTED if self._store is None else self._store.capabilities

    def register(self, arena: "Arena") -> None:
        """Passes on which memory most buffers come from."""
        with self._lock:
            self._arena = arena
            store = self._store
        if store is not None:
            store.register(arena)

    def put(self, ops: Sequence[PutOp], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Stores values; see `KVStore.put`."""
        store = self._there()
        return _unavailable(len(ops)) if store is None else store.put(ops, deadline_s)

    def get(self, ops: Sequence[GetOp], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Reads values; see `KVStore.get`."""
        store = self._there()
        return _unavailable(len(ops)) if store is None else store.get(ops, deadline_s)

    def exists(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Looks keys up; see `KVStore.exists`."""
        store = self._there()
        return _unavailable(len(keys)) if store is None else store.exists(keys, deadline_s)

    def delete(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Deletes keys; see `KVStore.delete`."""
        store = self._there()
        return _unavailable(len(keys)) if store is None else store.delete(keys, deadline_s)

    @property
    def address(self) -> str | None:
        """Returns where other processes can read, or None; see `KVStore.address`."""
        return None if self._store is None else self._store.address

    def hint_location(self, keys: Sequence[str], source: str) -> None:
        """Passes a hint on; see `KVStore.hint_location`."""
        if self._store is not None:
            self._store.hint_location(keys, source)

    def quarantine(self, keys: Sequence[str]) -> None:
        """Keeps damaged values from being found again; see `KVStore.quarantine`."""
        if self._store is not None:
            self._store.quarantine(keys)

    def discard(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Quarantines and deletes damaged values; see `KVStore.discard`."""
        store = self._there()
        return _unavailable(len(keys)) if store is None else store.discard(keys, deadline_s)

    def close(self) -> None:
        """Waits, within bounds, for what was submitted, and lets go of everything."""
        with self._lock:
            self._closed = True
        self._lane.close()
        if self._store is not None:
            self._store.close()

    def _there(self) -> KVStore | None:
        """The store; where it is not open yet, another attempt begins if it is time."""
        if self._store is not None:
            return self._store
        with self._lock:
            if self._store is None and not (self._closed or self._trying) and time.monotonic() >= self._next_s:
                self._trying = True
                self._lane.submit(self._open, _LONGEST_S, timed_out=None, refused=None)
            return self._store

    def _open(self, _: Job[None]) -> None:
        try:
            store = self._opens()
        except StoreError as error:
            self._again(error)
            return
        except Exception:
            _LOGGER.exception("%s store: opening it failed", self._name)
            self._again(None)
            return
        with self._lock:  # whoever registers an arena now waits until the store has this one
            if not self._closed:
                if self._arena is not None:
                    store.register(self._arena)
                self._store = store
            self._trying = False
        if self._store is None:
            store.close()
            return
        _LOGGER.warning("%s store: it can be reached now and is used", self._name)

    def _again(self, error: StoreError | None) -> None:
        with self._lock:
            self._trying = False
            self._next_s = time.monotonic() + self._pause_s
        said = "" if error is None or isinstance(error, StoreUnreachable) else str(error)
        if said and said != self._said:  # it answers, and does not let us in: somebody has to do something
            _LOGGER.error("%s", said)
        self._said = said


def _unavailable(number: int) -> Job[Results]:
    return finished_job([Result(ResultCode.UNAVAILABLE)] * number)
