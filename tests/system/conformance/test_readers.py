"""Tests the profiles of translators and of readers of events: ours keeps them, and single faults are caught."""

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvparams.cli import main
from kvparams_conformance.checks import Check, CheckResult, select_checks
from kvparams_conformance.reader_checks import reader_checks
from kvparams_conformance.reader_site import same_value
from kvparams_conformance.runner import run_reader_checks
from tests.system.conformance.mutants.faults import Mutant, caught_by, copy_with_fault, read_mutants

ROOT = Path(__file__).parents[3]
OURS = f"{sys.executable} -P -m line_reader"
MUTANTS = read_mutants("readers.json")
SOURCES = (ROOT / "kvparams", ROOT / "examples")
PROFILES = ("translator", "events-reader")


def judged(profile: str, command: str, *only: str) -> list[CheckResult]:
    return asyncio.run(run_reader_checks(select_checks(reader_checks(), (profile,), only), command))


@pytest.mark.parametrize("profile", PROFILES)
def test_ours_keeps_the_profile(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", profile, "--start", OURS]) == 0
    said = capsys.readouterr().out
    assert f"{len(select_checks(reader_checks(), (profile,), ()))} pass;" in said


def test_there_are_enough_faults_for_each_profile() -> None:
    known = {profile: {check.id for check in reader_checks() if profile in check.profiles} for profile in PROFILES}
    for profile in PROFILES:
        named = {mutant.check for mutant in MUTANTS if mutant.run == profile}
        assert named <= known[profile]
        assert len(named) >= 9
    # One dialect stands for all, and one vector of messages that are no batch for the other requirements of them.
    untested = known["translator"] - {mutant.check for mutant in MUTANTS}
    assert {check.partition("/")[0] for check in untested} == {"15.1"}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name.replace("/", "-"))
def test_a_fault_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    copy_with_fault(mutant, SOURCES, tmp_path)
    path = f"{tmp_path}:{tmp_path}/examples"
    command = f"env PYTHONPATH={path} PYTHONDONTWRITEBYTECODE=1 {OURS}"
    assert mutant.check in caught_by(judged(mutant.run, command, mutant.check))


PROGRAMS = {
    "ends at once": ("import sys; sys.exit('no such option')", "ended with status 1: no such option"),
    "closes its output": ("import os, sys, time; os.close(1); time.sleep(600)", "ended with status"),
    "answers nothing": ("import time; time.sleep(600)", "did not answer within"),
    "answers no JSON": ("for line in open(0): print('yes', flush=True)", "the answer is no object in JSON"),
    "answers a list": ("for line in open(0): print([], flush=True)", "the answer is no object in JSON"),
    "answers without end": ("import sys\nwhile True: sys.stdout.write('x' * 65536)", "a line that is too long"),
    "answers yes": ("for line in open(0): print('{}', flush=True)", ""),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_is_no_reader_ends_in_a_verdict(name: str, tmp_path: Path) -> None:
    code, message = PROGRAMS[name]
    program = tmp_path / "reader.py"
    program.write_text(code)
    begun = time.monotonic()
    results = judged("events-reader", f"{sys.executable} {program}", "14.1", "14.2", "14.12")
    assert len(results) >= 6
    assert {result.verdict for result in results} <= {"fail", "error"}
    assert all(result.message for result in results)
    assert message in results[0].message
    assert time.monotonic() - begun < 60


def test_an_answer_that_comes_after_its_check_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program repeats each question, slowly: only its answer to the own question is taken for one."""
    program = tmp_path / "reader.py"
    program.write_text(
        "import json, time\n"
        "while line := input():\n"
        "    time.sleep(0.3)\n"
        "    print(json.dumps({'echo': json.loads(line)['do']}), flush=True)\n"
    )
    monkeypatch.setattr("kvparams_conformance.runner.CHECK_S", 1.0)
    found = list[tuple[str, str]]()

    def check(name: str, questions: int) -> Check:
        async def ask(trial: Any) -> None:
            for number in range(questions):
                found.append((f"{name} {number}", (await trial.ask(f"{name} {number}"))["echo"]))

        return replace(reader_checks()[0], name=name, run=ask)

    checks = [*(check(f"slow {number}", 50) for number in range(4)), check("quick", 1)]
    results = asyncio.run(run_reader_checks(checks, f"{sys.executable} {program}"))
    assert [result.verdict for result in results] == ["fail"] * 4 + ["pass"]
    assert found[-1] == ("quick 0", "quick 0")
    assert all(asked == told for asked, told in found)


def test_a_reader_need_not_know_every_dialect(tmp_path: Path) -> None:
    program = tmp_path / "reader.py"
    program.write_text('for line in open(0): print(\'{"unknown": "dialect"}\', flush=True)')
    results = judged("translator", f"{sys.executable} {program}")
    assert {result.verdict for result in results} == {"skip"}
    assert main(["conformance", "translator", "--start", f"{sys.executable} {program}"]) == 2


@pytest.mark.parametrize(
    ("wanted", "told", "same"),
    [
        (1, 1, True),
        (1, True, False),
        (1, 1.0, False),
        (1.0, 1, True),
        (1.5, 1.5, True),
        (0.0, False, False),
        (True, True, True),
        ("1", 1, False),
        (None, ..., False),
        ({"a": None}, {}, False),
        ({"a": [1, {"b": 2**64 - 1}]}, {"a": [1, {"b": 2**64 - 1}]}, True),
        ({"a": [1, {"b": 2**64 - 1}]}, {"a": [1, {"b": 2**64}]}, False),
        ([1], [1, 2], False),
        ([], {}, False),
    ],
)
def test_values_are_compared_as_json(wanted: object, told: object, same: bool) -> None:
    assert same_value(wanted, told) is same
