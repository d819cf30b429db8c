"""Shows requirements of proxies by checks of the conformance kit, on this project's proxy as its users start it.

`tests/contract/test_requirements.py` binds the requirements to these tests. For each there is a fault of the proxy in
`mutants/proxy.json` for which the same checks fail.
"""

import asyncio
from pathlib import Path

from kvparams_conformance.checks import select_checks
from kvparams_conformance.proxy_checks import proxy_checks
from kvparams_conformance.runner import run_proxy_checks
from kvparams_conformance.site import Under
from tests.system.conformance.mutants.faults import read_mutants
from tests.system.conformance.runs import RUNS

SHOWN = ("3.7", "3.9", "4.1", "12.5")


def failing(ours: str, run: str, *checks: str) -> list[str]:
    """Returns the checks that our proxy does not pass."""
    profile, options = RUNS[run]
    chosen = select_checks(proxy_checks(), (profile,), checks)
    assert {check.requirement for check in chosen} == {check.partition("/")[0] for check in checks}
    results = asyncio.run(run_proxy_checks(chosen, Under("document", command=f"{ours} --log-requests - {options}")))
    return [f"{result.check.id}: {result.message}" for result in results if result.verdict != "pass"]


def test_another_try_has_another_transfer_the_next_attempt_and_the_same_request_id(ours: str) -> None:
    """Spec-mandated, 1.0#3.15, too: no two tries have one transfer."""
    assert failing(ours, "store", "3.7", "3.15", "4.3") == []


def test_the_rest_of_a_lease_is_handed_on_and_nothing_of_one_that_is_over(ours: str) -> None:
    assert failing(ours, "store", "3.9", "17.15", "17.16") == []


def test_all_documents_of_a_try_are_of_one_request_and_transfer(ours: str) -> None:
    assert failing(ours, "store_drop", "4.1", "17.26") == []


def test_salts_keys_and_ids_of_engines_stand_in_no_log(ours: str) -> None:
    assert failing(ours, "store", "12.5") == []


def test_each_of_these_requirements_has_a_fault_that_fails_it(tmp_path: Path) -> None:
    """The binding has teeth: test_mutants.py runs the faults."""
    named = {mutant.check.partition("/")[0] for mutant in read_mutants("proxy.json")}
    assert {*SHOWN} <= named
