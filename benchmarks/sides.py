"""Several clients of one server, measured in turns, and the machine they are measured on.

The one rule: in every round each side moves the same pages, in an order of its own, so that the noise of a moment hits
neighbours alike.
"""

import platform
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

__all__ = ["Seconds", "Side", "in_turns", "processor"]

_SEED: Final = 1
Way = Literal["put", "get"]
Seconds = dict[Way, dict[str, list[float]]]
"""For each way and side, how long each round took."""


class Side(Protocol):
    """A client of the server."""

    def put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        """Store all pages under keys that are not there."""
        ...

    def get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        """Read all values into the pages."""
        ...


def in_turns(
    sides: Mapping[str, Side],
    sources: Sequence[memoryview],
    targets: Sequence[memoryview],
    *,
    rounds: int,
    warm_ups: int,
    clean: Callable[[Sequence[str]], None],
) -> Seconds:
    """Have every side put `sources` and get them into `targets`, so many times.

    Args:
        sides: by name.
        sources: pages to put.
        targets: pages to get into; in the first round what is in them is compared.
        rounds: that count.
        warm_ups: rounds before these, at least one.
        clean: removes these keys from the server.

    Raises:
        SystemExit: what a side has read is not what it has put.
    """
    seconds: Seconds = {"put": {name: [] for name in sides}, "get": {name: [] for name in sides}}
    order = random.Random(_SEED)
    for turn in range(warm_ups + rounds):
        names = list(sides)
        order.shuffle(names)
        for name in names:
            keys = [f"{turn}.{number}" for number in range(len(sources))]
            put_s = _seconds(sides[name].put, keys, sources)
            get_s = _seconds(sides[name].get, keys, targets)
            if not turn and targets != sources:
                sys.exit(f"{name}: what was read is not what was put")
            if turn >= warm_ups:
                seconds["put"][name].append(put_s)
                seconds["get"][name].append(get_s)
            clean(keys)
    return seconds


def processor() -> str:
    """What the machine's processor is called."""
    for text in Path("/proc/cpuinfo").read_text().splitlines():
        if text.startswith("model name"):
            return text.partition(":")[2].strip()
    return platform.machine()


def _seconds(
    work: Callable[[Sequence[str], Sequence[memoryview]], None], keys: Sequence[str], pages: Sequence[memoryview]
) -> float:
    start = time.perf_counter()
    work(keys, pages)
    return time.perf_counter() - start
