"""Checks that public names have docstrings, and that first lines of docstrings are full sentences.

Packages are checked whole. In tests, only modules are.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = {
    "kvparams": ROOT / "kvparams",
    "kvparams_proxy": ROOT / "proxy" / "kvparams_proxy",
    "kvparams_connectors": ROOT / "connectors" / "kvparams_connectors",
    "kvparams_conformance": ROOT / "conformance" / "kvparams_conformance",
}
TESTS: Final = ROOT / "tests"
DOCUMENTED_SHARE: Final = 0.95
"""The least share of public classes and functions that have a docstring."""

BANNED_OPENINGS: Final = frozenset({
    "All", "Anything", "Everything", "How", "Nothing", "Of", "One", "So", "Some", "Such", "That", "Those", "What",
    "When", "Where", "Whether", "Which", "Who", "Whoever",
})  # fmt: skip
"""Words that begin a fragment or an inversion, such as "What an engine says." and "Whether it may retry."."""

TEST_OPENINGS: Final = frozenset({
    "Acts", "Answers", "Builds", "Changes", "Checks", "Chooses", "Classifies", "Compares", "Converts", "Creates",
    "Defines", "Draws", "Drives", "Feeds", "Finds", "Fuzzes", "Generates", "Holds", "Imports", "Joins", "Judges",
    "Leaves", "Makes", "Models", "Mutates", "Names", "Parses", "Provides", "Publishes", "Puts", "Records", "Relays",
    "Replaces", "Runs", "Scales", "Sends", "Serves", "Shows", "Simulates", "Starts", "Takes", "Talks", "Tests",
    "Trains", "Uses", "Waits", "Writes",
})  # fmt: skip
"""Verbs that begin the docstring of a module of tests, whose subject is the module. Another verb may be added."""

FRAGMENTS: Final = '''
"""What a module is about.

The one rule: it is short.
"""
def no_stop() -> None:
    """Returns a value"""
def goes_on() -> None:
    """Returns a value that is described over
    two lines."""
class Undocumented:
    """Holds a value."""
    def method(self) -> None: ...
    def _private(self) -> None: ...
'''
"""A module that breaks each of the rules."""


class Docstring(NamedTuple):
    """A `Docstring` is the docstring of a module, class or function, or None where it has none."""

    name: str
    is_public: bool
    text: str | None

    @property
    def first_line(self) -> str:
        """Returns the first line, or an empty text."""
        return (self.text or "").strip().partition("\n")[0]


def docstrings(tree: ast.Module, name: str) -> Iterator[Docstring]:
    """Yields the docstrings of a module and of all its classes and functions; nested functions are not public."""
    yield Docstring(name, False, ast.get_docstring(tree))
    yield from _inner_docstrings(tree, name, True)


def _inner_docstrings(parent: ast.AST, name: str, is_public: bool) -> Iterator[Docstring]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner, is_open = f"{name}.{node.name}", is_public and not node.name.startswith("_")
            yield Docstring(inner, is_open, ast.get_docstring(node))
            yield from _inner_docstrings(node, inner, is_open and isinstance(node, ast.ClassDef))
        else:
            yield from _inner_docstrings(node, name, is_public)


def package_modules(package: str) -> dict[str, list[Docstring]]:
    """Returns the docstrings of each module of a package that is not empty; the first is the module's own."""
    folder = PACKAGES[package]
    sources = {path.relative_to(folder.parent).as_posix(): path.read_text() for path in sorted(folder.rglob("*.py"))}
    return {name: list(docstrings(ast.parse(source), name)) for name, source in sources.items() if source}


def modules_of_tests() -> list[Docstring]:
    """Returns the docstrings of all modules of tests; an empty module needs none."""
    found: list[Docstring] = []
    for path in sorted(TESTS.rglob("*.py")):
        if source := path.read_text():
            name = path.relative_to(ROOT).as_posix()
            found.append(Docstring(name, True, ast.get_docstring(ast.parse(source))))
    return found


def undocumented(found: list[Docstring]) -> list[str]:
    """Returns the names of public classes and functions without a docstring."""
    return [each.name for each in found if each.is_public and each.text is None]


def fragments(found: list[Docstring]) -> list[str]:
    """Returns the names and first lines of the docstrings that do not begin with a full sentence."""
    return [
        f"{each.name}: {each.first_line}"
        for each in found
        if each.text
        and (not each.first_line.endswith(".") or each.first_line.rstrip(".").split(maxsplit=1)[0] in BANNED_OPENINGS)
    ]


def fragments_of_tests(found: list[Docstring]) -> list[str]:
    """Returns the names of modules of tests whose docstrings do not begin with a verb of `TEST_OPENINGS`."""
    return [
        each.name
        for each in found
        if each.text and each.first_line.split(maxsplit=1)[0].rstrip(",") not in TEST_OPENINGS
    ]


def slogans(found: list[Docstring]) -> list[str]:
    """Returns the names whose docstrings have the slogan "The one rule"."""
    return [each.name for each in found if "the one rule" in " ".join((each.text or "").lower().split())]


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_are_there_and_begin_with_full_sentences(package: str) -> None:
    modules = package_modules(package)
    assert not [name for name, found in modules.items() if not found[0].text], "these modules have no docstring"
    every = [each for found in modules.values() for each in found]
    public = sum(each.is_public for each in every)
    assert public > 100
    missing = undocumented(every)
    assert len(missing) <= (1 - DOCUMENTED_SHARE) * public, missing
    assert not fragments(every)
    assert not slogans(every)


def test_modules_of_tests_begin_with_full_sentences() -> None:
    found = modules_of_tests()
    assert len(found) > 400
    assert not undocumented(found)
    assert not fragments(found)
    assert not fragments_of_tests(found)
    assert not slogans(found)


@pytest.mark.parametrize(
    ("text", "findings"),
    [
        ("Tests that a value is returned.", []),
        ("Starts, watches and stops processes.", []),
        ("Tests that a value is returned", ["fragments"]),
        ("Tests that a value is returned\nby a function.", ["fragments"]),
        ("What a function returns.", ["fragments", "fragments_of_tests"]),
        ("Fixtures of the tests of stores.", ["fragments_of_tests"]),
        ("Tests values.\n\nThe one\nrule: each is returned.", ["slogans"]),
    ],
)
def test_a_module_of_tests_that_breaks_a_rule_is_found(text: str, findings: list[str]) -> None:
    found = [Docstring("made_up", True, text)]
    rules = (undocumented, fragments, fragments_of_tests, slogans)
    assert [rule.__name__ for rule in rules if rule(found)] == findings
    assert undocumented([Docstring("made_up", True, None)])


def test_a_module_that_breaks_the_rules_is_found() -> None:
    found = list(docstrings(ast.parse(FRAGMENTS), "made_up"))
    assert [line.partition(":")[0] for line in fragments(found)] == ["made_up", "made_up.no_stop", "made_up.goes_on"]
    assert slogans(found) == ["made_up"]
    assert undocumented(found) == ["made_up.Undocumented.method"]
    fixed = FRAGMENTS.replace("What a module is about.", "The module returns values.").replace("The one rule: it", "It")
    assert not slogans(list(docstrings(ast.parse(fixed), "made_up")))
    assert len(fragments(list(docstrings(ast.parse(fixed), "made_up")))) == 2
