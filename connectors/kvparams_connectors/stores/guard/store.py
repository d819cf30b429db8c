"""A store that fails, kept from whoever uses it: deadlines, a circuit breaker, a bound on what runs, a quarantine.

A dead or stopped store costs its deadline a few times, and then nothing: UNAVAILABLE comes at once, and the store is
asked in the background whether it is back. A guard never touches bytes and never waits. The caller's job settles with
the store's own, so a time-out gives no buffer back early.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from kvparams_connectors.advice import Advice, advice_from_store
from kvparams_connectors.deadline_timer import DeadlineTimer
from kvparams_connectors.jobs import Job, finished_job
from kvparams_connectors.store import (
    DEFAULT_DEADLINE_S,
    Capabilities,
    GetOp,
    KVStore,
    PutOp,
    Result,
    ResultCode,
    Results,
    open_store,
)
from kvparams_connectors.store_url import StoreUnreachable, StoreURL
from kvparams_connectors.stores.guard.deferred_store import DeferredStore
from kvparams_connectors.stores.guard.health import (
    GuardedOperation,
    GuardLimits,
    GuardStatistics,
    InFlightOperation,
    StoreHealth,
)

if TYPE_CHECKING:
    from kvparams_connectors.arena import Arena

__all__ = ["GuardLimits", "GuardStatistics", "GuardedStore", "open_guarded"]

_LOGGER: Final = logging.getLogger(__name__)

_UNGUARDED: Final = ("memory", "tiered")
_PROBE_KEY: Final = "kvparams-probe"
"""What a probe asks for. That it is not there is a good answer."""
_NO_ANSWER: Final = frozenset({ResultCode.UNAVAILABLE, ResultCode.INTERNAL, ResultCode.TIMEOUT})

Op = TypeVar("Op")


class GuardedStore(KVStore):
    """`inner`, guarded. It belongs to the guard: closing this closes it."""

    def __init__(self, inner: KVStore, limits: GuardLimits | None = None, *, name: str = "store") -> None:
        """Takes over a store: `close` closes it, too.

        Args:
            inner: the store; its methods return at once, as `KVStore` asks.
            limits: the time-outs and bounds of the guard; None: the defaults.
            name: the name in the log and of the thread; a scheme, never a URL, which may hold a secret.
        """
        self._inner = inner
        self._limits = limits or GuardLimits()
        self._name = name
        self._lock = threading.Lock()
        self._health = StoreHealth(self._limits)
        self._probe: Job[Results] | None = None
        self._probing = False
        self._alarm = DeadlineTimer(f"kvparams-guard-{name}", self._ring)

    @property
    def capabilities(self) -> Capabilities:
        """Returns what this store can do."""
        return self._inner.capabilities

    def advice(self) -> Sequence[Advice]:
        """Returns what the guarded store says."""
        return advice_from_store(self._inner)

    @property
    def statistics(self) -> GuardStatistics:
        """Returns what was seen until now."""
        with self._lock:
            return self._health.statistics()

    def register(self, arena: "Arena") -> None:
        """Passes on which memory most buffers come from."""
        self._inner.register(arena)

    def put(self, ops: Sequence[PutOp], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Stores values; see `KVStore.put`."""
        nbytes = _nbytes(ops)
        return self._submit("put", ops, [op.key for op in ops], nbytes, self._inner.put, deadline_s)

    def get(self, ops: Sequence[GetOp], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Reads values; see `KVStore.get`."""
        nbytes = _nbytes(ops)
        return self._unless_held("get", ops, [op.key for op in ops], nbytes, self._inner.get, deadline_s)

    def exists(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Looks keys up; see `KVStore.exists`."""
        return self._unless_held("exists", keys, keys, 0, self._inner.exists, deadline_s)

    def exists_nowait(self, keys: Sequence[str]) -> Results | None:
        """Looks keys up without waiting, or returns None; see `KVStore.exists_nowait`."""
        with self._lock:
            held = self._health.quarantined(keys, time.monotonic())
        return self._inner.exists_nowait(keys) if held is None else None

    def delete(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Deletes keys; see `KVStore.delete`."""
        return self._submit("delete", keys, keys, 0, self._inner.delete, deadline_s)

    @property
    def address(self) -> str | None:
        """Returns where other processes can read, or None; see `KVStore.address`."""
        return self._inner.address

    def hint_location(self, keys: Sequence[str], source: str) -> None:
        """Passes a hint on; see `KVStore.hint_location`."""
        self._inner.hint_location(keys, source)

    def quarantine(self, keys: Sequence[str]) -> None:
        """`exists` and `get` say MISS for these until this process has stored them anew or the time is over."""
        with self._lock:
            self._health.quarantine(keys, time.monotonic())
        self._inner.quarantine(keys)

    def discard(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """As `quarantine`, and the guarded store discards them, if it is not given up."""
        with self._lock:
            self._health.quarantine(keys, time.monotonic())
        return self._submit("delete", keys, keys, 0, self._inner.discard, deadline_s)

    def close(self) -> None:
        """Waits, within bounds, for what was submitted, and lets go of everything."""
        self._alarm.close()
        self._inner.close()

    # ---- operations

    def _unless_held(
        self,
        kind: GuardedOperation,
        ops: Sequence[Op],
        keys: Sequence[str],
        nbytes: int,
        call: Callable[[Sequence[Op], float], Job[Results]],
        deadline_s: float,
    ) -> Job[Results]:
        """`_submit` without the keys in quarantine: they are a MISS."""
        with self._lock:
            held = self._health.quarantined(keys, time.monotonic())
        if held is None:
            return self._submit(kind, ops, keys, nbytes, call, deadline_s)

        def complete(results: Results) -> Results:
            found = iter(results)
            return [Result(ResultCode.MISS) if away else next(found) for away in held]

        good = [index for index, away in enumerate(held) if not away]
        asked, names = [ops[index] for index in good], [keys[index] for index in good]
        return self._submit(kind, asked, names, nbytes, call, deadline_s).then(complete)

    def _submit(
        self,
        kind: GuardedOperation,
        ops: Sequence[Op],
        keys: Sequence[str],
        nbytes: int,
        call: Callable[[Sequence[Op], float], Job[Results]],
        deadline_s: float,
    ) -> Job[Results]:
        deadline_s = min(deadline_s, self._limits.deadline_s)
        with self._lock:
            now = time.monotonic()
            given_up = self._health.expire_deadlines(now)  # the alarm may be a moment late
            flight = self._health.admit(kind, keys, nbytes, deadline_s, now)
        if given_up:
            self._say(given_up=True)
        if flight is None:
            return finished_job([Result(ResultCode.UNAVAILABLE)] * len(keys), deadline_s)
        try:
            job = call(ops, deadline_s)
        except Exception:  # it must not raise, but a guard that trusts is none
            _LOGGER.exception("%s: a store raised where it should have answered", self._name)
            job = finished_job([Result(ResultCode.INTERNAL)] * len(keys), deadline_s)
        # Before it is done: whoever hears that a put has ended finds what it has put.
        job.add_before_done_callback(lambda results: self._settled(flight, results))
        self._alarm.schedule(flight.deadline)
        return job

    def _settled(self, flight: InFlightOperation, results: Results | None) -> None:
        """The store has let go of an operation; this runs in its thread. None: it has raised, which the caller gets."""
        if results is None:
            results = [Result(ResultCode.INTERNAL)] * len(flight.keys)
        with self._lock:
            given_up = self._health.operation_settled(flight, results, time.monotonic())
            following = self._health.next_time()
        if given_up is not None:
            self._say(given_up=given_up)
        if given_up and following is not None:
            self._alarm.schedule(following)

    def _say(self, *, given_up: bool) -> None:
        _LOGGER.warning(
            "%s store: %s", self._name, "no answer; it is not used for a while" if given_up else "works again"
        )

    # ---- the background; only the alarm's thread is here

    def _ring(self, now: float) -> float | None:
        """Deadlines that have passed, and the probe; when to look next."""
        with self._lock:
            given_up = self._health.expire_deadlines(now)
            if self._probing and self._probe is not None and self._probe.done():
                self._probing = False
                self._health.record_probe(now, good=_answered(self._probe))
            ask = self._health.begin_probe(now)
            if ask and self._probe is not None and not self._probe.settled():
                ask = False  # the last one is still stuck in there
                self._health.record_probe(now, good=False)
        if given_up:
            self._say(given_up=True)
        if ask:
            self._probing = True
            try:
                self._probe = self._inner.exists([_PROBE_KEY], self._limits.probe_s)
            except Exception:
                _LOGGER.exception("%s: a store raised where it should have answered", self._name)
                self._probe = finished_job([Result(ResultCode.INTERNAL)], 0.0)
            self._probe.add_settled_callback(lambda: self._alarm.schedule(0.0))
        with self._lock:
            following = self._health.next_time()
        if self._probing and self._probe is not None:
            following = min(self._probe.deadline, self._probe.deadline if following is None else following)
        return following


def _nbytes(ops: Sequence[PutOp] | Sequence[GetOp]) -> int:
    try:
        return sum(buffer.nbytes for op in ops for buffer in op.buffers)
    except ValueError:  # a buffer was released; the store says so
        return 0


def _answered(probe: Job[Results]) -> bool:
    try:
        return all(result.code not in _NO_ANSWER for result in probe.result(0))
    except Exception:  # noqa: BLE001 - whatever it is, it is no answer
        return False


def open_guarded(url: str, limits: GuardLimits | None = None) -> KVStore:
    """Opens a store by its URL for an engine, with a guard where one is needed.

    A store in this process's memory and one whose tiers are guarded need none. A store that does not answer yet is
    opened when it does.

    Raises:
        StoreError: see `open_store`; never `StoreUnreachable`.
        PluginError: see `open_store`.
    """
    scheme = StoreURL.parse(url).scheme
    try:
        store = open_store(url)
    except StoreUnreachable as error:
        _LOGGER.warning("%s; until it can be reached, all KV is computed", error)
        store = DeferredStore(partial(open_store, url), scheme)
    return store if scheme in _UNGUARDED else GuardedStore(store, limits, name=scheme)
