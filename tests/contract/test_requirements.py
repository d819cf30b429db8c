"""Checks that every MUST of spec.md has a number, and that a test names every number, and no other.

A test names a requirement in its docstring, a vector in `requirements`. For tests elsewhere, `SHOWN` names them.
"""

import ast
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.support.kvparams.spec_folder import ROOT, SPEC, VECTORS

TEXT = (SPEC / "spec.md").read_text()
NUMBER = r"[a-z0-9.]+#\d+\.\d+"
PAGES = ("engine.md", "store.md", "proxy.md")
SHOWN = {
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
    "1.0#10.3": "connectors/kvparams_connectors/conformance/levels.py::test_the_longest_and_oddest_keys_work",
    "1.0#12.1": "tests/unit/proxy/requests/test_forbidden_fields.py::"
    "test_no_client_makes_an_engine_go_anywhere_or_load_anything_that_the_proxy_has_not_chosen",
    "1.0#12.2": "tests/unit/proxy/execution/test_corrections.py::test_cached_tokens_become_prefills_and_params_go",
    "1.0#12.5": "tests/system/conformance/test_shown.py::test_salts_keys_and_ids_of_engines_stand_in_no_log",
}
"""Tests that show a requirement and do not name it."""
UNSHOWN = {
    "1.0#16.4": "of proxies: nothing here answers a request",
    "1.0#16.5": "of proxies: nothing here makes a seed or answers a client",
}
"""What cannot be shown here, with the reason."""


def requirements(text: str) -> list[str]:
    """The numbers of a text's requirements, in its order."""
    return re.findall(rf"^- \*\*({NUMBER})\*\* ", text, re.MULTILINE)


def docstrings(source: str) -> dict[str, str]:
    """The tests in a Python file, and what their docstrings say."""
    functions = (one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    return {one.name: ast.get_docstring(one) or "" for one in functions if one.name.startswith("test_")}


def named_in_tests() -> set[str]:
    """The numbers that tests and vectors name."""
    named: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        source = path.read_text()
        if path != Path(__file__) and re.search(NUMBER, source):
            named |= {number for said in docstrings(source).values() for number in re.findall(NUMBER, said)}
    for path in VECTORS.rglob("*.json"):
        for case in json.loads(path.read_bytes())["cases"]:
            named |= set(case.get("requirements", ()))
    return named


def untied(
    wanted: Iterable[str], named: set[str], shown: Mapping[str, str], unshown: Mapping[str, str]
) -> dict[str, list[str]]:
    """What does not fit together."""
    wanted = list(wanted)
    ties = {"named": named, "shown": {*shown}, "unshown": {*unshown}}
    return {
        "has no test": [one for one in wanted if not any(one in tie for tie in ties.values())],
        "is no requirement": sorted({one for tie in ties.values() for one in tie} - set(wanted)),
        "has a test and a reason why not": sorted({*unshown} & (named | {*shown})),
    }


def test_every_requirement_has_a_test_and_every_test_a_requirement() -> None:
    found = untied(requirements(TEXT), named_in_tests(), SHOWN, UNSHOWN)
    assert found == {"has no test": [], "is no requirement": [], "has a test and a reason why not": []}


@pytest.mark.parametrize("place", sorted(set(SHOWN.values())))
def test_what_shows_a_requirement_is_there(place: str) -> None:
    path, _, name = place.partition("::")
    assert name in docstrings((ROOT / path).read_text())


def test_what_is_not_tied_is_noticed() -> None:
    """Negative control, in both directions."""
    wanted = requirements("- **v#1.1** A MUST.\n- **v#1.2** B MUST.\n- **v#1.3** C MUST.\ntext **v#1.4**\n")
    assert wanted == ["v#1.1", "v#1.2", "v#1.3"]
    named = set(
        re.findall(NUMBER, " ".join(docstrings('def test_a():\n    """See v#1.1, v#2.1."""\nX = "v#1.2"').values()))
    )
    assert untied(wanted, named, {"v#1.2": "", "v#3.1": ""}, {"v#1.1": ""}) == {
        "has no test": ["v#1.3"],
        "is no requirement": ["v#2.1", "v#3.1"],
        "has a test and a reason why not": ["v#1.1"],
    }


def test_what_a_document_may_hold_is_shown_by_what_is_valid_and_by_what_is_not() -> None:
    """Each requirement by which documents, carriers and trios are told apart has vectors of both kinds."""
    seen: dict[bool, set[str]] = {True: set(), False: set()}
    for path in VECTORS.glob("*.json"):
        content = json.loads(path.read_bytes())
        for case in content["cases"] if content["kind"] in ("document", "carrier", "trio") else ():
            seen[case["valid"]] |= {one.partition("#")[2] for one in case["requirements"]}
    both = {"2.1", "3.1", "3.2", "3.3", "3.4", "3.5", "3.12", "5.4", "5.5", "5.6", "5.7", "8.1", "8.2", "8.3", "8.4"}
    assert both | {"9.1", "9.2", "9.3"} <= seen[True] & seen[False]


def test_requirements_are_numbered_in_order() -> None:
    sections = [int(number) for number in re.findall(r"^## (\d+)\. ", TEXT, re.MULTILINE)]
    assert sections == list(range(1, len(sections) + 1))
    numbers = [tuple(map(int, requirement.partition("#")[2].split("."))) for requirement in requirements(TEXT)]
    assert numbers == sorted(set(numbers))
    for section in {section for section, _ in numbers}:
        own = [number for found, number in numbers if found == section]
        assert own == list(range(1, len(own) + 1))
        text = TEXT.split(f"\n## {section}. ")[1].split("\n## ")[0]
        assert [f"{section}.{number}" for number in own] == [one.partition("#")[2] for one in requirements(text)]


def test_every_must_has_a_number_and_every_number_a_must() -> None:
    """RFC 2119 words stand nowhere but in numbered sentences, apart from the sentence that introduces them."""
    for line in TEXT.splitlines():
        has_must = re.search(r"\bMUST\b", line) is not None
        numbered = line.startswith("- **") and requirements(line) != []
        introduction = line.startswith(("The words MUST", "Every sentence with a MUST", "`vectors/` holds"))
        assert has_must == (numbered or introduction), line


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_requirements_that_are_there_and_makes_none(name: str) -> None:
    page = (SPEC / name).read_text()
    named = set(re.findall(NUMBER, page))
    assert len(named) > 5
    assert named <= set(requirements(TEXT))
    assert re.search(r"\b(?:MUST|SHALL|SHOULD)\b", page) is None
    assert len(page.splitlines()) <= 150


@pytest.mark.parametrize("name", ["spec.md", *PAGES])
def test_every_sentence_has_a_line_of_its_own_and_each_file_that_is_named_is_there(name: str) -> None:
    page = re.sub(r"^```.*?^```$", "", (SPEC / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    for line in page.splitlines():
        assert line.startswith(("- ", "|", "  ")) or re.search(r"[a-z`)]\. [A-Z]", line) is None, line
    for file in re.findall(r"`((?:vectors/)?[A-Za-z_]+\.(?:md|json))`", page):
        assert (SPEC / file).exists() or (VECTORS / file).exists(), file
