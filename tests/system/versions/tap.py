"""Records the traffic between a proxy and an engine on its way."""

import json
import socket
import socketserver
import threading
from contextlib import suppress
from typing import Any, Final, Literal

__all__ = ["Tap"]

_CHUNK: Final = 1 << 16


class Tap(socketserver.ThreadingTCPServer):
    """Carries bytes to and from an engine, which may be another one from some moment on."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int) -> None:
        """`port`: of the engine on loopback."""
        super().__init__(("127.0.0.1", 0), _Carrier)
        self.target = port
        self.port: int = self.server_address[1]
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._kept: dict[str, list[bytearray]] = {"asked": [], "answered": []}
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def begin(self, *sockets: socket.socket) -> tuple[bytearray, bytearray]:
        """Two sockets carry one connection from now on; what is asked and answered there is kept in these."""
        asked, answered = bytearray(), bytearray()
        with self._lock:
            self._open += sockets
            self._kept["asked"].append(asked)
            self._kept["answered"].append(answered)
        return asked, answered

    def move(self, port: int) -> None:
        """The engine is another one from now on, as after a restart."""
        self.target = port
        with self._lock:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def forget(self) -> None:
        """What was kept so far; connections stay."""
        with self._lock:
            for kept in (*self._kept["asked"], *self._kept["answered"]):
                kept.clear()

    def documents(self, side: Literal["asked", "answered"]) -> list[dict[str, Any]]:
        """Our documents that went to the engine, or came from it in whole answers, since `forget`."""
        with self._lock:
            found = [body for kept in self._kept[side] for body in _bodies(bytes(kept))]
        carried: list[dict[str, Any]] = [body["kv_transfer_params"] for body in found if body.get("kv_transfer_params")]
        return [one["kvparams"] for one in carried if "kvparams" in one]


class _Carrier(socketserver.BaseRequestHandler):
    server: Tap  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle(self) -> None:
        client: socket.socket = self.request
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.server.target)) as engine:
            asked, answered = self.server.begin(client, engine)
            back = threading.Thread(target=_carry, args=(engine, client, answered), daemon=True)
            back.start()
            _carry(client, engine, asked)
            back.join()


def _carry(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
    with suppress(OSError):
        while chunk := source.recv(_CHUNK):
            kept += chunk
            sink.sendall(chunk)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def _bodies(raw: bytes) -> list[dict[str, Any]]:
    """The JSON objects in messages that say how long they are; streams and probes have none."""
    found: list[dict[str, Any]] = []
    while raw:
        head, _, rest = raw.partition(b"\r\n\r\n")
        lengths = [
            int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
        ]
        if b"chunked" in head.lower():
            raw = rest.partition(b"\r\n0\r\n\r\n")[2]
            continue
        body, raw = rest[: sum(lengths)], rest[sum(lengths) :]
        if body.startswith(b"{"):
            with suppress(ValueError):
                found.append(json.loads(body))
    return found
