"""Provides the commands that start the proxies which the conformance kit is run on."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.conformance.runs import ENGINES

ROOT = Path(__file__).parents[3]
REFERENCE = ROOT / "spec" / "reference"


@pytest.fixture(scope="session")
def ours() -> str:
    """The command that starts this project's proxy; options follow."""
    return f"{Path(sys.executable).with_name('kvparams')} proxy --port {{port}}"


@pytest.fixture(scope="session")
def node_proxy() -> str:
    """The command that starts the reference proxy in JavaScript."""
    node = shutil.which("node")
    assert node is not None, "Node is missing, 20 or later: run `make servers`, or install the package nodejs"
    return f"{node} {REFERENCE / 'node' / 'store_proxy.mjs'} --port {{port}} {ENGINES}"


@pytest.fixture(scope="session")
def go_proxy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The command that starts the reference proxy in Go, built for this session."""
    go = shutil.which("go")
    assert go is not None, "Go is missing, 1.19 or later: run `make servers`, or install the package golang-go"
    program = tmp_path_factory.mktemp("go") / "store_proxy"
    environment = {"GOPROXY": "off", "GOCACHE": str(program.parent / "cache"), "HOME": str(program.parent)}
    command = [go, "build", "-o", str(program), "."]
    built = subprocess.run(
        command,
        cwd=REFERENCE / "go",
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert built.returncode == 0, built.stderr
    return f"{program} -port {{port}} {ENGINES.replace('--', '-')}"
