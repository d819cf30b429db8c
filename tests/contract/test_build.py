"""Tests the wheel: with native code for every version of Python where there is a compiler, and pure Python without."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kvparams.native import NATIVE

ROOT = Path(__file__).parents[2]
SAYS = "from kvparams.native import NATIVE; import kvparams; print(NATIVE is not None, kvparams.__file__)"


def wheel(into: Path, **environment: str) -> Path:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(into)]
    subprocess.run(build, cwd=ROOT, env=os.environ | environment, check=True, capture_output=True)
    (found,) = into.glob("*.whl")
    return found


def digests(folder: Path) -> dict[str, str]:
    """Returns the digest of each file by its name."""
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in folder.iterdir() if each.is_file()}


def installed(found: Path, into: Path, **environment: str) -> str:
    """Whether what is in the wheel has native code, as a process of its own finds it."""
    with zipfile.ZipFile(found) as file:
        file.extractall(into)
    run = subprocess.run(
        [sys.executable, "-c", SAYS],
        env=os.environ | {"PYTHONPATH": str(into)} | environment,
        cwd=into,
        check=True,
        capture_output=True,
        text=True,
    )
    said, where = run.stdout.split()
    assert Path(where).is_relative_to(into)
    return said


def test_a_wheel_has_native_code_for_all_versions(tmp_path: Path) -> None:
    found = wheel(tmp_path / "dist")
    assert "-cp311-abi3-" in found.name
    assert installed(found, tmp_path / "installed") == "True"
    assert installed(found, tmp_path / "installed", KVPARAMS_NATIVE="off") == "False"


@pytest.mark.parametrize("environment", [{"HATCH_BUILD_NO_HOOKS": "true"}, {"CC": "/nowhere/cc"}])
def test_without_a_compiler_a_wheel_is_pure(tmp_path: Path, environment: dict[str, str]) -> None:
    found = wheel(tmp_path / "dist", **environment)
    assert found.name.endswith("-py3-none-any.whl")
    assert installed(found, tmp_path / "installed") == "False"


@pytest.mark.skipif(os.environ.get("KVPARAMS_NATIVE") == "off", reason="asked to do without")
def test_the_files_of_the_live_page_are_released(tmp_path: Path) -> None:
    static = Path("kvparams_proxy/ui/static")
    wanted = {str(static / each.name) for each in (ROOT / "proxy" / static).iterdir()}
    assert str(static / "index.html") in wanted
    with zipfile.ZipFile(wheel(tmp_path / "wheel", HATCH_BUILD_NO_HOOKS="true")) as file:
        assert wanted <= set(file.namelist())
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path / "sdist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (found,) = (tmp_path / "sdist").glob("*.tar.gz")
    with tarfile.open(found) as file:
        names = file.getnames()
    assert {f"{found.name.removesuffix('.tar.gz')}/proxy/{each}" for each in wanted} <= set(names)


def test_what_is_tested_has_native_code() -> None:
    """Otherwise the other tests here say nothing of it. `tests/install_servers.sh` installs a compiler."""
    assert NATIVE is not None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_release_is_complete_and_can_be_repeated(tmp_path: Path) -> None:
    dist, again = tmp_path / "dist", tmp_path / "again"
    made = subprocess.run(["make", "dist", f"DIST={dist}"], cwd=ROOT, check=False, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-2000:]
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(again)], cwd=ROOT, check=True)
    first, second = digests(dist), digests(again)
    assert len(second) == 2
    assert second.items() <= first.items()
    pairs = [line.split() for line in (dist / "SHA256SUMS").read_text().splitlines()]
    sums = {name: digest for digest, name in pairs}
    assert sums == {name: digest for name, digest in first.items() if name != "SHA256SUMS"}
    bill = json.loads((dist / "kvparams.cdx.json").read_text())
    listed = {each["name"]: each["version"] for each in bill["components"]}
    assert bill["bomFormat"] == "CycloneDX"
    assert {"kvparams", "pydantic", "starlette", "uvloop"} <= listed.keys()
    assert "torch" not in listed
