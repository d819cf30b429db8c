"""Serves the engines that a proxy under test talks to; each leg is answered as the script of its conversation says.

An engine never judges: it records what came, and does what it is told, misbehavior included.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from kvparams_conformance.connection import Connection, WireError, encode_head
from kvparams_conformance.conversation import Conversation, Role, ScriptedAnswer, SeenLeg

__all__ = ["MODEL", "TAG", "ScriptedEngine"]

MODEL: Final = "m"
TAG: Final = re.compile(rb"kvc[0-9a-f]{10}x|40000[0-9]{5}")
"""What tells the legs of one conversation from those of others: text, or a token id of that form."""
_MAX_BODY_BYTES: Final = 8 << 20
_FLOOD_BYTES: Final = 128 << 20
_FLOOD_PART: Final = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
_HANG_S: Final = 30.0
_SERVER_INFO: Final[dict[str, object]] = {
    "model_path": MODEL,
    "served_model_name": MODEL,
    "tp_size": 1,
    "dp_size": 1,
    "version": "0.5.23",
}
_PROBES: Final[dict[str, dict[str, object]]] = {
    "/health": {},
    "/get_load": {},
    "/health_generate": {},
    "/ready": {},
    "/metrics": {},
    "/version": {"version": "0.32.0"},
    "/get_server_info": _SERVER_INFO,
    "/server_info": _SERVER_INFO,
    "/route": {"attn_tp_size": 1, "dp_size": 1, "pp_size": 1},  # of SGLang's bootstrap server
    "/get_model_info": {"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True},
    "/model_info": {"model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True},
}


class ScriptedEngine:
    """A `ScriptedEngine` is a server on a port of this machine."""

    def __init__(self, name: str, role: Role, find: Callable[[SeenLeg], Conversation | None]) -> None:
        """`find` returns the conversation that a leg belongs to."""
        self.name = name
        self.role: Role = role
        self.port = 0
        self.versions: list[str] | None = ["1.0"]
        """The member `kvparams_versions` of its models; None leaves it out."""
        self._find = find
        self._order = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """Returns the URL of the engine."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        """Listens; 0 takes a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port, backlog=256)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Closes the port and every connection."""
        if self._server is not None:
            self._server.close()
        for task in (*self._tasks,):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        connection = Connection(reader, writer)
        with suppress(WireError, asyncio.CancelledError):
            while await self._serve(connection):
                pass
        await connection.close()

    async def _serve(self, connection: Connection) -> bool:
        """Answers one request. Returns False if the connection is over."""
        head = await connection.read_head()
        if head is None:
            return False
        if (head.get("expect") or "").lower() == "100-continue":
            await connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await connection.read_body(head, _MAX_BODY_BYTES)
        method, _, rest = head.start.partition(" ")
        path = rest.partition(" ")[0]
        if method != "POST":
            await connection.send(*self._probe(path.partition("?")[0]))
            return True
        self._order += 1
        leg = SeenLeg(self.name, self.role, path, head, body, time.monotonic(), self._order)
        conversation = self._find(leg)
        if conversation is None:
            await connection.send(*_whole(ScriptedAnswer(body=b"{}")))
            return True
        if not conversation.add(leg):
            await connection.send(*_whole(ScriptedAnswer(503, b"{}")))
            return False
        return await self._answer(connection, conversation, leg)

    def _probe(self, path: str) -> Sequence[bytes]:
        if path == "/v1/models":
            models: dict[str, object] = {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
            if self.versions is not None:
                models["kvparams_versions"] = self.versions
            return _whole(ScriptedAnswer(body=json.dumps(models).encode()))
        known = _PROBES.get(path)
        return _whole(ScriptedAnswer(404 if known is None else 200, json.dumps(known or {}).encode()))

    async def _answer(self, connection: Connection, conversation: Conversation, leg: SeenLeg) -> bool:
        answer = conversation.respond(leg)
        sending = asyncio.create_task(_send(connection, answer))
        closing = asyncio.create_task(connection.closed.wait())
        try:
            await asyncio.wait((sending, closing), return_when=asyncio.FIRST_COMPLETED)
            if closing.done() and not sending.done():
                leg.left_s = time.monotonic()
                return False
            if sending.exception() is not None:
                leg.left_s = time.monotonic()
                return False
            return answer.end == "whole"
        finally:
            for task in (sending, closing):
                task.cancel()
            await asyncio.gather(sending, closing, return_exceptions=True)
            conversation.notify()


async def _send(connection: Connection, answer: ScriptedAnswer) -> None:
    """Sends an answer as it says."""
    if answer.wait_s:
        await asyncio.sleep(answer.wait_s)
    if answer.end == "close":
        await connection.close(reset=True)
        return
    if answer.end == "whole" and not answer.parts:
        await connection.send(*_whole(answer))
        return
    if answer.end == "hang" and not answer.parts and not answer.body:
        await asyncio.sleep(_HANG_S)
        return
    head = [("content-type", answer.content_type), ("transfer-encoding", "chunked")]
    await connection.send(encode_head(f"HTTP/1.1 {answer.status} {_reason(answer.status)}", head))
    for part in answer.parts or (answer.body,):
        if not isinstance(part, bytes):
            await asyncio.sleep(part)
        elif part:
            await connection.send(b"%x\r\n%b\r\n" % (len(part), part))
    if answer.end == "whole":
        await connection.send(b"0\r\n\r\n")
    elif answer.end == "cut":
        await connection.close()
    elif answer.end == "hang":
        await asyncio.sleep(_HANG_S)
    else:
        sent = 0
        while sent < _FLOOD_BYTES:
            await connection.send(_FLOOD_PART)
            sent += len(_FLOOD_PART)


def _whole(answer: ScriptedAnswer) -> tuple[bytes, bytes]:
    """Returns an answer of known length."""
    headers = [("content-type", answer.content_type), ("content-length", str(len(answer.body)))]
    return encode_head(f"HTTP/1.1 {answer.status} {_reason(answer.status)}", headers), answer.body


def _reason(status: int) -> str:
    return "OK" if status < 300 else "Error"
