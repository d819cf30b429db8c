"""Decides when a worker that exited is restarted, and when the proxy gives up. It has no I/O and no clock.

The first restart is immediate, since the cause of most exits does not recur at once (a kill, a fault in one request).
Each further restart waits twice as long, so that a worker that cannot start leaves the processor to the others.
"""

from typing import Final, NamedTuple

from kvparams_proxy.workers.worker_start import StartFailure

__all__ = ["GiveUp", "RestartPolicy", "RestartWorker", "WorkerEnd"]

_FIRST_S: Final = 0.1
_LONGEST_S: Final = 5.0
_STABLE_S: Final = 30.0
"""A worker that has run for so long is no crash loop: its next restart is immediate."""
_MOST_FAILED_STARTS: Final = 3
"""In a row and with the same error, before any worker was ready."""


class WorkerEnd(NamedTuple):
    """The exit of a worker process."""

    cause: str
    """Such as `status 1` or `signal SIGKILL`."""
    lived_s: float
    was_ready: bool
    failure: StartFailure | None = None
    """The worker's own message, if it failed with one."""


class RestartWorker(NamedTuple):
    """The decision to start a successor."""

    delay_s: float
    report: str | None
    """The worker's own message, unless it is the one that was reported last."""


class GiveUp(NamedTuple):
    """The decision to end the proxy."""

    status: int
    message: str


class RestartPolicy:
    """Decides for all workers of one proxy."""

    def __init__(self) -> None:
        self._next_s: dict[int, float] = {}
        """By the number of a worker: the delay before its next restart."""
        self._failed_starts: dict[int, list[str]] = {}
        """By the number of a worker: the errors of its starts."""
        self._was_any_ready = False
        self._reported: str | None = None

    def ready(self, number: int) -> None:
        """Records that a worker is ready."""
        self._was_any_ready = True
        self._failed_starts.pop(number, None)

    def ended(self, number: int, end: WorkerEnd) -> RestartWorker | GiveUp:
        """Decides what follows when a worker exits without being told to."""
        failure = end.failure
        if not self._was_any_ready:
            if failure is not None:
                return GiveUp(failure.status, failure.message)
            errors = self._failed_starts.setdefault(number, [])
            errors.append(end.cause)
            if errors[-_MOST_FAILED_STARTS:] == [end.cause] * _MOST_FAILED_STARTS:
                times = f"{_MOST_FAILED_STARTS} times during startup ({end.cause})"
                return GiveUp(1, f"kvparams proxy: worker {number} exited {times}")
        delay_s = 0.0 if end.lived_s >= _STABLE_S else self._next_s.get(number, 0.0)
        self._next_s[number] = min(_LONGEST_S, max(_FIRST_S, 2 * delay_s))
        report = None if failure is None or failure.message == self._reported else failure.message
        if failure is not None:
            self._reported = failure.message
        return RestartWorker(delay_s, report)
