"""Runs real valkey-servers for tests, on free loopback ports and unix sockets.

Whoever starts a server ends it. Every wait has a limit, and a server that does not start fails the test with its
output.
"""

import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from tests.support.processes import free_ports
from tests.support.waiting import wait_until

__all__ = ["Cluster", "ValkeyServer"]

_START_S: Final = 20.0


class ValkeyServer:
    """One server, with nothing on disk; a context manager that ends it."""

    def __init__(self, folder: Path, *options: str, max_memory: str = "64mb", policy: str = "allkeys-lru") -> None:
        """Args:
        folder: for its socket and what it says.
        options: more of its command line.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (self.port,) = free_ports(1)
        self.path: Final = folder / "v.sock"
        self._log = folder / "log"
        self._command = [
            *("valkey-server", "--bind", "127.0.0.1", "--port", str(self.port)),
            *("--unixsocket", str(self.path), "--save", "", "--appendonly", "no", "--dir", str(folder)),
            *("--maxmemory", max_memory, "--maxmemory-policy", policy, *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Over TCP."""
        return f"valkey://127.0.0.1:{self.port}"

    @property
    def unix_url(self) -> str:
        """Over its unix socket."""
        return f"valkey://{self.path}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self._await(self._process)
        except BaseException:  # whoever starts it has nothing to end
            self.kill()
            raise

    def _await(self, process: "subprocess.Popen[bytes]") -> None:
        def is_up() -> bool:
            answer = self._ping()
            return any(each in answer for each in (b"PONG", b"NOAUTH", b"NOPERM"))

        wait_until(lambda: is_up() or process.poll() is not None, _START_S, seen=self._log.read_text)
        assert process.poll() is None, f"valkey-server did not start:\n{self._log.read_text()}"

    def kill(self) -> None:
        """End it at once, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_START_S)
            self._process = None

    def stop(self) -> None:
        """SIGSTOP: it is there and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def ask(self, *words: str) -> str:
        """One command, by a connection of its own; the raw reply as text."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(str(self.path))
            return _exchange(sock, words).decode()

    def _ping(self) -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(1)
            try:
                sock.connect(str(self.path))
                return _exchange(sock, ("PING",))
            except OSError:
                return b""


def _exchange(sock: socket.socket, words: Sequence[str]) -> bytes:
    """Send a command and read one reply whole, as far as tests need it: a line, or a bulk string."""
    sock.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(w.encode()), w.encode()) for w in words))
    with sock.makefile("rb") as file:
        line = file.readline()
        if line.startswith(b"$") and line != b"$-1\r\n":
            return file.read(int(line[1:]) + 2)
        return line


class Cluster:
    """Three primaries that share all slots."""

    def __init__(self, folder: Path) -> None:
        buses = free_ports(3)
        self.servers: Final = [
            ValkeyServer(
                folder / f"{number}",
                *("--cluster-enabled", "yes", "--cluster-port", str(bus)),
                *("--cluster-config-file", "nodes.conf", "--cluster-node-timeout", "2000"),
            )
            for number, bus in enumerate(buses)
        ]
        self._buses = buses
        self.bounds: Final = [0, 5461, 10923, 16384]

    @property
    def url(self) -> str:
        """Of its first server."""
        return self.servers[0].url

    def __enter__(self) -> Self:
        try:
            for server in self.servers:
                server.start()
            for number, server in enumerate(self.servers):
                first, last = self.bounds[number], self.bounds[number + 1] - 1
                assert server.ask("CLUSTER", "ADDSLOTSRANGE", str(first), str(last)).startswith("+OK")
            for server, bus in zip(self.servers[1:], self._buses[1:], strict=True):
                met = self.servers[0].ask("CLUSTER", "MEET", "127.0.0.1", str(server.port), str(bus))
                assert met.startswith("+OK"), met
            wait_until(lambda: all("cluster_state:ok" in server.ask("CLUSTER", "INFO") for server in self.servers))
            wait_until(lambda: all(len(self.nodes(server)) == 3 for server in self.servers))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.kill()

    @staticmethod
    def nodes(server: ValkeyServer) -> list[str]:
        """What CLUSTER NODES says, by line."""
        return [line for line in server.ask("CLUSTER", "NODES").split("\n") if line.strip()]

    def identity(self, server: ValkeyServer) -> str:
        """The server's node id."""
        return server.ask("CLUSTER", "MYID").strip()
