"""Tests the file store between real processes that are killed at any moment: no wrong byte, and no lost space."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from kvparams_connectors.store import GetOp, PutOp, ResultCode
from kvparams_connectors.stores.file.store import FileStore

WORKER = Path(__file__).parents[3] / "support" / "connectors" / "crash_worker.py"
DEADLINE_S = 20.0


def start(*arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, str(WORKER), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def workers() -> Iterator[list["subprocess.Popen[str]"]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for worker in started:
        worker.kill()
        worker.communicate(timeout=DEADLINE_S)


def step_through(path: Path, stride: int) -> tuple[int, int]:
    worker = start("steps", path, stride)
    out, err = worker.communicate(timeout=100)
    assert (worker.returncode, err) == (0, "")
    steps, repairs = map(int, out.split())
    return steps, repairs


@pytest.mark.slow
def test_a_process_may_die_at_many_lines_of_the_index(tmp_path: Path) -> None:
    steps, repairs = step_through(tmp_path / "store", stride=11)
    assert steps > 400
    assert repairs > 20  # the control: many deaths did leave something to repair


@pytest.mark.slow
def test_a_process_may_die_at_every_line_of_the_index(tmp_path: Path) -> None:
    steps, repairs = step_through(tmp_path / "store", stride=1)
    assert steps > 400
    assert repairs > 200


def await_ready(worker: "subprocess.Popen[str]") -> None:
    assert worker.stdout is not None
    if worker.stdout.readline() != "ready\n":
        pytest.fail(f"a worker ended by itself: {worker.communicate(timeout=DEADLINE_S)[1]}")


def kill_in_a_loop(path: Path, workers: list["subprocess.Popen[str]"], *, kills: int) -> None:
    """Three workers; one after the other is killed at a random moment and replaced."""
    FileStore(path, 1 << 20, unit_bytes=4096).close()
    random = Random(kills)
    workers.extend(start("loop", path, seed) for seed in range(3))
    for number in range(kills):
        victim = workers[number % 3]
        await_ready(victim)
        with pytest.raises(subprocess.TimeoutExpired):  # it works until it is killed
            victim.wait(random.uniform(0.0, 0.1))
        victim.send_signal(signal.SIGKILL)
        _, err = victim.communicate(timeout=DEADLINE_S)
        assert (victim.returncode, err) == (-signal.SIGKILL, "")
        workers[number % 3] = start("loop", path, 1000 + number)
    for worker in workers:
        await_ready(worker)
        worker.kill()
        worker.communicate(timeout=DEADLINE_S)
    store = FileStore(path)
    keys = [f"key-{number}" for number in range(60)]
    store.delete(keys, DEADLINE_S).result()
    whole = memoryview(bytearray(store.capabilities.max_value_bytes))
    whole[:] = b"\x5a" * len(whole)
    assert store.put([PutOp("whole", (whole,))], DEADLINE_S).result()[0].code is ResultCode.OK  # all room is there
    target = memoryview(bytearray(len(whole)))
    assert store.get([GetOp("whole", (target,))], DEADLINE_S).result()[0].code is ResultCode.OK
    assert target == whole
    store.close()


@pytest.mark.slow
def test_processes_killed_at_random_leave_a_store_that_works(
    tmp_path: Path, workers: list["subprocess.Popen[str]"]
) -> None:
    kill_in_a_loop(tmp_path / "store", workers, kills=6)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_processes_killed_at_random_leave_a_store_that_works(
    tmp_path: Path,
    workers: list["subprocess.Popen[str]"],
    effort: Callable[[int, int], int],
    record: Callable[[dict[str, object]], None],
) -> None:
    kills = effort(60, 300)
    kill_in_a_loop(tmp_path / "store", workers, kills=kills)
    record({"killed_and_all_still_right": kills})


def test_of_processes_that_create_a_store_at_once_one_does_and_all_share_it(
    tmp_path: Path, workers: list["subprocess.Popen[str]"]
) -> None:
    path = tmp_path / "store"
    workers.extend(start("race", path, 16 << 20, f"racer-{number}") for number in range(4))
    for worker in workers:
        out, err = worker.communicate(timeout=DEADLINE_S)
        assert (worker.returncode, out, err) == (0, "ok True\n", "")
    store = FileStore(path)
    found = store.exists([f"racer-{number}" for number in range(4)], DEADLINE_S).result()
    assert [result.code for result in found] == [ResultCode.OK] * 4
    store.close()
