"""Runs real `lm://` servers of LMCache on free loopback ports, and provides a bare client of their protocol.

The client is written after LMCache 0.5.6 (`lmcache/v1/protocol.py`) and shares no code with the store. Whoever starts a
server ends it. A server that does not start fails the test with its output.
"""

import signal
import socket
import struct
import subprocess
from pathlib import Path
from typing import Final, Self

from tests.support.connectors.lmcache_env import environment, python
from tests.support.processes import free_ports
from tests.support.waiting import wait_until

__all__ = ["BINARY", "BareClient", "LMCacheServer"]

_START_S: Final = 120.0  # it imports torch
_REQUEST: Final = struct.Struct("iiiiiiiii150s")
_REPLY: Final = struct.Struct("iiiiiiiii")
PUT, GET, EXIST, HEALTH = 1, 2, 3, 5
BINARY: Final = 4
_UINT8: Final = 6
Shape = tuple[int, int, int, int]


class BareClient:
    """One connection; a context manager that closes it."""

    def __init__(self, port: int) -> None:
        self.socket: Final = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, command: int, name: bytes, nbytes: int = 0, shape: Shape = (0, 0, 0, 0), form: int = BINARY) -> None:
        """One request."""
        self.socket.sendall(_REQUEST.pack(command, nbytes, form, _UINT8, 0, *shape, name.ljust(150)))

    def put(self, name: bytes, content: bytes | memoryview, shape: Shape = (0, 0, 0, 0), form: int = BINARY) -> None:
        """Nothing is answered."""
        self.send(PUT, name, len(content), shape, form)
        self.socket.sendall(content)

    def exist(self, name: bytes) -> int:
        """The code: 200 or 400."""
        self.send(EXIST, name)
        return self.reply()[0]

    def get(self, name: bytes) -> tuple[int, Shape, bytes]:
        """Code, shape and value; ConnectionError if the value does not come."""
        self.send(GET, name)
        code, nbytes, _, _, *shape, _ = self.reply()
        return code, (shape[0], shape[1], shape[2], shape[3]), self.receive(nbytes)

    def health(self) -> int:
        """The code."""
        self.send(HEALTH, b"kvparams@1@0@0@uint8")
        return self.reply()[0]

    def reply(self) -> tuple[int, ...]:
        """The nine numbers of a reply."""
        return _REPLY.unpack(self.receive(_REPLY.size))

    def receive(self, nbytes: int) -> bytes:
        """So many bytes."""
        data = bytearray()
        while len(data) < nbytes:
            part = self.socket.recv(nbytes - len(data))
            if not part:
                raise ConnectionError("the server closed the connection")
            data += part
        return bytes(data)

    def says_nothing(self, seconds: float = 0.2) -> bool:
        """Whether nothing comes, for so long."""
        self.socket.settimeout(seconds)
        try:
            self.socket.recv(1, socket.MSG_PEEK)
            return False
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(20)


class LMCacheServer:
    """`lmcache_server 127.0.0.1 PORT`; a context manager that ends it."""

    def __init__(self, folder: Path) -> None:
        """Args:
        folder: for what it says.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (self.port,) = free_ports(1)
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Of the store."""
        return f"lmcache://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [python(), "-m", "lmcache.v1.server", "127.0.0.1", str(self.port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment()
            )
        try:
            self._await(self._process)
        except BaseException:  # whoever starts it has nothing to end
            self.kill()
            raise

    def _await(self, process: "subprocess.Popen[bytes]") -> None:
        wait_until(lambda: self._answers() or process.poll() is not None, _START_S, seen=self._log.read_text)
        assert process.poll() is None, f"lmcache_server did not start:\n{self._log.read_text()}"

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

    def _answers(self) -> bool:
        try:
            with BareClient(self.port) as client:
                return client.health() == 200
        except OSError:
            return False
