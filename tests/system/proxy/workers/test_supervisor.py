"""Tests that the supervisor starts, watches, replaces and shuts down workers, with workers that serve nothing."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.proxy.supervised_worker import FAILURE
from tests.support.waiting import until

ROOT = Path(__file__).parents[4]


class Event(NamedTuple):
    """What a worker has lived to see."""

    number: int
    serial: int
    pid: int
    kind: str


class Supervised:
    """The running program."""

    def __init__(self, folder: Path, process: "subprocess.Popen[bytes]") -> None:
        self.folder = folder
        self.process = process

    def behave(self, behavior: str) -> None:
        (self.folder / "behavior").write_text(behavior)

    def events(self, *kinds: str) -> list[Event]:
        path = self.folder / "events"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [Event(int(number), int(serial), int(pid), kind) for number, serial, pid, kind in map(str.split, lines)]
        return [event for event in found if event.kind in kinds]

    async def saw(self, kind: str, times: int) -> list[Event]:
        """Waits until workers have seen that so often."""
        await until(lambda: len(self.events(kind)) >= times)
        return self.events(kind)

    async def serving(self) -> None:
        await until(lambda: self.said() == "serving")

    def said(self) -> str:
        return (self.folder / "said").read_text().strip()

    def log(self) -> str:
        return (self.folder / "log").read_text()

    async def end(self) -> tuple[int | None, str]:
        """Waits for the end; the status, and what was said at last."""
        await until(lambda: self.process.poll() is not None)
        return self.process.returncode, self.said().removeprefix("serving").strip()


@asynccontextmanager
async def supervised(folder: Path, workers: int, behavior: str = "serve") -> AsyncGenerator[Supervised]:
    (folder / "behavior").write_text(behavior)
    (folder / "check").write_text("right")
    command = (sys.executable, "-m", "tests.support.proxy.supervised", str(folder), str(workers))
    with (folder / "log").open("wb") as log, (folder / "said").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=log, cwd=ROOT, start_new_session=True)  # noqa: ASYNC220
    running = Supervised(folder, process)
    try:
        yield running
    finally:
        process.kill()
        process.wait()
        for event in running.events("START"):
            if is_alive(event.pid):
                os.kill(event.pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Returns whether a process runs; one that has ended and was not waited for does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def alive(events: Iterable[Event]) -> set[int]:
    return {event.pid for event in events if is_alive(event.pid)}


async def test_workers_learn_who_they_are(tmp_path: Path) -> None:
    async with supervised(tmp_path, 3) as proxy:
        await proxy.serving()
        ready = proxy.events("READY")
        assert sorted(event.number for event in ready) == [1, 2, 3]
        assert len({event.serial for event in ready}) == 3


async def test_a_worker_that_is_killed_is_replaced_at_once(tmp_path: Path) -> None:
    async with supervised(tmp_path, 2) as proxy:
        await proxy.serving()
        killed = proxy.events("READY")[0]
        os.kill(killed.pid, signal.SIGKILL)
        successor = (await proxy.saw("READY", 3))[-1]
        assert successor.number == killed.number
        assert successor.serial == 3
        said = f"WARNING worker {killed.number} exited (signal SIGKILL); restarting now"
        assert said in proxy.log().splitlines()
        os.kill(successor.pid, signal.SIGKILL)
        await proxy.saw("READY", 4)
        assert "restarting in 0.1 s" in proxy.log()


async def test_workers_that_crash_before_any_is_ready_end_it_all(tmp_path: Path) -> None:
    async with supervised(tmp_path, 2, "crash") as proxy:
        status, said = await proxy.end()
        assert status == 1
        assert said.endswith("exited 3 times during startup (status 3)")
        assert 3 in Counter(event.number for event in proxy.events("START")).values()
        assert not alive(proxy.events("START"))


async def test_the_reason_of_a_failed_start_is_said_once(tmp_path: Path) -> None:
    async with supervised(tmp_path, 3, "fail") as proxy:
        assert await proxy.end() == (FAILURE.status, f"gave up {FAILURE.message}")
        assert FAILURE.message not in proxy.log()
        assert len(proxy.events("START")) <= 3


async def test_the_others_go_on_while_one_cannot_start(tmp_path: Path) -> None:
    async with supervised(tmp_path, 2) as proxy:
        await proxy.serving()
        proxy.behave("fail")
        first, other = proxy.events("READY")
        os.kill(first.pid, signal.SIGKILL)
        await proxy.saw("START", 5)
        assert proxy.log().count(f"worker {first.number} failed: {FAILURE.message}") == 1
        assert is_alive(other.pid)
        proxy.behave("serve")
        assert (await proxy.saw("READY", 3))[-1].number == first.number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_has_all_workers_drain(tmp_path: Path, number: signal.Signals) -> None:
    """It reaches the whole session, as from a terminal or from a service manager."""
    async with supervised(tmp_path, 3) as proxy:
        await proxy.serving()
        if number is signal.SIGINT:
            os.killpg(proxy.process.pid, number)
        else:
            proxy.process.send_signal(number)
        assert await proxy.end() == (0, f"told {number.name}")
        assert sorted(event.number for event in proxy.events("DRAIN", "CUT")) == [1, 2, 3]


async def test_a_second_signal_cuts(tmp_path: Path) -> None:
    async with supervised(tmp_path, 2, "stay") as proxy:
        await proxy.serving()
        proxy.process.terminate()
        await proxy.saw("DRAIN", 2)
        proxy.process.terminate()
        await proxy.saw("CUT", 2)


async def test_workers_that_do_not_end_are_killed(tmp_path: Path) -> None:
    async with supervised(tmp_path, 2, "stay") as proxy:
        await proxy.serving()
        proxy.process.terminate()
        assert await proxy.end() == (0, "told SIGTERM")
        assert "does not exit and is killed" in proxy.log()
        assert not alive(proxy.events("START"))


async def test_a_reload_replaces_all_workers_one_after_the_other(tmp_path: Path) -> None:
    async with supervised(tmp_path, 3) as proxy:
        await proxy.serving()
        proxy.process.send_signal(signal.SIGHUP)
        await proxy.saw("RETIRE", 3)
        await until(lambda: "all workers are replaced" in proxy.log())
        order = [(event.kind, event.number) for event in proxy.events("READY", "RETIRE")][3:]
        assert order == [(kind, number) for number in (1, 2, 3) for kind in ("READY", "RETIRE")]
        await until(lambda: len(alive(proxy.events("START"))) == 3)
        assert proxy.process.poll() is None
        os.kill(proxy.events("READY")[-1].pid, signal.SIGKILL)  # those that are new are watched, too
        await proxy.saw("READY", 7)


async def test_a_wrong_configuration_replaces_nobody(tmp_path: Path) -> None:
    async with supervised(tmp_path, 2) as proxy:
        await proxy.serving()
        (tmp_path / "check").write_text("wrong")
        proxy.process.send_signal(signal.SIGHUP)
        await until(lambda: "the configuration is invalid" in proxy.log())
        assert len(proxy.events("START")) == 2
        (tmp_path / "check").write_text("right")
        proxy.process.send_signal(signal.SIGHUP)
        await proxy.saw("RETIRE", 2)


async def test_a_successor_that_cannot_start_ends_the_reload(tmp_path: Path) -> None:
    async with supervised(tmp_path, 2) as proxy:
        await proxy.serving()
        proxy.behave("fail")
        proxy.process.send_signal(signal.SIGHUP)
        await until(lambda: f"the successor of worker 1 failed to start: {FAILURE.message}" in proxy.log())
        assert not proxy.events("RETIRE")
        assert len(alive(proxy.events("READY"))) == 2


@pytest.mark.parametrize("behavior", ["bound", "leave"], ids=["by the kernel", "by the channel"])
async def test_a_killed_supervisor_leaves_nobody_behind(tmp_path: Path, behavior: str) -> None:
    async with supervised(tmp_path, 2, behavior) as proxy:
        await proxy.serving()
        proxy.process.kill()
        await until(lambda: not alive(proxy.events("READY")))


async def test_workers_that_do_not_care_would_stay(tmp_path: Path) -> None:
    """The control."""
    async with supervised(tmp_path, 2, "orphan") as proxy:
        await proxy.serving()
        proxy.process.kill()
        await proxy.saw("LOST", 2)
        assert len(alive(proxy.events("READY"))) == 2
