"""Tests that a run's processes start, are measured, and end with the run."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import stub_engine
from tests.support.processes import Processes, StartError, free_ports, http_get, require_free, tree_usage

BUSY_PARENT_AND_CHILD = """
import os, time
until = time.process_time() + 0.2
while time.process_time() < until: pass
if os.fork() == 0:
    until = time.process_time() + 0.2
    while time.process_time() < until: pass
    os._exit(0)
os.wait()
print("done", flush=True)
input()
"""


def stub_command(port: int) -> list[str]:
    return [sys.executable, stub_engine.__file__, "--decode", str(port)]


def test_what_a_run_started_ends_with_the_run(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with Processes(tmp_path) as processes:
        processes.start("stub", stub_command(port), ready=[f"http://127.0.0.1:{port}/health"])
        with pytest.raises(StartError, match=f"listens on 127.0.0.1 {port}"):
            require_free([port])
    require_free([port])


def test_it_ends_too_when_the_run_breaks_off(tmp_path: Path) -> None:
    (port,) = free_ports(1)

    def broken_off_run() -> None:
        with Processes(tmp_path) as processes:
            processes.start("stub", stub_command(port), ready=[f"http://127.0.0.1:{port}/health"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off_run()
    assert http_get(f"http://127.0.0.1:{port}/health")[0] == 0


def test_one_that_does_not_come_up_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such luck')"]
    with Processes(tmp_path) as processes, pytest.raises(StartError, match=r"(?s)status 1.*no such luck"):
        processes.start("broken", command, ready=["http://127.0.0.1:9/"])


def test_one_that_is_never_ready_is_given_up_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "input()"]
    with Processes(tmp_path) as processes, pytest.raises(StartError, match="is not ready"):
        processes.start("silent", command, ready=["http://127.0.0.1:9/"], ready_s=0.2)


def test_the_cpu_time_of_a_tree_includes_children_that_have_ended() -> None:
    command = [sys.executable, "-c", BUSY_PARENT_AND_CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        usage = tree_usage(process.pid)
        process.communicate(b"\n")
    assert usage.cpu_s >= 0.38
    assert usage.rss_mb > 1


def test_free_ports_can_be_bound_and_are_below_the_kernels_own() -> None:
    ports = free_ports(400)
    assert len(set(ports)) == 400, "no two are told the same"
    for port in ports:
        assert port < 32_768
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_a_process_that_is_gone_has_used_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert tree_usage(process.pid).rss_mb == 0
