"""Scales bounds on processor time to the machine on which the tests run."""

import time

__all__ = ["is_within", "scaled_s"]

_REFERENCE_S = 0.0025
"""CPU time of `_work` on the machine on which the bounds were set: an AMD EPYC, CPython 3.11, nothing else at work."""


def _work() -> int:
    found = 0
    text = b'{"index":0,"text":"a"},' * 300
    for number in range(8_000):
        at = text.find(b"}", number % 5_000)
        found += text[at : at + 2] == b"},"
        found ^= number
    return found


def scaled_s(bound_s: float) -> float:
    """Return the bound in seconds of CPU time for this machine as it is right now; it is never below `bound_s`.

    A processor that is shared, throttled or older takes longer for everything. A fixed piece of work, timed at the
    moment at which the bound is needed, says how much.
    """
    took_s: list[float] = []
    for _ in range(5):
        began = time.thread_time()
        _work()
        took_s.append(time.thread_time() - began)
    return bound_s * max(1.0, sorted(took_s)[2] / _REFERENCE_S)


def is_within(spent_s: float, bound_s: float) -> bool:
    """Return whether `spent_s` of CPU time is below the bound on this machine; it is timed only where it has to be."""
    return spent_s < bound_s or spent_s < scaled_s(bound_s)
