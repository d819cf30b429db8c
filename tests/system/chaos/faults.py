"""Draws the times and kinds of faults from a seed, so that a run can be repeated.

There is one spare of each role, so two faults in a row never hit the same role: an engine has ten seconds to come back
before the next one of its role is hit.
"""

import random
from collections.abc import Sequence
from typing import Final, NamedTuple

__all__ = ["ENGINE_FAULTS", "Fault", "schedule"]

ENGINE_FAULTS: Final = ("kill", "stop", "restart")
"""SIGKILL, and started again at once. SIGSTOP, and SIGCONT later. SIGTERM, and started again when it has ended."""


class Fault(NamedTuple):
    """One of them."""

    at_s: float
    target: str
    """A role of engines, or `store`."""
    number: int
    """Which engine of that role, or the seed of a damage."""
    kind: str
    for_s: float
    """For what lasts (`stop`, `hold`, a store's `restart`): how long."""


def schedule(
    seed: int,
    seconds: float,
    every_s: float,
    engines: int,
    store: Sequence[str],
    roles: Sequence[str] = ("prefill", "decode"),
) -> list[Fault]:
    """One fault every `every_s` seconds, the first after `every_s`. `engines` are there of each role; `store` are the
    kinds that its store knows."""
    draw = random.Random(seed)
    found: list[Fault] = []
    before: str | None = None
    for index in range(1, int(seconds / every_s) + 1):
        others = [one for one in (*roles, "store") if one != before]
        target = draw.choice(others)
        kind = draw.choice(store if target == "store" else ENGINE_FAULTS)
        number = draw.randrange(1 << 16) if target == "store" else draw.randrange(engines)
        for_s = draw.uniform(1.0, 3.0) if kind == "hold" else draw.uniform(2.0, 8.0)
        found.append(Fault(index * every_s, target, number, kind, for_s))
        before = target
    return found
