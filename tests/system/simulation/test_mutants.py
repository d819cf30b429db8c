"""Tests that the simulation notices each release that is taken out of the proxy.

So it would also notice a release that was never written.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.simulation.equivalent_mutants import EQUIVALENT
from tests.system.simulation.mutants import mutants
from tests.system.simulation.processes import CORES, simulate
from tests.system.simulation.queue_mutants import WRONGS

ROOT = Path(__file__).parents[3]
Effort = Callable[[int, int], int]


def test_every_equivalent_is_a_mutant_and_has_a_reason() -> None:
    names = [mutant.name for mutant in mutants()]
    assert len(names) == len(set(names))
    assert set(EQUIVALENT) <= set(names)
    assert all(EQUIVALENT.values())
    named = {path for reason in EQUIVALENT.values() for path in re.findall(r"tests/[\w/]+\.py", reason)}
    assert len(named) > 10
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.timeout(3600)
def test_every_release_is_missed(effort: Effort, record: Callable[[dict[str, object]], None]) -> None:
    count = effort(6_000, 12_000)
    noticed: dict[str, list[object] | None] = {}
    for part in simulate(*(("mutants", part, CORES, count) for part in range(CORES))):
        noticed.update(part)
    survivors = [name for name, how in noticed.items() if how is None and name not in EQUIVALENT]
    found = {name: noticed[name] for name in EQUIVALENT if noticed[name] is not None}
    assert not survivors, "nobody noticed:\n" + "\n".join(survivors)
    assert not found, "noticed:\n" + "\n".join(map(str, found.items()))
    assert len(noticed) == len(mutants())
    record({"mutants": len(noticed), "equivalent": len(EQUIVALENT)})


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_whatever_is_done_wrong_behind_a_broker_is_noticed(record: Callable[[dict[str, object]], None]) -> None:
    noticed: dict[str, list[object] | None] = {}
    for part in simulate(*(("queue", part, CORES, 1_000) for part in range(CORES))):
        noticed.update(part)
    assert set(noticed) == {wrong.what for wrong in WRONGS}
    assert not [what for what, how in noticed.items() if how is None]
    record({"mutants of the queue": len(noticed)})
