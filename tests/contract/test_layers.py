"""The layering rule of ARCHITECTURE.md, held: who may import whom."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = {
    "kvparams": ROOT / "kvparams",
    "kvparams_proxy": ROOT / "proxy" / "kvparams_proxy",
    "kvparams_connectors": ROOT / "connectors" / "kvparams_connectors",
}
FORBIDDEN = {
    "kvparams": {
        *("kvparams_proxy", "kvparams_connectors", "reference_engine", "demo", "benchmarks", "tests"),
        *("torch", "numpy", "httpx", "starlette", "uvicorn", "socket", "asyncio", "threading", "subprocess", "mmap"),
    },
    "kvparams_proxy": {"kvparams_connectors", "reference_engine", "demo", "benchmarks", "tests", "torch", "numpy"},
    "kvparams_connectors": {"kvparams_proxy", "reference_engine", "demo", "benchmarks", "tests"},
}
NUMPY = ROOT / "kvparams" / "index"
"""The one folder of the ground that computes with arrays, in memory of its own; nothing else there imports these."""


def imported(source: str) -> set[str]:
    """The top-level names that a module imports anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_what_lies_below_it(layer: str) -> None:
    modules = sorted(LAYERS[layer].rglob("*.py"))
    assert len(modules) > 5
    for module in modules:
        allowed = {"numpy", "mmap"} if module.is_relative_to(NUMPY) else set[str]()
        assert not imported(module.read_text()) & (FORBIDDEN[layer] - allowed), module


def test_the_check_sees_an_import_wherever_it_hides() -> None:
    """The control: an import inside a function counts."""
    assert "kvparams_connectors" in imported("def f():\n    from kvparams_connectors.store import KVStore\n")


def test_the_architecture_fits_a_few_screens_and_names_what_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.splitlines()) <= 150
    paths = re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py|[a-z_]+/[a-z_/]+)`", text)
    assert len(paths) > 10
    files = [path for path in ROOT.rglob("*") if path.suffix == ".py" or path.is_dir()]
    for named in paths:
        assert any(str(path).endswith(f"/{named}") for path in files), named


def test_every_module_says_what_it_is_for() -> None:
    for folder in LAYERS.values():
        for module in folder.rglob("*.py"):
            source = module.read_text()
            assert not source or ast.get_docstring(ast.parse(source)), f"{module} has no docstring"
