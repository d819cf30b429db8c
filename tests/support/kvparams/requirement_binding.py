"""Defines which tests show which numbered requirement of spec.md.

A test names a requirement in its docstring, a vector in `requirements`. For tests elsewhere, `SHOWN` names them.
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from tests.support.kvparams.spec_folder import ROOT, SPEC, VECTORS

__all__ = [
    "NUMBER",
    "SHOWN",
    "UNSHOWN",
    "VECTOR_TESTS",
    "bound_tests",
    "docstrings",
    "named_in_tests",
    "requirements",
    "spec_requirements",
]

NUMBER: Final = r"[a-z0-9.]+#\d+\.\d+"
SHOWN: Final = {
    "1.0#3.7": "tests/system/conformance/test_shown.py::"
    "test_another_try_has_another_transfer_the_next_attempt_and_the_same_request_id",
    "1.0#3.9": "tests/system/conformance/test_shown.py::"
    "test_the_rest_of_a_lease_is_handed_on_and_nothing_of_one_that_is_over",
    "1.0#3.10": "tests/system/reference_engine/test_handover.py::"
    "test_kv_that_is_not_there_is_recomputed_or_an_error_as_asked",
    "1.0#3.11": "tests/system/conformance/test_engines.py::test_the_reference_engine_derives_no_address_from_an_id",
    "1.0#3.13": "tests/system/proxy/test_legs.py::"
    "test_prefill_is_asked_for_one_token_and_decode_for_what_the_client_asked",
    "1.0#4.1": "tests/system/conformance/test_shown.py::test_all_documents_of_a_try_are_of_one_request_and_transfer",
    "1.0#4.2": "tests/system/reference_engine/test_handover.py::"
    "test_decode_computes_one_prompt_token_and_says_what_one_engine_says",
    "1.0#4.3": "tests/system/proxy/test_failover.py::test_with_nixl_a_claimed_transfer_is_never_asked_for_again",
    "1.0#4.4": "tests/system/reference_engine/test_transfers.py::test_a_transfer_that_is_not_known_or_over_is_no_fault",
    "1.0#4.5": "tests/unit/connectors/transfer/test_connector.py::test_load_keys_are_promises_and_never_addresses",
    "1.0#10.2": "tests/interop/vllm/test_core_scheduler_half.py::test_what_no_key_can_say_is_not_cached",
    "1.0#10.3": "tests/unit/connectors/stores/test_stores.py::TestFileStore::test_the_longest_and_oddest_keys_work",
    "1.0#12.1": "tests/unit/proxy/requests/test_forbidden_fields.py::"
    "test_no_client_makes_an_engine_go_anywhere_or_load_anything_that_the_proxy_has_not_chosen",
    "1.0#12.2": "tests/unit/proxy/execution/test_corrections.py::test_cached_tokens_become_prefills_and_params_go",
    "1.0#12.5": "tests/system/conformance/test_shown.py::test_salts_keys_and_ids_of_engines_stand_in_no_log",
}
"""Tests that show a requirement and do not name it."""
UNSHOWN: Final[dict[str, str]] = {}
"""What cannot be shown here, with the reason."""
VECTOR_TESTS: Final = {
    "carrier": "tests/contract/test_vectors.py::test_the_sdk_reads_every_carrier_as_the_vector_says",
    "chain": "tests/unit/kvparams/index/test_index_chain.py::"
    "test_the_sdk_derives_the_block_hashes_that_the_vector_says",
    "document": "tests/contract/test_vectors.py::test_the_sdk_judges_every_document_as_the_vector_says",
    "events": "tests/unit/kvparams/kv_events/test_events.py::test_every_message_is_read_as_the_vector_says",
    "keys": "tests/contract/test_vectors.py::test_the_sdk_derives_the_keys_that_the_vector_says",
    "pages": "tests/contract/test_vectors.py::test_the_sdk_judges_every_stored_page_as_the_vector_says",
    "signature": "tests/unit/kvparams/signing/test_signing.py::test_every_vector_is_judged_as_it_says",
    "trio": "tests/contract/test_vectors.py::test_the_sdk_judges_every_trio_as_the_vector_says",
    "versions": "tests/contract/test_vectors.py::test_the_sdk_speaks_the_version_that_the_vector_says",
}
"""By the kind of a vector the test that judges it; each of its cases is named as the vector is."""


def requirements(text: str) -> list[str]:
    """Returns the numbers of a text's requirements, in its order."""
    return re.findall(rf"^- \*\*({NUMBER})\*\* ", text, re.MULTILINE)


def spec_requirements() -> list[str]:
    """Returns the numbers of the released version's requirements."""
    return requirements((SPEC / "spec.md").read_text())


def docstrings(source: str) -> dict[str, str]:
    """Returns the tests in a Python file, and what their docstrings say."""
    functions = (one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    return {one.name: ast.get_docstring(one) or "" for one in functions if one.name.startswith("test_")}


def named_in_tests() -> set[str]:
    """Returns the numbers that tests and vectors name."""
    return {number for number, _ in (*_named_in_docstrings(), *_named_in_vectors())}


def bound_tests() -> dict[str, list[str]]:
    """Returns for each requirement the test nodes that show it: cases of vectors first, since they take no time."""
    found: dict[str, list[str]] = {}
    for number, node in (*_named_in_vectors(), *_named_in_docstrings(), *SHOWN.items()):
        nodes = found.setdefault(number, [])
        if node not in nodes:
            nodes.append(node)
    return found


def _named_in_docstrings() -> Iterator[tuple[str, str]]:
    """Yields requirements, each with a test that names it."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text()
        if path.name == "test_requirements.py" or re.search(NUMBER, source) is None:
            continue
        for name, said in docstrings(source).items():
            for number in re.findall(NUMBER, said):
                yield number, f"{path.relative_to(ROOT).as_posix()}::{name}"


def _named_in_vectors() -> Iterator[tuple[str, str]]:
    """Yields requirements, each with the test's case of a vector that names it."""
    cases: dict[str, list[Any]] = {}
    for path in sorted(VECTORS.glob("*.json")):
        content = json.loads(path.read_bytes())
        cases.setdefault(content["kind"], []).extend(content["cases"])
    for kind, found in cases.items():
        names = Counter(case["name"] for case in found)
        seen: Counter[str] = Counter()
        for case in found:
            name = case["name"]
            number = str(seen[name]) if names[name] > 1 else ""  # pytest numbers cases of one name
            seen[name] += 1
            for requirement in case.get("requirements", ()):
                yield requirement, f"{VECTOR_TESTS[kind]}[{_escaped(name)}{number}]"


def _escaped(name: str) -> str:
    """Returns a name as pytest writes it in a test's id."""
    return name.encode("unicode_escape").decode()
