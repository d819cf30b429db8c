"""Starts, watches and stops the processes of a measurement.

The processes of a run end with the run, also after Ctrl-C or SIGTERM. No other process is ever signaled: each process
leads a session of its own, and only those sessions are ended.
"""

import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from demo.processes import free_port
from tests.support.waiting import wait_until

__all__ = ["Processes", "StartError", "Usage", "free_ports", "http_get", "require_free", "tree_usage"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_TERM_S = 5.0


class StartError(Exception):
    """A process of the measurement did not come up."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process and its descendants have used so far."""

    cpu_s: float
    """User and system time, that of descendants which have ended included."""
    rss_mb: float
    """Resident memory of those alive, in MiB; what they share counts once for each."""


def tree_usage(pid: int) -> Usage:
    """The usage of this process and all its descendants, from /proc. A process that is gone counts nothing."""
    cpu_ticks = rss_kib = 0
    pending = [pid]
    while pending:
        process = Path(f"/proc/{pending.pop()}")
        try:
            stat = (process / "stat").read_text().rpartition(")")[2].split()
            status = (process / "status").read_text()
            children = [task.joinpath("children").read_text() for task in (process / "task").iterdir()]
        except OSError:
            continue
        cpu_ticks += sum(int(ticks) for ticks in stat[11:15])
        rss_kib += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
        pending.extend(int(child) for line in children for child in line.split())
    return Usage(cpu_ticks / _TICKS_PER_S, rss_kib / 1024)


def free_ports(count: int) -> list[int]:
    """So many loopback ports that are free now, and told to nobody else for a while: see `free_port`."""
    return [free_port() for _ in range(count)]


def require_free(ports: Iterable[int]) -> None:
    """Raise StartError if somebody listens on one of these loopback ports: it would be taken for what is measured."""
    taken: list[int] = []
    for port in ports:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                taken.append(port)
    if taken:
        raise StartError(f"somebody else listens on 127.0.0.1 {', '.join(map(str, taken))}: wait for it or end it")


def http_get(url: str, timeout_s: float = 2.0) -> tuple[int, bytes]:
    """Status and body of a GET; status 0 if nobody answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except OSError as error:
        return 0, str(error).encode()


class Processes:
    """All processes of one run; leaving the block ends them."""

    def __init__(self, log_directory: Path) -> None:
        self._log_directory = log_directory
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        previous = signal.signal(signal.SIGTERM, _interrupt)
        self._stack.callback(signal.signal, signal.SIGTERM, previous)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        ready: Sequence[str] = (),
        ready_s: float = 30.0,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> int:
        """Start it, wait until one of the `ready` URLs answers 200, and return its process id.

        Its output goes to NAME.log in the log directory. Raises StartError with the end of that log.
        """
        log = self._log_directory / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
                cwd=directory,
            )
        self._stack.callback(_end, process)

        def is_ready() -> bool:
            return any(http_get(url, 1.0)[0] == 200 for url in ready)

        try:
            wait_until(lambda: not ready or is_ready() or process.poll() is not None, ready_s, pause_s=0.05)
        except TimeoutError:
            raise StartError(_not_ready(name, process, ready, log)) from None
        if ready and process.poll() is not None:
            raise StartError(_not_ready(name, process, ready, log))
        return process.pid


def _not_ready(name: str, process: "subprocess.Popen[bytes]", ready: Sequence[str], log: Path) -> str:
    tail = log.read_text(errors="replace")[-2000:]
    state = "still running" if process.poll() is None else f"ended with status {process.returncode}"
    return f"{name} is not ready ({state}, no 200 from {' or '.join(ready)}). Its log:\n{tail}"


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)  # the session it was started to lead
        except ProcessLookupError:
            break
        try:
            process.wait(_TERM_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
