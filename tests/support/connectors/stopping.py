"""Tests a store whose server is stopped for long: what it costs meanwhile, and that it works again.

Every value that was read is compared, and no call takes longer than its deadline and a moment.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvparams_connectors.store import GetOp, KVStore, ResultCode
from tests.support.connectors.steps import SIZE, get, put
from tests.support.waiting import wait_until

__all__ = ["LOST", "Case", "stopped_for_long"]

LOST: Final = frozenset({ResultCode.UNAVAILABLE, ResultCode.TIMEOUT})
_DEADLINE_S: Final = 0.5
_MOST_S: Final = 1.5
_BACK_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """A store, and what of it can be stopped."""

    store: KVStore
    stop: Callable[[], None]
    go_on: Callable[[], None]
    lost: frozenset[ResultCode] = LOST
    """What a call says meanwhile."""
    writes: bool = True
    """Whether puts go to what is stopped."""


def stopped_for_long(case: Case, stopped_s: float, record: Callable[[dict[str, object]], None]) -> None:
    """Stop it for so long, ask all the while, let it go on and see that it works; `record` is told what was seen."""
    if case.writes:
        assert put(case.store, range(3)) == [ResultCode.OK] * 3
    assert get(case.store, range(3)) == [ResultCode.OK] * 3  # the control
    longest, seen = 0.0, dict.fromkeys(ResultCode, 0)
    case.stop()
    try:
        over = time.monotonic() + stopped_s
        while time.monotonic() < over:
            start = time.monotonic()
            codes = _get_in_time(case.store, _DEADLINE_S)
            longest = max(longest, time.monotonic() - start)
            for code in codes:
                seen[code] += 1
            if longest < _DEADLINE_S:  # refused at once: no reason to ask as fast as can be
                time.sleep(0.02)
    finally:
        case.go_on()
    said = {code.value: count for code, count in seen.items() if count}
    record({"stopped_s": stopped_s, "deadline_s": _DEADLINE_S, "longest_wait_s": round(longest, 3), "said": said})
    assert longest < _MOST_S
    assert {code for code, count in seen.items() if count} <= case.lost
    if case.writes:  # what was stored may have been forgotten; the store works
        wait_until(
            lambda: put(case.store, range(10, 11), 5.0)[0] in (ResultCode.OK, ResultCode.EXISTS), _BACK_S, pause_s=0.2
        )
        wait_until(lambda: get(case.store, range(10, 11)) == [ResultCode.OK], _BACK_S, pause_s=0.2)
    else:
        wait_until(lambda: get(case.store, range(3)) == [ResultCode.OK] * 3, _BACK_S, pause_s=0.2)


def _get_in_time(store: KVStore, deadline_s: float) -> list[ResultCode]:
    """`get` into buffers that belong to the store until it has let go of them, which may be long after."""
    targets = [memoryview(bytearray(SIZE)) for _ in range(3)]
    ops = [GetOp(f"key-{number}", (target,)) for number, target in enumerate(targets)]
    return [result.code for result in store.get(ops, deadline_s).result()]
