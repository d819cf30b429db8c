"""Tracks what is known of a store's health, and who may use it: breaker, operations in flight, quarantine, rates.

This module only decides. The caller passes the time, of the clock `time.monotonic`; nothing here waits, locks or calls
a store.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from kvparams.routing.breaker import Breaker, BreakerLimits, BreakerState
from kvparams_connectors.store import ResultCode, Results
from kvparams_connectors.stores.guard.quarantine import Quarantine
from kvparams_connectors.stores.guard.transfer_rate import TransferRate

__all__ = ["GuardLimits", "GuardStatistics", "GuardedOperation", "InFlightOperation", "StoreHealth"]

_DEAD: Final = frozenset({ResultCode.UNAVAILABLE, ResultCode.INTERNAL})

GuardedOperation = Literal["put", "get", "exists", "delete"]


@dataclass(frozen=True, slots=True)
class GuardLimits:
    """Describes how much patience there is with a store."""

    deadline_s: float = 30.0
    """No operation gets more than this, whatever its caller says."""
    in_flight: int = 128
    """Operations that have not settled; more are refused. One that timed out counts until the store lets go of it."""
    breaker: BreakerLimits = field(default_factory=lambda: BreakerLimits(consecutive=3, window=20, failures=10))
    """When the store is given up, and for how long at first and at most."""
    fair_s: float = 0.05
    """A time-out with less time than this, or than the operation was expected to take, is not the store's fault."""
    probe_s: float = 1.0
    """How long the background probe of a store that was given up may take."""
    quarantined: int = 4096
    """Keys that may be in quarantine."""
    quarantine_s: float = 300.0
    """And for how long each."""

    def __post_init__(self) -> None:
        if min(self.deadline_s, self.probe_s, self.quarantine_s) <= 0 or min(self.in_flight, self.quarantined) < 1:
            raise ValueError("limits of a guard must be more than 0")


@dataclass(frozen=True, slots=True)
class GuardStatistics:
    """Describes what a guard has seen; a snapshot."""

    state: BreakerState
    in_flight: int
    succeeded: int
    failed: int
    """Time-outs among them, if they had time enough."""
    timed_out: int
    refused: int
    """At once, because the store was given up or too much was in flight."""
    opened: int
    """How often the store was given up, or given up again by a probe."""
    probes: int
    corrupt: int
    """Values that the store itself called damaged."""
    quarantined: int
    """Keys in quarantine."""
    get_bytes_per_s: float | None
    put_bytes_per_s: float | None


@dataclass(eq=False, slots=True)
class InFlightOperation:
    """An `InFlightOperation` is an operation that has not settled."""

    kind: GuardedOperation
    keys: Sequence[str]
    started: float
    deadline: float
    fair: bool
    """Whether it has enough time for a time-out to mean anything."""
    trial: bool
    """It is the one operation of a half-open breaker."""
    counted: bool = False
    """The breaker knows what became of it."""


class StoreHealth:
    """It does not lock; whoever owns it does."""

    def __init__(self, limits: GuardLimits) -> None:
        self._limits = limits
        self._breaker = Breaker(limits.breaker)
        self._quarantine = Quarantine(limits.quarantined, limits.quarantine_s)
        self._flights: set[InFlightOperation] = set()
        self._gets, self._puts = TransferRate(), TransferRate()
        self._succeeded = self._failed = self._timed_out = self._refused = 0
        self._opened = self._probes = self._corrupt = 0

    def statistics(self) -> GuardStatistics:
        """Returns what was seen until now."""
        return GuardStatistics(
            state=self._breaker.state,
            in_flight=len(self._flights),
            succeeded=self._succeeded,
            failed=self._failed,
            timed_out=self._timed_out,
            refused=self._refused,
            opened=self._opened,
            probes=self._probes,
            corrupt=self._corrupt,
            quarantined=len(self._quarantine),
            get_bytes_per_s=self._gets.bytes_per_s,
            put_bytes_per_s=self._puts.bytes_per_s,
        )

    def expected_s(self, kind: GuardedOperation, nbytes: int) -> float | None:
        """Seconds that a get or put of so many bytes takes; None if none was seen, and while the store is given up."""
        if kind not in ("get", "put") or self._breaker.state is not BreakerState.CLOSED:
            return None
        return (self._gets if kind == "get" else self._puts).expected_s(nbytes)

    # ---- quarantine

    def quarantine(self, keys: Sequence[str], now: float) -> None:
        """These values are damaged."""
        self._quarantine.add(keys, now)

    def quarantined(self, keys: Sequence[str], now: float) -> list[bool] | None:
        """Returns which of these are in quarantine; None if none is."""
        if not len(self._quarantine):
            return None
        held = [self._quarantine.holds(key, now) for key in keys]
        return held if any(held) else None

    # ---- operations

    def admit(
        self, kind: GuardedOperation, keys: Sequence[str], nbytes: int, deadline_s: float, now: float
    ) -> InFlightOperation | None:
        """An operation wants to begin; None if it may not."""
        if not self._breaker.allows_requests or len(self._flights) >= self._limits.in_flight:
            self._refused += 1
            return None
        trial = self._breaker.state is BreakerState.HALF_OPEN
        if trial:
            self._breaker.begin_trial()
        fair = deadline_s >= max(self._limits.fair_s, self.expected_s(kind, nbytes) or 0.0)
        flight = InFlightOperation(kind, keys, now, now + deadline_s, fair, trial)
        self._flights.add(flight)
        return flight

    def operation_settled(self, flight: InFlightOperation, results: Results, now: float) -> bool | None:
        """The store has let go of an operation. True: the store is given up with this. False: it works again."""
        self._flights.discard(flight)
        if flight.kind in ("get", "put"):
            self._moved(flight, results, now)
        late = now > flight.deadline or any(result.code is ResultCode.TIMEOUT for result in results)
        dead = bool(results) and all(result.code in _DEAD for result in results)
        return self._outcome(flight, now, late=late, dead=dead, told=bool(results))

    def _moved(self, flight: InFlightOperation, results: Results, now: float) -> None:
        """Records the rates and the single values of a get or put."""
        nbytes = sum(result.nbytes for result in results if result.code is ResultCode.OK)
        if nbytes and now <= flight.deadline:
            (self._gets if flight.kind == "get" else self._puts).record(nbytes, now - flight.started)
        for key, result in zip(flight.keys, results, strict=False):
            if result.code is ResultCode.CORRUPT:
                self._corrupt += 1
                self._quarantine.add((key,), now)
            elif result.code is ResultCode.OK and flight.kind == "put":
                self._quarantine.lift(key)

    def expire_deadlines(self, now: float) -> bool:
        """Deadlines pass; whether the store is given up with this."""
        passed = [flight for flight in self._flights if now >= flight.deadline and not flight.counted]
        outcomes = [self._outcome(flight, now, late=True, dead=False, told=True) for flight in passed]
        return True in outcomes

    def _outcome(self, flight: InFlightOperation, now: float, *, late: bool, dead: bool, told: bool) -> bool | None:
        """Tell the breaker, once; as `operation_settled`."""
        if flight.counted:
            return None
        flight.counted = True
        self._timed_out += late
        if not told or (late and not flight.fair):  # nothing was asked, or there was no time to answer
            if flight.trial:
                self._breaker.end_trial()
            return None
        failed = late or dead
        self._failed += failed
        self._succeeded += not failed
        if self._breaker.state is BreakerState.HALF_OPEN and not flight.trial:
            return None  # it began before the store was given up
        if not failed:
            return False if self._breaker.record_success() else None
        if not self._breaker.record_failure(now):
            return None
        self._opened += 1
        return True

    # ---- probes

    def begin_probe(self, now: float) -> bool:
        """Returns True if it is time to probe the store; until `record_probe`, no operation is admitted."""
        if not self._breaker.poll(now):
            return False
        self._breaker.begin_trial()
        self._probes += 1
        return True

    def record_probe(self, now: float, *, good: bool) -> None:
        """It answered: one operation may be tried. It did not: the wait is longer than before."""
        if good:
            self._breaker.end_trial()
        elif self._breaker.record_failure(now):
            self._opened += 1

    def next_time(self) -> float | None:
        """Returns when a deadline passes or a probe is due; None if nothing is waited for."""
        times = [flight.deadline for flight in self._flights if not flight.counted]
        if self._breaker.state is BreakerState.OPEN:
            times.append(self._breaker.half_open_at)
        return min(times, default=None)
