"""Tests when native code is used."""

import subprocess
import sys
from types import ModuleType

import pytest

from kvparams import native


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(("setting", "has"), [("", True), ("off", False), ("OFF", False)])
def test_the_environment_turns_it_off(setting: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPARAMS_NATIVE", setting)
    assert _run("from kvparams.native import NATIVE; print(NATIVE is not None)") == str(has)


def test_code_from_older_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVPARAMS_NATIVE", raising=False)
    old = ModuleType("kvparams.native._native")
    old.member_spans = None  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "kvparams.native._native", old)
    with pytest.warns(RuntimeWarning, match="older sources .*make native"):
        assert native._load() is None  # pyright: ignore[reportPrivateUsage]
