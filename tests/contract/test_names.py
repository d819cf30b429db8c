"""Checks that no class name is used twice in the three packages."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    ROOT / "kvparams",
    ROOT / "proxy" / "kvparams_proxy",
    ROOT / "connectors" / "kvparams_connectors",
    ROOT / "conformance" / "kvparams_conformance",
)


def class_names(source: str) -> Iterator[str]:
    """The names of all classes that a module defines, at its top or in anything."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield node.name


def test_no_class_name_is_defined_twice() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for module in sorted(package.rglob("*.py")):
            for name in class_names(module.read_text()):
                places[name].append(str(module.relative_to(ROOT)))
    assert len(places) > 500
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_the_check_sees_classes_wherever_they_are() -> None:
    """The control: classes in functions, in branches and in other classes count."""
    source = "class A:\n class B: pass\nif True:\n class C: pass\ndef f():\n class D: pass\n"
    assert sorted(class_names(source)) == ["A", "B", "C", "D"]
