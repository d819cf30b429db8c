"""Holds what the checks of readers share: vectors, and the comparison of an answer with what a vector says."""

import json
from collections.abc import Iterable
from typing import Any, cast

from kvparams_conformance.checks import expect
from kvparams_conformance.conversation import shorten
from kvparams_conformance.raw_json import dump
from kvparams_conformance.reader_site import same_value
from kvparams_conformance.requirements import vectors_folder

__all__ = ["expect_answer", "expect_problems", "read_vectors"]


def read_vectors(name: str) -> dict[str, Any]:
    """Returns the content of a file of vectors."""
    return json.loads((vectors_folder() / name).read_text("utf-8"))


def expect_answer(answer: dict[str, Any], member: str, wanted: object, case: str) -> None:
    """Checks that a member of an answer has the value that a vector says."""
    told = answer.get(member, ...)
    shown = "absent" if told is ... else shorten(dump(told), 300)
    expect(same_value(wanted, told), f"{case}: `{member}` is {shown}, not {shorten(dump(wanted), 300)}")


def expect_problems(answer: dict[str, Any], wanted: Iterable[dict[str, Any]], case: str) -> None:
    """Checks that an answer refuses with the problems that a vector lists, in any order."""
    told = answer.get("problems")
    expect(isinstance(told, list), f"{case}: it is not refused")
    left, right = ([_problem(one) for one in problems] for problems in (wanted, told or ()))
    expect(sorted(left) == sorted(right), f"{case}: the problems are {right}, not {left}")


def _problem(problem: Any) -> str:
    """Returns path and kind of a problem, as text that can be compared."""
    found = cast("dict[str, Any]", problem) if isinstance(problem, dict) else {}
    return json.dumps([found.get("path"), found.get("kind")])
