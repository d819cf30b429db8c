"""The bytes-level store: what a new backend implements, and nothing about tensors, tokens or engines.

Values are write-once: a key names its content, so a second put of the same key changes nothing. What is asked and
answered is in `store_operations`; it is imported from here.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, TypeVar, cast

from kvparams import plugins
from kvparams_connectors.jobs import Job, WorkerPool
from kvparams_connectors.store_operations import (
    GetOp,
    PutOp,
    Result,
    ResultCode,
    Results,
    are_valid_keys,
    is_valid_get,
    is_valid_key,
    is_valid_put,
)
from kvparams_connectors.store_url import StoreError, StoreURL

if TYPE_CHECKING:  # it imports numpy, which not every store needs
    from kvparams_connectors.arena import Arena
    from kvparams_connectors.value_memory import ValueMemory

__all__ = [
    "DEFAULT_DEADLINE_S",
    "BlockingStore",
    "Capabilities",
    "GetOp",
    "KVStore",
    "PutOp",
    "Result",
    "ResultCode",
    "Results",
    "StoreError",
    "StoreFactory",
    "are_valid_keys",
    "is_valid_get",
    "is_valid_key",
    "is_valid_put",
    "open_store",
]

Op = TypeVar("Op")

_VALKEY_SCHEMES: Final = {"redis": "valkey", "rediss": "valkeys"}
_LOGGER: Final = logging.getLogger(__name__)
DEFAULT_DEADLINE_S: Final = 5.0
"""How long an operation may take if the caller does not say."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Describes what a store can do and how much it takes; the conformance suite holds it to this."""

    persistent: bool
    """Values outlive the process that stored them."""
    shared: bool
    """Other processes see them."""
    max_value_bytes: int
    """Larger values are TOO_LARGE."""
    private_copies: bool = False
    """This process keeps copies of its own: a value that another process has deleted may be found here for a while."""
    exact_lru: bool = True
    """When it is full, what was not used for longest goes first. False: about so; a server that samples, or whose clock
    is coarse."""
    evicts: bool = True
    """When it is full, it makes room. False: whoever runs the server sees to that; no value goes by itself."""
    one_winner: bool = True
    """Of several who put one key at the same time exactly one is told OK, and its value stays. False: a server without
    a put that spares what is there; several may be told OK, and the value of any one of them stays, whole."""
    reports_sizes: bool = True
    """exists says how large every value is. False: it may leave that out (`Result.has_size`), to answer sooner."""


class KVStore(ABC):
    """Bytes under keys, in batches, as jobs.

    A key has 1 to 128 characters from `[A-Za-z0-9._-]`; a buffer is a contiguous memoryview, writable for get. Its
    items may have any format and shape: a value is bytes, so count `buffer.nbytes` and copy `buffer.cast("B")`. The
    caller leaves a buffer alone until the job is settled, whatever the wait said before.

    Use: an existing key that is found by put, get or exists counts as used. Within one batch the first key counts as
    used last, so that of a sequence of pages the tail is evicted before the head. A store evicts what was not used for
    longest, or keeps in part of its room what was used again and again; the tail goes before the head in either.
    """

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Returns what this store can do."""

    @property
    def memory(self) -> "ValueMemory | None":
        """Returns access in place to values in this process's memory; None if a store keeps them elsewhere."""
        return None

    @abstractmethod
    def register(self, arena: "Arena") -> None:
        """Say once which memory most buffers will come from."""

    @abstractmethod
    def put(self, ops: Sequence[PutOp], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Store values. OK: stored by us and visible. EXISTS: visible already."""

    @abstractmethod
    def get(self, ops: Sequence[GetOp], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Read values. What the buffers hold where the code is not OK, or behind `nbytes`, means nothing."""

    @abstractmethod
    def exists(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """OK with the value's size, if the store tells it (`Result.has_size`), or MISS."""

    def exists_nowait(self, keys: Sequence[str]) -> Results | None:
        """Returns the answer of `exists` without waiting for another thread, or None to ask `exists` instead.

        Only where the answer lies in this process's memory: no lock is taken that anybody holds while he works, nobody
        is asked, and what is wrong is None.
        """
        return None

    @abstractmethod
    def delete(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """OK: it was there and is gone. MISS: it was not there."""

    @abstractmethod
    def close(self) -> None:
        """Wait, within bounds, for what was submitted, and let go of everything; a second call does nothing."""

    @property
    def address(self) -> str | None:
        """Returns the `host:port` at which other processes can read this one's values; None for a shared store."""
        return None

    def hint_location(self, keys: Sequence[str], source: str) -> None:  # noqa: B027 - most stores have nothing to do here
        """Takes a hint where these values can be read (the maker's `address`), for the next get or exists of the keys.

        A store connects only where its own settings allow. Returns at once.
        """

    def quarantine(self, keys: Sequence[str]) -> None:  # noqa: B027 - most stores have nothing to do here
        """The caller found these values damaged: a store that can keeps from finding them again. Returns at once."""

    def discard(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Quarantines and deletes values that the caller found damaged after the last get of these keys.

        A store that has several copies of a value spares those that the bytes did not come from. Results as of
        `delete`.
        """
        self.quarantine(keys)
        return self.delete(keys, deadline_s)


class BlockingStore(KVStore):
    """A store whose operations are ordinary blocking calls, done by a lane of worker threads.

    A subclass writes `put_blocking`, `get_blocking`, `exists_blocking`, `delete_blocking` and `release`. Keys and
    buffers have been checked before they are called. `deadline` is on the clock of `time.monotonic`; past it, give up
    with TIMEOUT.
    """

    calls_before_read: ClassVar[bool] = False
    """Whether `put_blocking` calls `PutOp.before_read` of each value, right before it looks at it. Otherwise that was
    done."""

    def __init__(self, name: str, *, threads: int = 1) -> None:
        """Starts the worker threads.

        Args:
            name: the name of the store in its threads' names.
            threads: the number of batches that are worked on at a time.
        """
        self._lane = WorkerPool(f"kvparams-{name}", threads=threads)
        self._closing = threading.Lock()
        self._released = False

    def register(self, arena: "Arena") -> None:
        """Does nothing: a store that copies with the CPU need not know."""

    @abstractmethod
    def put_blocking(self, ops: Sequence[PutOp], deadline: float) -> Results:
        """See `put`."""

    @abstractmethod
    def get_blocking(self, ops: Sequence[GetOp], deadline: float) -> Results:
        """See `get`."""

    @abstractmethod
    def exists_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        """See `exists`."""

    @abstractmethod
    def delete_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        """See `delete`."""

    @abstractmethod
    def release(self) -> None:
        """Let go of everything; called once, when no worker is running any more."""

    def put(self, ops: Sequence[PutOp], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Stores values; see `KVStore.put`."""
        work = self.put_blocking if self.calls_before_read else self._put_gone
        return self._submit(ops, [is_valid_put(op) for op in ops], work, deadline_s)

    def get(self, ops: Sequence[GetOp], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Reads values; see `KVStore.get`."""
        return self._submit(ops, [is_valid_get(op) for op in ops], self.get_blocking, deadline_s)

    def exists(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Looks keys up; see `KVStore.exists`."""
        return self._submit(keys, are_valid_keys(keys), self.exists_blocking, deadline_s)

    def delete(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Deletes keys; see `KVStore.delete`."""
        return self._submit(keys, are_valid_keys(keys), self.delete_blocking, deadline_s)

    def close(self) -> None:
        """Waits, within bounds, for what was submitted, and lets go of everything."""
        ended = self._lane.close()
        with self._closing:
            first, self._released = ended and not self._released, self._released or ended
        if first:
            self.release()
        elif not ended:
            _LOGGER.error("a store was closed while an operation was stuck in it; its memory is kept")

    def _put_gone(self, ops: Sequence[PutOp], deadline: float) -> Results:
        return self.put_blocking([op.resolve_before_read() for op in ops], deadline)

    def _submit(
        self,
        ops: Sequence[Op],
        valid: Sequence[bool],
        work: Callable[[Sequence[Op], float], Results],
        deadline_s: float,
    ) -> Job[Results]:
        every = all(valid)
        good = ops if every else [op for op, fine in zip(ops, valid, strict=True) if fine]

        def run(job: Job[Results]) -> Results:
            try:
                results = work(good, job.deadline)
            except Exception:
                _LOGGER.exception("a store failed")
                results = [Result(ResultCode.INTERNAL)] * len(good)
            if every and len(results) == len(ops):
                return results
            found = iter(results)
            return [next(found) if fine else Result(ResultCode.INVALID) for fine in valid]

        return self._lane.submit(
            run,
            deadline_s,
            timed_out=[Result(ResultCode.TIMEOUT)] * len(ops),
            refused=[Result(ResultCode.UNAVAILABLE)] * len(ops),
        )


class StoreFactory(Protocol):
    """Describes what is registered in the entry-point group `kvparams.stores` under a URL's scheme."""

    def __call__(self, url: StoreURL) -> KVStore:
        """Open the store that `url` names; raises StoreError."""
        ...


def open_store(url: str) -> KVStore:
    """Open a store by its URL: `memory:?size=1GiB`, `file:///dev/shm/kv?size=4GiB`.

    Raises:
        StoreError: the URL or a setting is wrong, or the store cannot be opened.
        PluginError: no store is registered under the URL's scheme; the message lists the known ones.
    """
    parsed = StoreURL.parse(url)
    if (scheme := _VALKEY_SCHEMES.get(parsed.scheme)) and parsed.scheme not in plugins.plugin_names("stores"):
        raise StoreError(f"{parsed.scheme}:// is written {scheme}:// here")
    factory = cast("StoreFactory", plugins.load_plugin("stores", parsed.scheme))
    return factory(parsed)
