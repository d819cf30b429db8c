"""Checks who imports whom, and what the documents about the layers say.

The contracts are in pyproject.toml.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = {
    "kvparams": ROOT / "kvparams",
    "kvparams_proxy": ROOT / "proxy" / "kvparams_proxy",
    "kvparams_connectors": ROOT / "connectors" / "kvparams_connectors",
    "kvparams_conformance": ROOT / "conformance" / "kvparams_conformance",
}


class ForbiddenImport(NamedTuple):
    """An import that breaks one contract."""

    module: str
    source: str


FORBIDDEN: Final = {
    "packages": ForbiddenImport("kvparams_connectors/store.py", "import kvparams_proxy.secret"),
    "kvparams": ForbiddenImport("kvparams/tokens.py", "from kvparams import cli"),
    "proxy": ForbiddenImport(
        "kvparams_proxy/secret.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvparams_proxy.server.app import create_app",
    ),
    "fleet": ForbiddenImport("kvparams_proxy/fleet/fleet.py", "import kvparams_proxy.fleet.registry.registry"),
    "connectors": ForbiddenImport("kvparams_connectors/arena.py", "import kvparams_connectors.stores.extents"),
    "conformance": ForbiddenImport("kvparams_conformance/checks.py", "import kvparams_conformance.site"),
    "named-stores": ForbiddenImport(
        "kvparams_connectors/cli/doctor_command.py", "import kvparams_connectors.stores.file.store"
    ),
    "cycles": ForbiddenImport("kvparams/jsontext/scanner.py", "import kvparams.jsontext.document"),
    "no-io": ForbiddenImport("kvparams/keys.py", "def connect() -> None:\n    import socket"),
    "no-arrays": ForbiddenImport("kvparams_proxy/upstream/types.py", "import torch"),
    "users": ForbiddenImport("kvparams_proxy/tls.py", "import tests"),
}
"""One import for each contract, some of them where they are easily overlooked: in a function, for types only."""

OPTIONAL: Final = {
    "kvparams": {"numpy", "msgspec", "cryptography", "zmq"},
    "kvparams_proxy": {"numpy", "msgspec", "tokenizers", "jinja2", "zmq", "opentelemetry", "aio_pika"},
    "kvparams_connectors": {"torch", "cryptography", "mooncake", "valkey", "lmcache", "vllm", "sglang", "matplotlib"},
    "kvparams_conformance": {"pytest", "numpy", "starlette", "torch"},
}
"""Libraries that come with an extra. Without them the entry modules below are imported all the same."""
ENTRY_MODULES: Final = {
    "kvparams": ("kvparams.cli", "kvparams.routing.managers.factory", "kvparams.dialects.registry"),
    "kvparams_proxy": ("kvparams_proxy.cli.proxy_command", "kvparams_proxy.server.app"),
    "kvparams_connectors": ("kvparams_connectors.store", "kvparams_connectors.stores.file.store"),
    "kvparams_conformance": ("kvparams_conformance.cli.conformance_command", "kvparams_conformance.reports.files"),
}


def contracts() -> dict[str, str]:
    """Returns the names of all contracts by their id."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        tool = tomllib.load(file)["tool"]
    return {each["id"]: each["name"] for each in tool["importlinter"]["contracts"]}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Checks the contracts for the packages that are importable from `folder`."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    environment = {**os.environ, "COLUMNS": "300"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


def test_every_contract_is_kept() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_forbidden_import_breaks_its_contract(tmp_path: Path) -> None:
    """The control: a copy of the packages with one wrong import for each contract."""
    assert FORBIDDEN.keys() == contracts().keys()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, folder in LAYERS.items():
        shutil.copytree(folder, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for module, source in FORBIDDEN.values():
        with (tmp_path / module).open("a") as file:
            file.write(f"\n\n{source}\n")
    done = lint(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    for name in contracts().values():
        assert re.search(rf"^{re.escape(name)} BROKEN", done.stdout, re.MULTILINE), f"{name}\n{done.stdout}"


@pytest.mark.parametrize("package", LAYERS)
def test_optional_libraries_are_not_needed_to_import(package: str) -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(OPTIONAL[package])}));"
        f"import importlib; [importlib.import_module(name) for name in {ENTRY_MODULES[package]}]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_architecture_fits_a_few_screens_and_names_what_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(text.splitlines()) <= 150
    paths = re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py|[a-z_]+/[a-z_/]+)`", text)
    assert len(paths) > 10
    files = [path for path in ROOT.rglob("*") if path.suffix == ".py" or path.is_dir()]
    for named in paths:
        assert any(str(path).endswith(f"/{named}") for path in files), named
