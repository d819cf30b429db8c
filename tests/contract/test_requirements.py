"""Checks that every MUST of spec.md has a number, and that a test names every number, and no other.

`tests.support.kvparams.requirement_binding` says how a test names a requirement. That the named tests check it is shown
by mutants (`tests/system/requirements`).
"""

import json
import re
from collections.abc import Iterable, Mapping

import pytest

from tests.support.kvparams.requirement_binding import (
    NUMBER,
    SHOWN,
    UNSHOWN,
    docstrings,
    named_in_tests,
    requirements,
)
from tests.support.kvparams.spec_folder import ROOT, SPEC, VECTORS

TEXT = (SPEC / "spec.md").read_text()
PAGES = ("engine.md", "store.md", "proxy.md")


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
    path, *classes, name = place.split("::")
    source = (ROOT / path).read_text()
    if classes:  # a test that a class inherits from the conformance suite of stores
        assert f"class {classes[0]}(StoreConformance):" in source
        source = (ROOT / "connectors/kvparams_connectors/conformance/levels.py").read_text()
    assert name in docstrings(source)


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
