"""Tests that the tests named for a requirement fail where the requirement is broken.

All mutants run with `--soak`, otherwise a few. `python -m tests.system.requirements` runs those of some requirements.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.kvparams.requirement_binding import bound_tests
from tests.system.requirements.mutation import (
    Mutant,
    apply,
    copy_sources,
    judge_run,
    nodes_of,
    read_mutants,
    run_tests,
)

MUTANTS = read_mutants()
BOUND = bound_tests()
SAMPLE = ("1.0#2.2", "1.0#5.8", "1.0#9.7")
"""Requirements whose tests take no time, of different packages."""


def section_of(mutant: Mutant) -> int:
    return int(mutant.requirement.partition("#")[2].partition(".")[0])


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(tmp_path_factory.mktemp("copy"))


def check(mutants: list[Mutant], copy: Path) -> dict[str, str]:
    """Returns the mutants that are not caught, each with what the named tests said.

    First the same tests have to pass without a fault.
    """
    control = run_tests(nodes_of([mutant.requirement for mutant in mutants], BOUND), copy)
    assert control.outcome == "survived", control.output
    escaped: dict[str, str] = {}
    for mutant in mutants:
        with apply(mutant, copy):
            result = run_tests(BOUND[mutant.requirement], copy)
        if result.outcome != "caught":
            escaped[mutant.name] = f"{result.outcome}: {result.output[-2000:]}"
    return escaped


def test_a_few_mutants_are_caught(copy: Path) -> None:
    assert check([mutant for mutant in MUTANTS if mutant.requirement in SAMPLE], copy) == {}


def test_a_change_that_breaks_nothing_survives_and_one_that_breaks_everything_is_not_caught(copy: Path) -> None:
    """Negative controls: a mutant counts only if a test has looked at it."""
    file, before = "kvparams/codec.py", '"""The one door'
    nodes = BOUND["1.0#2.2"]
    for after, outcome in (('"""The only door', "survived"), ("import kvparams.nothing\n" + before, "broken")):
        with apply(Mutant("1.0#2.2", "", file, before, after), copy):
            assert run_tests(nodes, copy).outcome == outcome
    twice = apply(Mutant("1.0#2.2", "", file, "Raises:", ""), copy)
    with pytest.raises(ValueError, match="times in kvparams/codec"), twice:
        pass


@pytest.mark.parametrize(
    ("code", "output", "outcome"),
    [
        (0, "2 passed", "survived"),
        (1, "FAILED tests/a.py::test_a[b c] - assert 1 == 2", "caught"),
        (1, "FAILED tests/a.py::test_a - NameError: name 'Any' is not defined", "broken"),
        (1, "ERROR tests/a.py::test_a - OSError", "broken"),
        (2, "ERROR tests/a.py", "broken"),
        (4, "ERROR: not found: tests/a.py::test_a", "broken"),
    ],
)
def test_only_a_test_that_fails_has_noticed_a_fault(code: int, output: str, outcome: str) -> None:
    assert judge_run(code, output).outcome == outcome


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("section", sorted({section_of(mutant) for mutant in MUTANTS}))
def test_every_mutant_of_a_section_is_caught(
    section: int, copy: Path, record: Callable[[dict[str, object]], None]
) -> None:
    mutants = [mutant for mutant in MUTANTS if section_of(mutant) == section]
    assert check(mutants, copy) == {}
    record({"requirements": len({mutant.requirement for mutant in mutants}), "mutants caught": len(mutants)})
