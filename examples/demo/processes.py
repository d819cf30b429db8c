"""Servers as child processes: started together, waited for within bounds, always stopped.

A process that was started here is ended here, by its own id, however the caller leaves the `with` block; on Linux the
kernel ends it even if the caller is killed.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Protocol, Self

import httpx

from demo.client import NO_CERTIFICATES

__all__ = [
    "SERVE_PORTS",
    "ChildProcess",
    "ProcessError",
    "Processes",
    "Server",
    "bound_to_parent",
    "free_port",
    "free_port_block",
    "is_free",
    "proxy_command",
]

SERVE_PORTS: Final = 6
"""The number of ports that `--serve` needs: the proxy's and the next ones."""
_STOP_S: Final = 10.0
_POLL_S: Final = 0.05
_LOG_TAIL: Final = 2_000
_RESERVED_S: Final = 60.0

# Asks the kernel for a SIGTERM at the parent's death (prctl(2), PR_SET_PDEATHSIG is 1; it survives execve), makes sure
# that the parent was not dead by then, and becomes the command. A program of its own, as Python code between fork and
# exec (`preexec_fn`) may deadlock in a process with threads.
_BOUND: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this one has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""


class ProcessError(RuntimeError):
    """A server ended, or was not ready in time; the message has the end of its log."""


class ChildProcess(Protocol):
    """A process that runs a server, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Returns the id of the process, which leads a session."""
        ...

    @property
    def returncode(self) -> int | None:
        """Returns the exit status once it is known."""
        ...

    def poll(self) -> int | None:
        """Returns the exit status, or None while the process runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process; raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        ...

    def send_signal(self, sig: int) -> None:
        """Sends a signal, unless the process has ended."""
        ...

    def terminate(self) -> None:
        """Sends SIGTERM."""
        ...

    def kill(self) -> None:
        """Sends SIGKILL."""
        ...


@dataclass(frozen=True, slots=True)
class Server:
    """A server that was started."""

    name: str
    url: str
    log: Path
    process: ChildProcess = field(repr=False)
    command: tuple[str, ...] = ()
    """Starts it; empty where it was started elsewhere."""

    def tail(self) -> str:
        """The end of what it wrote to stdout and stderr."""
        return self.log.read_text("utf-8", "replace")[-_LOG_TAIL:]


def free_port() -> int:
    """A port on the loopback interface that nothing listens on, below the range that connections are made from.

    Nor was any process of this user told of it within the last minute: that one may not listen yet.
    """
    draw = random.SystemRandom()  # tests seed the other one, each process alike
    while True:
        port = draw.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            if _first_to_ask(port):
                return port


def free_port_block(count: int) -> int:
    """Returns the first of so many such ports in a row."""
    while True:
        first = free_port()
        if all(is_free(port) and _first_to_ask(port) for port in range(first + 1, first + count)):
            return first


def is_free(port: int) -> bool:
    """Whether a server could listen on a port of the loopback interface now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: what was closed does not count
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
    return True


def _first_to_ask(port: int) -> bool:
    folder = Path(tempfile.gettempdir()) / f"kvparams-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    mark = folder / str(port)
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        if time.time() - mark.stat().st_mtime < _RESERVED_S:
            return False
        mark.touch()
    return True


def bound_to_parent(*command: str) -> tuple[str, ...]:
    """The command, on Linux such that it ends with the thread that starts it, however that ends."""
    if sys.platform != "linux":
        return command
    return sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), *command


class Processes:
    """A group of servers; use it in a `with` block."""

    def __init__(self, directory: Path) -> None:
        """`directory` takes the logs."""
        self._directory = directory
        self._servers: list[Server] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(*self._servers)

    def start(self, name: str, *command: str, port: int) -> Server:
        """Start a server that will listen on `port`; does not wait for it.

        On Linux the server ends with the calling thread, so call this from one that stays.
        """
        log = self.log_of(name, port)
        with log.open("wb") as output:
            # A session of its own: Ctrl-C reaches us alone, and we stop the servers in order.
            process = subprocess.Popen(
                bound_to_parent(*command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.add(Server(name, f"http://127.0.0.1:{port}", log, process, command))

    def log_of(self, name: str, port: int) -> Path:
        """Returns where the output of a server goes."""
        return self._directory / f"{name}-{port}.log"

    def add(self, server: Server) -> Server:
        """Adds a server that was started elsewhere; it is stopped with the others."""
        self._servers.append(server)
        return server

    def engine(
        self,
        name: str,
        role: Literal["prefill", "decode", "both"] = "both",
        store: str | None = None,
        *more: str,
        port: int | None = None,
    ) -> Server:
        """Start a reference engine; `more` are further arguments of `python -m reference_engine`."""
        port = port or free_port()
        command = [sys.executable, "-m", "reference_engine", "--id", name, "--role", role, "--port", str(port)]
        if store is not None:
            command += ["--store", store]
        return self.start(name, *command, *more, port=port)

    def proxy(
        self,
        prefill: Sequence[Server],
        decode: Sequence[Server],
        *more: str,
        connector: str = "store",
        port: int | None = None,
    ) -> Server:
        """Start the proxy before these engines; `more` are further arguments of `kvparams proxy`.

        KV travels as `connector` says: by default through a store that the engines share. The proxy's answers name the
        engines used, in the headers `x-kvparams-prefill` and `x-kvparams-decode`.
        """
        port = port or free_port()
        command = [*proxy_command(prefill, decode, connector), "--port", str(port)]
        command += ["--expose-route", "--probe", "1"]  # engines that start beside it are seen within a second
        command += ["--startup-check", "off"]  # who counts what engines compute counts only what clients ask
        return self.start("proxy", *command, *more, port=port)

    def wait_ready(self, *servers: Server, within_s: float = 60.0) -> None:
        """Wait until all of them answer `/health`.

        Raises:
            ProcessError: one has ended, or they are not ready within `within_s` seconds.
        """
        deadline = time.monotonic() + within_s
        for server in servers:
            self.wait_until(server, partial(_healthy, server.url), deadline - time.monotonic())

    def wait_until(self, server: Server, ready: Callable[[], bool], within_s: float = 60.0) -> None:
        """Wait until `ready()` says so of a server.

        Raises:
            ProcessError: it has ended, or is not ready within `within_s` seconds.
        """
        deadline = time.monotonic() + within_s
        while True:
            is_ready = ready()
            if server.process.poll() is not None:  # whatever answers is another process
                raise ProcessError(f"{server.name} ended with status {server.process.returncode}: {server.tail()}")
            if is_ready:
                return
            if time.monotonic() > deadline:
                raise ProcessError(f"{server.name} was not ready in time: {server.tail()}")
            time.sleep(_POLL_S)

    def stop(self, *servers: Server) -> None:
        """Terminates all processes at once, and kills those that still run after ten seconds.

        Processes that they started themselves are included: a vLLM that is told to end while it starts leaves its
        engine behind.
        """
        for server in servers:
            server.process.terminate()
        deadline = time.monotonic() + _STOP_S
        for server in servers:
            try:
                server.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
            with suppress(ProcessLookupError):  # nobody is left
                os.killpg(server.process.pid, signal.SIGKILL)
        self._servers = [server for server in self._servers if server not in servers]


def proxy_command(prefill: Sequence[Server], decode: Sequence[Server], connector: str) -> list[str]:
    """The command line of a proxy before these engines; with `--check` behind it, it only looks at them."""
    command = [sys.executable, "-m", "kvparams", "proxy", "--connector", connector]
    for role, servers in (("prefill", prefill), ("decode", decode)):
        for server in servers:
            command += [f"--{role}", f"{server.name}={server.url}"]
    return command


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=1.0, trust_env=False, verify=NO_CERTIFICATES).status_code == 200
    except httpx.HTTPError:
        return False
