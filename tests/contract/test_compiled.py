"""Tests a wheel with compiled modules.

Compiled modules are the same modules, a wheel has them only on request, and the tests pass on them.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hatch_build import CompilingHook, compiled

ROOT = Path(__file__).parents[2]
SWITCH = {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true"}
pytestmark = pytest.mark.filterwarnings("default")  # build tools warn of what is to come, and are nobody's pins
SEEN = "test_an_unknown_id_takes_the_same_steps_as_a_wrong_secret"
"""It has the interpreter tell every call: of compiled code that is nobody's to tell."""
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("Cython") is None
    or shutil.which("cc") is None
    or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="no Cython, no C compiler, or no Python.h",
)


class Said:
    """hatchling's `Application`, as far as the hook uses it."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, message: str) -> None:
        self.warnings.append(message)


def built(version: str) -> tuple[dict[str, Any], list[str]]:
    """What the hook adds to a wheel of one module, and what it says."""
    said = Said()
    app: Any = said
    metadata: Any = None
    hook = CompilingHook(str(ROOT), {"modules": ["kvparams/routing/retries.py"]}, None, metadata, "", "wheel", app)
    data: dict[str, Any] = {"pure_python": True, "infer_tag": False, "force_include": {}}
    hook.initialize(version, data)
    hook.finalize(version, data, "")
    return data, said.warnings


@pytest.fixture
def fast_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler optimizes nothing, which takes most of its time."""
    monkeypatch.setenv("CFLAGS", "-O0")


@needs_compiler
@pytest.mark.usefixtures("fast_compiler")
def test_a_module_is_compiled_as_it_stands(tmp_path: Path) -> None:
    (path,) = compiled(ROOT, ["kvparams/routing/retries.py"], tmp_path / "into")
    assert (path.parent.name, path.suffix) in {("routing", ".so"), ("routing", ".pyd")}
    assert not (ROOT / "kvparams" / "routing" / "retries.c").exists()
    spec = importlib.util.spec_from_file_location("kvparams.routing.retries", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    budget = module.RetryBudget(ratio=0.5, most=1.0)
    assert [budget.try_acquire(), budget.try_acquire()] == [True, False]
    budget.record_request()
    budget.record_request()
    assert budget.try_acquire()


@needs_compiler
@pytest.mark.usefixtures("fast_compiler")
def test_a_wheel_with_compiled_modules_is_one_of_a_platform() -> None:
    data, warnings = built("standard")
    assert not warnings
    assert (data["pure_python"], data["infer_tag"]) == (False, True)
    ((source, place),) = data["force_include"].items()
    assert place.startswith("kvparams/routing/retries.")
    assert not Path(source).exists(), "nothing is left where it was compiled"


def test_without_a_compiler_the_wheel_is_everybodys_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CC", "LDSHARED"):
        monkeypatch.setenv(name, "/no/such/compiler")
    data, warnings = built("standard")
    assert data == {"pure_python": True, "infer_tag": False, "force_include": {}}
    (warning,) = warnings
    assert warning.startswith("kvparams is built without compiled modules: ")


def test_an_editable_install_is_of_sources() -> None:
    data, warnings = built("editable")
    assert data == {"pure_python": True, "infer_tag": False, "force_include": {}}
    assert not warnings


def test_the_modules_that_are_named_exist() -> None:
    hooks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
    assert hooks["custom"]["enable-by-default"] is False
    for pattern in hooks["custom"]["modules"]:
        assert list(ROOT.glob(pattern)), pattern


@needs_compiler
@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_protocol_and_the_proxy_are_the_same_compiled(tmp_path: Path) -> None:
    """Their tests, in a whole wheel."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, env=os.environ | SWITCH, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "none-any" not in wheel.name
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "installed")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    modules = "kvparams.routing.request_lifecycle as a, kvparams_proxy.execution.executor as b"
    asked = f"import {modules}; print(a.__file__, b.__file__)"
    said = subprocess.run([sys.executable, "-c", asked], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert [Path(path).suffix for path in said.stdout.split()] == [".so", ".so"], said
    pytest_script = Path(sys.executable).with_name("pytest")  # `-m pytest` would find the sources first
    folders = [f"tests/{kind}/{package}" for kind in ("unit", "system") for package in ("kvparams", "proxy")]
    seen = f"tests/system/proxy/requests/test_authentication.py::{SEEN}"
    tests = [*folders, "tests/contract", "tests/system/differential", "--deselect", seen]
    run = [str(pytest_script), "-q", "-m", "not slow", "-n", "2", "-p", "no:cacheprovider", *tests]
    subprocess.run(run, cwd=ROOT, env=environment, check=True)
