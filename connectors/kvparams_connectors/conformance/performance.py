"""The test of the level performance: how fast the store moves pages, beside memory in the same run.

Speed is reported, and fails only where a store falls below its own floor in every single round.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Final

import pytest

from kvparams_connectors.conformance.helpers import DEADLINE_S, ConformanceLevel, Floors, make_value, result_codes
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode

__all__ = ["SPEED", "PerformanceLevel"]

SPEED: Final = "kvstore speed"
"""The property of a test's report that holds one line about speed."""

_ROUNDS: Final = 10
_PAGES: Final = 6


class PerformanceLevel(ConformanceLevel):
    """Ratios, never seconds: the machine is whatever it is."""

    def test_the_store_is_as_fast_as_it_says(
        self, store: KVStore, floors: Floors, record_property: Callable[[str, object], None]
    ) -> None:
        size = max(1, min(256 << 10, store.capabilities.max_value_bytes // (2 * _PAGES)))
        sources = [make_value(number, size) for number in range(_PAGES)]
        targets = [memoryview(bytearray(size)) for _ in range(_PAGES)]
        ratios: dict[str, list[float]] = {"put": [], "get": []}
        lookups: list[float] = []
        for turn in range(_ROUNDS + 1):
            keys = [f"{turn}.{number}" for number in range(_PAGES)]
            puts = [PutOp(key, (source,)) for key, source in zip(keys, sources, strict=True)]
            gets = [GetOp(key, (target,)) for key, target in zip(keys, targets, strict=True)]

            def memory() -> None:
                for source, target in zip(sources, targets, strict=True):
                    target[:] = source

            floor_s = _seconds(memory)
            put_s = _seconds(lambda: store.put(puts, DEADLINE_S).result())  # noqa: B023 - called here
            get_s = _seconds(lambda: store.get(gets, DEADLINE_S).result())  # noqa: B023
            floor_s = min(floor_s, _seconds(memory))
            lookup_s = _seconds(lambda: store.exists(keys, DEADLINE_S).result())  # noqa: B023
            assert result_codes(store.delete(keys, DEADLINE_S).result()) == [ResultCode.OK] * _PAGES
            if turn:  # the first round warms up
                ratios["put"].append(floor_s / put_s)
                ratios["get"].append(floor_s / get_s)
                lookups.append(lookup_s)
        assert targets == sources
        record_property(
            SPEED,
            f"pages of {size} bytes: put {median(ratios['put']):.3f}, get {median(ratios['get']):.3f} of the speed of "
            f"memory; lookup of {_PAGES} in {1000 * median(lookups):.2f} ms",
        )
        for name, floor in (("put", floors.put), ("get", floors.get)):
            if max(ratios[name]) < floor:
                pytest.fail(
                    f"{name}: at best {max(ratios[name]):.4f} of the speed of memory in {_ROUNDS} rounds; "
                    f"the store says at least {floor}"
                )


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
