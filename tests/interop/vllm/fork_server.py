"""Starts vLLM engines as forks of a process that has imported vLLM: an engine serves within seconds.

Most of the 15 s of CPU that an engine takes to start are two imports of vLLM, in its server and in its core. Here both
are forks of one process that has them. What they run from there on is what `python -m` of vLLM's server runs. Engines
with several ranks are started as ever, and so is everything that a test does not start through `start_engine`.

The process ends with the tests, and the engines end with it.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

from demo.processes import ProcessError, bound_to_parent

__all__ = ["API_SERVER", "SOCKET", "ForkRequest", "ForkedProcess", "fork_engine", "running_fork_server"]

SOCKET: Final = "KVPARAMS_VLLM_FORK_SERVER"
"""The environment variable that names the socket of the fork server."""
API_SERVER: Final = "vllm.entrypoints.openai.api_server"
_IMPORTED: Final = (
    API_SERVER,
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)
_ROOT: Final = Path(__file__).parents[3]
_READY_S: Final = 300.0
_LOG_TAIL: Final = 2_000
_KILLED: Final = -int(signal.SIGKILL)
_PR_SET_PDEATHSIG: Final = 1


class ForkRequest(NamedTuple):
    """A `ForkRequest` describes an engine: the arguments and environment of vLLM's server, and its log."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: str


class ForkedProcess:
    """A `ForkedProcess` is an engine, a child of the fork server. It has what tests use of a `Popen`."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self.pid: Final = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit status, or None while the engine runs."""
        return self._status(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the engine and returns its exit status.

        Raises:
            subprocess.TimeoutExpired: the engine runs for longer than `timeout` seconds.
        """
        status = self._status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(API_SERVER, timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        """Sends a signal, unless the engine is known to have ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _status(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], timeout_s)[0]:
            with self._connection:
                self.returncode = int(self._connection.recv(64) or _KILLED)  # all engines end with a fork server
        return self.returncode


def fork_engine(path: str, request: ForkRequest) -> ForkedProcess:
    """Has the fork server at `path` start an engine, once it has imported vLLM.

    Raises:
        ProcessError: the fork server has ended; the message has the end of its log.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_READY_S)
    try:
        connection.connect(path)
        connection.sendall(json.dumps(request).encode() + b"\n")
        said = connection.recv(64)
    except ConnectionError:
        said = b""
    if not said:
        connection.close()
        log = Path(f"{path}.log").read_text(errors="replace")[-_LOG_TAIL:]
        raise ProcessError(f"the fork server of the tests has ended: {log}")
    return ForkedProcess(connection, int(said))


@contextmanager
def running_fork_server(folder: Path, environment: Mapping[str, str]) -> Generator[str]:
    """Starts a fork server and yields the path of its socket; does not wait until it has imported vLLM."""
    path = str(folder / "socket")
    with socket.socket(socket.AF_UNIX) as listener, open(f"{path}.log", "wb") as output:
        listener.bind(path)
        listener.listen()
        process = subprocess.Popen(
            bound_to_parent(sys.executable, "-m", __name__, str(listener.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            cwd=_ROOT,
            pass_fds=[listener.fileno()],
        )
    try:
        yield path
    finally:
        process.terminate()
        process.wait()


def _serve(listener: socket.socket) -> ForkRequest:
    """Forks for each request; returns the request in the child alone."""
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, _ignore)
    watched: dict[int, socket.socket] = {}
    while True:
        readable, _, _ = select.select([listener, woken], [], [])
        if woken in readable:
            woken.recv(4096)
            _report_ended(watched)
        if listener in readable:
            connection, _ = listener.accept()
            request = ForkRequest(*json.loads(connection.makefile().readline()))
            parent, pid = os.getpid(), os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for inherited in (listener, connection, woken, wakes, *watched.values()):
                    inherited.close()
                _become(request, parent)
                return request
            connection.sendall(b"%d\n" % pid)
            watched[pid] = connection


def _ignore(_signal: int, _frame: FrameType | None) -> None:
    """The wakeup descriptor says that a child has ended."""


def _report_ended(watched: dict[int, socket.socket]) -> None:
    while watched:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with watched.pop(pid) as connection, suppress(OSError):
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _become(request: ForkRequest, parent: int) -> None:
    """Makes a fork what a new process would be: its session, output, environment, arguments and import path."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    output = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.argv[1:] = request.arguments
    places = [place for place in request.environment.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[1:1] = [place for place in places if place not in sys.path]
    os.register_at_fork(after_in_child=_forget_sockets)


def _forget_sockets() -> None:
    """Makes the core of an engine as free of its server as if it was spawned: it neither listens nor takes signals."""
    signal.set_wakeup_fd(-1)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # the descriptor of the listing itself is closed by now
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _is_unconnected(descriptor):
                os.close(descriptor)


def _is_unconnected(descriptor: int) -> bool:
    """Returns whether this is a socket of the Internet protocols without a peer: one that listens, or will."""
    with socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        try:
            one.getpeername()
        except OSError:
            return True
        return False


def main() -> None:
    """Imports vLLM, serves, and is an engine in each fork."""
    for name in _IMPORTED:
        importlib.import_module(name)
    envs: Any = importlib.import_module("vllm.envs")
    # vLLM 0.32.0, platforms/cpu.py, has the core spawned, which imports everything again.
    envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module(API_SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
