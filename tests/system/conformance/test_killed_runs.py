"""Tests that a run which is ended, or does not end in time, leaves nothing behind."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvparams_conformance.program import descendants
from kvparams_conformance.store_suite import SuiteFailed, run_store_suite
from tests.support.waiting import wait_until
from tests.system.conformance.test_bad_proxies import command_line

STORE = """
import subprocess, sys, time
def factory(_):
    code = "import os, signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code, {mark!r}])
    open({mark!r}, "w").close()
    time.sleep(600)
"""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What names the processes of a store whose factory starts one that ignores SIGTERM, and never returns."""
    found = str(tmp_path / "started")
    (tmp_path / "stuck_store.py").write_text(STORE.format(mark=found))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return found


def left(mark: str) -> list[str]:
    """The command lines of processes that are named so."""
    return [line for pid in descendants(1) if mark in (line := command_line(pid)) and "-c" in line]


def test_a_store_suite_that_does_not_end_leaves_nothing(mark: str) -> None:
    with pytest.raises(SuiteFailed, match="did not end within 6 s"):
        run_store_suite("stuck_store:factory", 6.0)
    assert Path(mark).exists()
    assert left(mark) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_by_a_signal_leaves_nothing(number: signal.Signals, mark: str) -> None:
    command = [str(Path(sys.executable).with_name("kvparams")), "conformance", "store", "stuck_store:factory"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: Path(mark).exists() and left(mark), 60.0)
        process.send_signal(number)
        assert process.wait(30.0) != 0
    assert left(mark) == []
