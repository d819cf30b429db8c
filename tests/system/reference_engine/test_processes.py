"""Tests servers as child processes: none outlives its parent, however that ends, and leftovers are removed."""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from demo.folder import own_folder, remove_stale
from demo.processes import Processes

WAIT_MS = 20_000
PARENT = """
import subprocess, sys
from pathlib import Path
from demo.processes import Processes

folder = Path(sys.argv[1])
child = "import sys, time; open(sys.argv[1], 'w').close(); time.sleep(600)"
with Processes(folder) as processes:
    bound = processes.start("bound", sys.executable, "-c", child, str(folder / "bound"), port=1)
    free = subprocess.Popen([sys.executable, "-c", child, str(folder / "free")], stdout=subprocess.DEVNULL)
    print(bound.process.pid, free.pid, flush=True)
    sys.stdin.read()
"""


def ended(process: int, within_ms: int) -> bool:
    """Whether the process of this descriptor ends in time."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(within_ms))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_a_server_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """The control: a child that was started in the ordinary way stays."""
    for name in ("bound", "free"):
        os.mkfifo(tmp_path / name)
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        bound, free = (os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split())
        try:
            for name in ("bound", "free"):
                (tmp_path / name).read_text()  # returns when the child runs
            parent.kill()
            assert ended(bound, WAIT_MS)
            assert not ended(free, 0)
        finally:
            signal.pidfd_send_signal(free, signal.SIGKILL)
            os.close(bound)
            os.close(free)


def test_what_a_server_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    """As the engine of a vLLM that was told to end while it started."""
    os.mkfifo(tmp_path / "told")
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    leader = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', sys.argv[2]]); "
        "open(sys.argv[1], 'w').write(str(child.pid)); time.sleep(600)"
    )
    with Processes(tmp_path) as processes:
        processes.start("leader", sys.executable, "-c", leader, str(tmp_path / "told"), child, port=1)
        left = os.pidfd_open(int((tmp_path / "told").read_text()))
    try:
        assert ended(left, WAIT_MS)
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(left, signal.SIGKILL)
        os.close(left)


def test_a_folder_that_a_killed_demo_left_is_removed_and_a_living_one_is_not(tmp_path: Path) -> None:
    left = tmp_path / "kvparams-demo-left"
    other = tmp_path / "another-program"
    for path in (left, other):
        path.mkdir()
        (path / "store").write_bytes(b"large")
    with own_folder(tmp_path) as living:
        assert left.exists()  # made just now: its demo may be about to lock it
        remove_stale(tmp_path, young_s=-1)
        assert living.exists()
        assert not left.exists()
    assert not living.exists()
    assert (other / "store").exists()
