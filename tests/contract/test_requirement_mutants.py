"""Checks the table of mutants that shows that the tests named for a requirement check it.

Each requirement of spec.md has a mutant, or a reason why no fault here can break it. `tests/system/requirements` runs
the mutants.
"""

import ast
from collections import Counter
from collections.abc import Collection, Iterable

import pytest

from tests.support.kvparams.requirement_binding import UNSHOWN, bound_tests, spec_requirements
from tests.support.kvparams.spec_folder import ROOT
from tests.system.requirements.mutation import Mutant, read_mutants

MUTANTS = read_mutants()


def unmatched(requirements: Iterable[str], mutants: Iterable[Mutant], exempt: Collection[str]) -> dict[str, list[str]]:
    """Returns what does not fit together."""
    wanted = list(requirements)
    broken = {mutant.requirement for mutant in mutants}
    return {
        "has no mutant": [one for one in wanted if one not in broken and one not in exempt],
        "is no requirement": sorted((broken | {*exempt}) - {*wanted}),
        "has a mutant and a reason why not": sorted(broken & {*exempt}),
    }


def test_every_requirement_has_a_mutant_or_a_reason_why_not() -> None:
    found = unmatched(spec_requirements(), MUTANTS, UNSHOWN)
    assert found == {"has no mutant": [], "is no requirement": [], "has a mutant and a reason why not": []}


def test_every_mutant_has_tests_that_must_notice_it() -> None:
    bound = bound_tests()
    assert [mutant.name for mutant in MUTANTS if not bound.get(mutant.requirement)] == []


def test_no_fault_is_there_twice() -> None:
    """Another requirement may be broken by the same change, but one requirement needs it once."""
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []
    changes = Counter((one.requirement, one.file, one.before, one.after) for one in MUTANTS)
    assert max(changes.values()) == 1


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name.replace("/", "-") for mutant in MUTANTS])
def test_a_fault_can_be_made(mutant: Mutant) -> None:
    """What it replaces stands in the source exactly once, and what comes out is a program."""
    text = (ROOT / mutant.file).read_text("utf-8")
    assert text.count(mutant.before) == 1
    assert mutant.before != mutant.after
    ast.parse(text.replace(mutant.before, mutant.after))


def test_a_requirement_without_a_mutant_is_noticed() -> None:
    """Negative control, in all directions."""
    mutants = [Mutant(number, "fault", "file", "a", "b") for number in ("v#1.1", "v#1.3", "v#9.9")]
    assert unmatched(["v#1.1", "v#1.2", "v#1.3", "v#1.4"], mutants, {"v#1.3": "", "v#1.4": ""}) == {
        "has no mutant": ["v#1.2"],
        "is no requirement": ["v#9.9"],
        "has a mutant and a reason why not": ["v#1.3"],
    }
