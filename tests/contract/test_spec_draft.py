"""Checks that `spec/draft` keeps the requirements of 1.0 and adds sections, and that what it names exists.

The sections that 1.0 does not have are numbered like the others, and stand in the profiles.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.kvparams.spec_folder import ROOT, SPEC

DRAFT = ROOT / "spec" / "draft"
PAGES = ("spec.md", "engine.md", "store.md", "proxy.md", "store-proxy.md", "errata.md")
ADDED = ("17", "18", "19")
"""The sections that the draft has and 1.0 does not."""
KEYWORD = re.compile(r"\b(?:MUST|SHOULD)(?: NOT)?\b|\bMAY\b")
CITED_VECTOR = re.compile(r'`([a-z0-9/_-]+\.json)`, "([^"]+)"')


def normative_keywords(text: str) -> dict[str, list[str]]:
    """Returns the RFC 2119 keywords of each requirement, and of the other sentences of each section that has any."""
    found: dict[str, list[str]] = {}
    section = number = ""
    for line in text.splitlines():
        if heading := re.match(r"## (\d+)\. ", line):
            section = f"section {heading[1]}"
        if requirement := re.match(r"- \*\*[a-z0-9.]+#(\d+\.\d+)\*\* ", line):
            number = requirement[1]
            found[number] = []
        elif not line.startswith("  "):  # an indented line continues its requirement
            number = ""
        if words := KEYWORD.findall(line):
            found.setdefault(number or section, []).extend(words)
    return {name: sorted(words) for name, words in found.items()}


def changed_requirements(draft: Path, released: Path) -> list[str]:
    """Returns the requirements that only one of two folders has, and those with other keywords."""
    here, there = (normative_keywords((folder / "spec.md").read_text()) for folder in (draft, released))
    names = {name for name in here if not in_added_section(name)} | there.keys()
    return sorted(name for name in names if here.get(name) != there.get(name))


def in_added_section(name: str) -> bool:
    """Returns whether a requirement, or a section, is one that 1.0 does not have."""
    return name.removeprefix("section ").partition(".")[0] in ADDED


def unnumbered(text: str) -> list[str]:
    """Returns the lines of the added sections with a MUST outside a numbered requirement."""
    added = text[text.index(f"## {ADDED[0]}. ") :]
    return [line for line in added.splitlines() if re.search(r"\bMUST\b", line) and not line.startswith("- **draft#")]


def errata_without_target(draft: Path, released: Path) -> list[str]:
    """Returns the errata of no requirement, and the vectors in them that do not exist."""
    text = (draft / "errata.md").read_text()
    numbers = re.findall(r"^## (\S+) ", text, re.MULTILINE)
    cited = CITED_VECTOR.findall(text)
    assert numbers
    assert cited
    known = normative_keywords((released / "spec.md").read_text())
    cases = {
        (path.relative_to(released / "vectors").as_posix(), case["name"])
        for path in (released / "vectors").rglob("*.json")
        for case in json.loads(path.read_bytes())["cases"]
    }
    return [*(one for one in numbers if one not in known), *(f"{file}: {name}" for file, name in {*cited} - cases)]


def broken_links(folder: Path) -> list[str]:
    """Returns the links in the pages of a folder that lead to no file, or to no heading of it."""
    broken: list[str] = []
    for page in sorted(folder.glob("*.md")):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if not target.exists() or (anchor and anchor not in heading_anchors(target)):
                broken.append(f"{page.name}: {link}")
    return broken


def heading_anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the draft and of the release beside it."""
    for folder in (DRAFT, SPEC):
        shutil.copytree(folder, tmp_path / folder.name)
    return tmp_path / DRAFT.name, tmp_path / SPEC.name


def edit(page: Path, before: str, after: str) -> None:
    text = page.read_text()
    assert before in text
    page.write_text(text.replace(before, after, 1))


def test_the_draft_has_the_requirements_and_the_keywords_of_the_release() -> None:
    assert changed_requirements(DRAFT, SPEC) == []


def test_every_must_of_an_added_section_has_a_number_in_order() -> None:
    text = (DRAFT / "spec.md").read_text()
    assert unnumbered(text) == []
    assert unnumbered(text + "A reader MUST.\n") == ["A reader MUST."]
    numbers = [one for one in normative_keywords(text) if in_added_section(one) and "." in one]
    sections = {section: [one for one in numbers if one.startswith(f"{section}.")] for section in ADDED}
    for section, found in sections.items():
        assert found == [f"{section}.{number}" for number in range(1, len(found) + 1)], section
        assert len(found) >= 5


def test_each_erratum_names_a_requirement_and_its_vectors() -> None:
    assert errata_without_target(DRAFT, SPEC) == []


def test_every_link_of_the_draft_resolves() -> None:
    assert {page.name for page in DRAFT.glob("*.md")} == {*PAGES}
    assert broken_links(DRAFT) == []


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("- **draft#3.11** ", "- **draft#3.99** ", ["3.11", "3.99"]),
        ("- **draft#3.11** ", "- ", ["3.11", "section 3"]),
        ("A reader MUST NOT derive an address", "A reader MUST derive an address", ["3.11"]),
        ("A reader MUST NOT derive an address", "A reader SHOULD NOT derive an address", ["3.11"]),
        ("after 1,000 problems it MAY stop", "after 1,000 problems it stops", ["7.1"]),
        ("A proxy SHOULD ask again", "A proxy asks again", ["section 6"]),
    ],
)
def test_a_changed_requirement_is_noticed(
    folders: tuple[Path, Path], before: str, after: str, found: list[str]
) -> None:
    """Negative control."""
    edit(folders[0] / "spec.md", before, after)
    assert changed_requirements(*folders) == found


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("## 13.14 ", "## 13.99 ", ["13.99"]),
        ('"the prompt\'s ids: others"', '"no such vector"', ["signatures.json: no such vector"]),
    ],
)
def test_an_erratum_without_a_target_is_noticed(
    folders: tuple[Path, Path], before: str, after: str, found: list[str]
) -> None:
    """Negative control."""
    edit(folders[0] / "errata.md", before, after)
    assert errata_without_target(*folders) == found


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("(../1.0/schema.json)", "(../1.0/none.json)", ["spec.md: ../1.0/none.json"]),
        ("(errata.md#145-levels-of-a-cache)", "(errata.md#none)", ["spec.md: errata.md#none"]),
    ],
)
def test_a_broken_link_is_noticed(folders: tuple[Path, Path], before: str, after: str, found: list[str]) -> None:
    """Negative control."""
    edit(folders[0] / "spec.md", before, after)
    assert broken_links(folders[0]) == found
