"""The bytes-level store: what a new backend implements, and nothing about tensors, tokens or engines.

Values are write-once: a key names its content, so a second put of the same key changes nothing. The one rule: a batch
never raises for one of its keys; every key has its own result from a closed set.
"""

import logging
import re
import string
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Protocol, TypeVar, cast

from kvparams import plugins
from kvparams_connectors.jobs import Job, WorkerPool
from kvparams_connectors.store_url import StoreError, StoreURL

if TYPE_CHECKING:  # it imports numpy, which not every store needs
    from kvparams_connectors.arena import Arena

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

_LOGGER: Final = logging.getLogger(__name__)
_KEY: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_LONGEST: Final = 128
_LETTERS: Final = f"{string.ascii_letters}{string.digits}._-".encode()

DEFAULT_DEADLINE_S: Final = 5.0
"""How long an operation may take if the caller does not say."""


class ResultCode(Enum):
    """What became of one key of a batch."""

    OK = "ok"
    EXISTS = "exists"
    """put: the key is there already, whole; nothing was written."""
    MISS = "miss"
    """get, exists, delete: the key is not there."""
    CORRUPT = "corrupt"
    """get: the store itself found the value damaged."""
    FULL = "full"
    """put: the value is within the limit, but there is no room, and none can be made by evicting: what the same batch
    has put or found already stays, and so does what is being written or read at the moment."""
    TOO_LARGE = "too_large"
    """put: larger than the store takes. get: larger than the buffers; `nbytes` says how large."""
    TIMEOUT = "timeout"
    """The deadline passed; the work may still be running (see `Job.settled`)."""
    UNAVAILABLE = "unavailable"
    """The store cannot be reached, is closed or has too much to do."""
    DENIED = "denied"
    """The store refuses this caller."""
    INVALID = "invalid"
    """The operation itself is wrong: a bad key, a buffer that cannot be used."""
    INTERNAL = "internal"
    """A defect in the store; the log has it."""


class Result(NamedTuple):
    """What became of one key."""

    code: ResultCode
    nbytes: int = 0
    """put, get: bytes moved. exists: the value's size, if `has_size`. TOO_LARGE on get: the value's size. Otherwise
    0."""
    has_size: bool = True
    """exists: False if the store has not asked how large the value is (`Capabilities.reports_sizes`). `nbytes` is 0
    then, so that whoever compares it takes the value for none of his."""

    def matches_size(self, nbytes: int) -> bool:
        """exists: whether a value is there that has `nbytes`, as far as the store can tell. A get says for certain."""
        return self.code is ResultCode.OK and (not self.has_size or self.nbytes == nbytes)


Results = list[Result]
"""One result per operation, in the order of the batch."""


@dataclass(frozen=True, slots=True)
class PutOp:
    """Store the bytes of `buffers`, one after the other, under `key`."""

    key: str
    buffers: Sequence[memoryview]
    before_read: Callable[[], object] | None = None
    """A store calls it once before it looks into the buffers, if it does, and best right before: the caller writes then
    what follows from the rest of the value, such as a checksum, which has to read all of it and so brings it into the
    processor's caches. Called by the thread that moves the value; it neither waits nor raises."""
    on_idle: Callable[[], bool] | None = None
    """A store that calls `before_read` may call this before, as often as it likes, where it would only wait: the caller
    does a little of that work, tens of microseconds, and says whether more is left. The value stays as it is
    meanwhile."""

    def resolve_before_read(self) -> "PutOp":
        """The same after `before_read` was called: for a store that hands the value on, or looks at it more than
        once."""
        if self.before_read is None:
            return self
        self.before_read()
        return PutOp(self.key, self.buffers)


@dataclass(frozen=True, slots=True)
class GetOp:
    """Read the value of `key` into `buffers`, one after the other. They may be larger than the value together."""

    key: str
    buffers: Sequence[memoryview]
    on_complete: Callable[[int], None] | None = None
    """A store may call it when the value lies in the buffers, with its size, before the job says so: the caller looks
    at it while it is in the processor's caches. Called by the thread that moved the value; it neither waits nor raises.
    A store that changes the bytes afterwards, or hands out other ones, must not call it, nor let an inner store."""
    on_progress: Callable[[int], None] | None = None
    """A store that calls `on_complete` may call this before, with 0 whenever it begins to fill the buffers, and then
    with how many bytes lie in them that it will not touch again, so that the caller looks at them piece by piece."""
    caller_verifies: bool = False
    """The caller checks all of the bytes against what it asked for. Then a store may leave out what it would have to
    ask a server for only to be sure that it has not read another value's bytes. A store that keeps what it has read, or
    hands it to others, passes False on."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do and how much it takes; the conformance suite holds it to this."""

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
        """What this store can do."""

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
        """What `exists` would answer, for callers that cannot afford to wait for another thread; None: ask `exists`.

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
        """Where other processes can read what this one has put, `host:port`; None where a shared store has it."""
        return None

    def hint_location(self, keys: Sequence[str], source: str) -> None:  # noqa: B027 - most stores have nothing to do here
        """Whoever made these values says where they can be read (its `address`): a hint, for the next get or exists of
        these keys. A store goes only where its own settings allow. Returns at once."""

    def quarantine(self, keys: Sequence[str]) -> None:  # noqa: B027 - most stores have nothing to do here
        """The caller found these values damaged: a store that can keeps from finding them again. Returns at once."""

    def discard(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """The caller found damaged what a get of these keys gave last: `quarantine` and `delete`. A store that has
        several copies of a value spares those that the bytes did not come from. Results as of `delete`."""
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
        self._lane = WorkerPool(f"kvparams-{name}", threads=threads)
        self._closing = threading.Lock()
        self._released = False

    def register(self, arena: "Arena") -> None:
        """Nothing: a store that copies with the CPU need not know."""

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
        work = self.put_blocking if self.calls_before_read else self._put_gone
        return self._submit(ops, [is_valid_put(op) for op in ops], work, deadline_s)

    def get(self, ops: Sequence[GetOp], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        return self._submit(ops, [is_valid_get(op) for op in ops], self.get_blocking, deadline_s)

    def exists(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        return self._submit(keys, are_valid_keys(keys), self.exists_blocking, deadline_s)

    def delete(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        return self._submit(keys, are_valid_keys(keys), self.delete_blocking, deadline_s)

    def close(self) -> None:
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


def is_valid_key(key: str) -> bool:
    """Whether every store takes this key."""
    return _KEY.fullmatch(key) is not None


def are_valid_keys(keys: Sequence[str]) -> list[bool]:
    """`is_valid_key` of each; quicker where all are, as all pages of a long prompt."""
    lengths = [len(key) for key in keys]
    if keys and min(lengths) and max(lengths) <= _LONGEST:
        text = "".join(keys)
        if text.isascii() and not text.encode().translate(None, _LETTERS):
            return [True] * len(keys)
    return [is_valid_key(key) for key in keys]


def is_valid_put(op: PutOp) -> bool:
    """Whether every store takes this operation."""
    try:
        return is_valid_key(op.key) and all(buffer.c_contiguous for buffer in op.buffers)
    except ValueError:  # a buffer was released
        return False


def is_valid_get(op: GetOp) -> bool:
    """Whether every store takes this operation."""
    try:
        return is_valid_key(op.key) and all(buffer.c_contiguous and not buffer.readonly for buffer in op.buffers)
    except ValueError:  # a buffer was released
        return False


class StoreFactory(Protocol):
    """What is registered in the entry-point group `kvparams.stores` under a URL's scheme."""

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
    factory = cast("StoreFactory", plugins.load_plugin("stores", parsed.scheme))
    return factory(parsed)
