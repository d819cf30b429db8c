"""Runs the suite for stores, which `kvparams_connectors` ships as a plugin of pytest, and reads its verdicts.

The suite runs in a process of its own, so this package imports neither pytest nor the stores.
"""

import asyncio
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from kvparams_conformance.checks import Check, CheckResult, Verdict
from kvparams_conformance.program import Program

__all__ = ["SuiteFailed", "run_store_suite"]

_PLUGIN: Final = "kvparams_connectors.conformance"
_REQUIREMENTS: Final = (
    ("oddest_keys", "10.3"),
    ("differ_in_one_character", "10.3"),
    ("bad_key", "19.6"),
    ("buffers_that_cannot_be_used", "19.6"),
    ("too_small", "19.6"),
    ("over_the_limit", "19.6"),
    ("full_gives_up", "19.8"),
    ("tail_is_evicted", "19.8"),
    ("first_value", "19.2"),
    ("two_writers", "19.2"),
    ("many_writers", "19.2"),
    ("saved_again", "19.2"),
    ("one_result_per_key", "19.3"),
    ("empty_batches", "19.3"),
    ("looked_up_at_once", "19.3"),
    ("deadline", "19.4"),
    ("closed_store", "19.4"),
    ("closing_waits", "19.4"),
    ("close_in_the_middle", "19.4"),
    ("left_alone_once", "19.4"),
    ("source_may_change", "19.4"),
    ("slots_of_an_arena", "19.4"),
    ("deleted_key", "19.5"),
    ("missing_key", "19.5"),
    ("shared_store", "19.7"),
    ("persistent_store", "19.7"),
    ("decode_engine_reads", "19.7"),
    ("checksum", "11.1"),
    ("as_they_were_sealed", "11.2"),
)
"""A part of a test's name, and the requirement that it checks. Every other test checks 19.1."""


class SuiteFailed(Exception):
    """The suite could not run at all."""


def run_store_suite(store: str, timeout_s: float) -> list[CheckResult]:
    """Runs the suite on a store.

    Args:
        store: a URL, or `package.module:factory`; see the suite.
        timeout_s: after which the suite is stopped.

    Raises:
        SuiteFailed: it is not installed, does not find the store, or does not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="kvparams-conformance-") as folder:
        found = Path(folder) / "suite.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", _PLUGIN, f"--kvstore={store}", f"--junit-xml={found}"]
        options = ["-p", "no:cacheprovider", f"--basetemp={folder}/tests", "-c", "/dev/null", f"--rootdir={folder}"]
        try:
            status, output = asyncio.run(_run([*command, *options], timeout_s))
        except TimeoutError:
            raise SuiteFailed(f"the suite did not end within {timeout_s:.0f} s") from None
        if not found.is_file() or status not in (0, 1):
            said = output.strip()[-600:]
            raise SuiteFailed(f"the suite cannot run: {said or 'pip install kvparams[conformance]'}")
        lines = list(_read(found))
    if not lines:
        raise SuiteFailed("the suite has found no tests")
    return lines


async def _run(command: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Runs the suite, and ends it with all that it has started: a store may have left processes behind.

    Raises:
        TimeoutError: it does not end in time.
    """
    program = Program(shlex.join(command))
    await program.start({})
    try:
        async with asyncio.timeout(timeout_s):
            status = await program.wait()
    finally:
        await program.stop()
    return status, program.output


def _read(path: Path) -> Iterator[CheckResult]:
    for case in ElementTree.parse(path).iter("testcase"):
        name = case.get("name", "").removeprefix("test_").replace("_", "-")
        verdict: Verdict = "pass"
        message = ""
        for part in case:
            if part.tag in ("failure", "error", "skipped"):
                verdict = {"failure": "fail", "error": "error", "skipped": "skip"}[part.tag]  # pyright: ignore[reportAssignmentType]
                message = (part.get("message") or part.text or "")[:600]
        requirement = next((one for word, one in _REQUIREMENTS if word.replace("_", "-") in name), "19.1")
        check = Check(
            requirement=requirement,
            name=name,
            sends="the suite of stores",
            expects=name.replace("-", " "),
            profiles=("store",),
            run=_run_by_the_suite,
            is_isolated=True,
            is_choice=False,
        )
        yield CheckResult(check, verdict, message, "", "", float(case.get("time", "0")))


async def _run_by_the_suite(_: object) -> None:
    raise NotImplementedError("the suite of stores runs in a process of its own")
