"""Tests that the conformance kit catches single faults: each by its own check, by few others, and by none too few."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvparams_conformance.proxy_checks import proxy_checks
from tests.system.conformance.mutants.faults import (
    Mutant,
    caught_by,
    copy_with_fault,
    judge,
    read_mutants,
    run_profile,
)
from tests.system.conformance.runs import ENGINES, RUNS

ROOT = Path(__file__).parents[3]
NODE, PROXY = read_mutants("node.json"), read_mutants("proxy.json")
SOURCES = {
    "node": (ROOT / "spec" / "reference" / "node",),
    "proxy": (ROOT / "kvparams", ROOT / "proxy" / "kvparams_proxy"),
}


def names(mutants: Sequence[Mutant]) -> list[str]:
    return [mutant.name.replace("/", "-") for mutant in mutants]


def test_there_are_enough_of_them_and_every_check_has_one() -> None:
    """No check is untested: for each there is a fault that it has to catch."""
    assert len(NODE) + len(PROXY) >= 60
    known = {check.id for check in proxy_checks()}
    named = {mutant.check for mutant in (*NODE, *PROXY)}
    assert named == known


@pytest.mark.parametrize("mutant", [*NODE, *PROXY], ids=names([*NODE, *PROXY]))
def test_a_fault_can_be_made(mutant: Mutant) -> None:
    """What a mutant replaces stands in the source exactly once, so that the source may change and this notices."""
    sources = SOURCES["node" if mutant in NODE else "proxy"]
    (source,) = (one for one in sources if mutant.file.startswith(f"{one.name}/"))
    text = (source.parent / mutant.file).read_text("utf-8")
    for before, after in mutant.changes:
        assert text.count(before) == 1
        assert before != after


@pytest.mark.slow
@pytest.mark.parametrize("mutant", NODE, ids=names(NODE))
def test_a_fault_of_the_reference_proxy_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    copy_with_fault(mutant, SOURCES["node"], tmp_path)
    node = shutil.which("node")
    command = f"{node} {tmp_path}/node/store_proxy.mjs --port {{port}} {ENGINES}"
    assert judge(mutant, caught_by(run_profile("store-proxy", command, tmp_path))) == ""


@pytest.mark.slow
@pytest.mark.parametrize("mutant", PROXY, ids=names(PROXY))
def test_a_fault_of_our_proxy_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    copy_with_fault(mutant, SOURCES["proxy"], tmp_path)
    run = RUNS[mutant.run]
    program = Path(sys.executable).with_name("kvparams")
    command = f"env PYTHONPATH={tmp_path} {program} proxy --port {{port}} --log-requests off {run.options}"
    assert judge(mutant, caught_by(run_profile(run.profile, command, tmp_path))) == ""


def test_a_fault_that_is_not_caught_well_is_noticed() -> None:
    """Negative control."""
    mutant = Mutant("1.1/a", "", "", ())
    assert judge(mutant, ["1.1/a", "b", "c", "d"]) == ""
    assert judge(mutant, ["1.1/a", "b", "c", "d", "e"]) == "caught by 4 other checks: ['b', 'c', 'd', 'e']"
    assert judge(mutant, ["b"]) == "not caught by its check, but by ['b']"
    assert judge(mutant, []) == "not caught by its check, but by none"
