"""Acts as an engine of either role and any connector, and fails as often as it is told.

Its language: the token ids of a text are its bytes, and token `n` of an answer follows from the number of tokens before
it alone, so that an answer does not depend on which engine computes which part of it. It keeps every request.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, cast

from kvparams import KVTransferParams, parse

__all__ = ["FAULTS", "Actor", "Fault", "answer_to", "document", "leg_limit_s"]

Fault = Literal["gone", "reset", "500", "garbage", "not http", "silent", "refusal"]
FAULTS: tuple[Fault, ...] = ("gone", "reset", "500", "garbage", "not http", "silent")
"""Those that another engine may not have."""
_OURS: dict[str, Any] = {"kvparams": None}
"""What a leg has that is not split: nothing."""
MODELS = b'{"object":"list","data":[{"id":"stub"}]}'
NIXL: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_block_ids": [[1, 2]],
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}


def leg_limit_s(fault: Fault) -> float:
    """How long legs may take in a test of this fault: silence ends by that alone, and on a busy machine whoever is
    sound needs some time, too."""
    return 0.5 if fault == "silent" else 30.0


def document(body: bytes) -> KVTransferParams:
    """Our document in a leg."""
    return parse(json.loads(body)["kv_transfer_params"]["kvparams"])


def answer_to(ids: list[int], tokens: int) -> list[int]:
    """The answer to a prompt of these ids."""
    return [65 + (len(ids) + number) % 26 for number in range(tokens)]


class Actor:
    """See the module. Every POST is answered well, unless `faults` are left or `breaks_after` is set."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.port = 0
        self.fault: Fault | None = None
        self.faults = 0
        """How many of the next legs go wrong as `fault` says."""
        self.breaks_after: int | None = None
        """So many events of the next streams are sent; then the connection is lost ..."""
        self.breaks_with: dict[str, Any] | bytes | None = None
        """... or this event and the end follow, as if it were whole."""
        self.broke: Callable[[], None] | None = None
        """Hears that a stream is about to break."""
        self.held: asyncio.Event | None = None
        """Where it is set, legs wait for it before they are answered."""
        self.held_page: asyncio.Event | None = None
        """Where it is set, pages wait for it."""
        self.pause_s = 0.0
        """Before each answer, and behind each event of a stream."""
        self.stalled: asyncio.Event | None = None
        """Where it is set, streams wait for it behind each event."""
        self.refusal_status = b"404 Not Found"
        self.lease_ms: int | None = None
        """How long prefill says it keeps what it has computed."""
        self.bodies: list[bytes] = []
        """Of legs."""
        self.releases: list[dict[str, Any]] = []
        """KV params of requests that only give KV back: they are always answered well."""
        self.open = 0
        """Legs that have not been answered yet."""
        self._server: asyncio.Server
        self._connections: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def documents(self) -> list[KVTransferParams]:
        """Our document in each leg."""
        return [document(body) for body in self.bodies]

    def fails(self, fault: Fault, times: int = 1_000_000) -> None:
        """From now on, so often."""
        self.fault, self.faults = fault, times

    async def begin(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def end(self) -> None:
        """Be gone, as a process that was killed."""
        self._server.close()
        for writer in self._connections:
            writer.transport.abort()

    def page(self, path: str) -> bytes:
        """Returns what it answers to a GET."""
        return MODELS

    def refusal(self, asked: dict[str, Any]) -> bytes | None:
        """Returns the body with which it refuses a leg with `refusal_status`, or None if it runs it."""
        return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET"):
                    page = self.page(head.split(b" ")[1].decode())
                    if self.held_page is not None:
                        await self.held_page.wait()
                    writer.write(_whole(page))
                    continue
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                asked = json.loads(body)
                if head.startswith(b"POST /v1/kvparams") or "kvparams" not in asked.get("kv_transfer_params", _OURS):
                    self.releases.append(asked["kv_transfer_params"])
                    writer.write(_whole(b"{}"))
                    continue
                self.bodies.append(body)
                self.open += 1
                try:
                    await self._leg(asked, reader, writer)
                finally:
                    self.open -= 1
        self._connections.discard(writer)
        writer.close()

    async def _leg(self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.faults > 0 and self.fault is not None:
            self.faults -= 1
            await self._go_wrong(self.fault, reader, writer)
            return
        if self.held is not None:
            await self.held.wait()
            if writer.is_closing():  # it has ended meanwhile
                raise ConnectionResetError
        if self.pause_s:
            await asyncio.sleep(self.pause_s)
        if (refusal := self.refusal(asked)) is not None:
            writer.write(_whole(refusal, self.refusal_status))
            return
        if asked.get("stream"):
            await self._stream(asked, writer)
        else:
            writer.write(_whole(json.dumps(self._answer(asked)).encode()))

    async def _go_wrong(self, fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if fault == "gone":
            self.end()
            raise ConnectionResetError
        if fault == "reset":
            raise ConnectionResetError
        if fault == "silent":
            await reader.read()
        writer.write(
            {
                "500": b"HTTP/1.1 500 X\r\ncontent-length: 2\r\n\r\n{}",
                "garbage": _whole(b"<html>oops</html>"),
                "not http": b"SSH-2.0-OpenSSH_9\r\n\r\n",
                "silent": b"",
                "refusal": _whole(b'{"error":{"message":"too long","param":"prompt","code":400}}', b"400 Bad Request"),
            }[fault]
        )

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        prompt, answer = _prompt(asked), self._ids(asked)
        text = "".join(map(chr, answer))
        said: dict[str, Any] = {"message": {"content": text}} if "messages" in asked else {"text": text}
        found: dict[str, Any] = {
            "id": "x",
            "choices": [{"index": 0, **said, "finish_reason": "length"}],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(answer), "total_tokens": 0},
        }
        if self.role == "prefill":
            theirs = parse(asked["kv_transfer_params"]["kvparams"])
            found["kv_transfer_params"] = dict(NIXL)
            if theirs.mode in ("store", "rendezvous"):
                result = theirs.model_copy(update={"phase": "prefill_result", "load_keys": (f"k{len(self.bodies)}",)})
                found["kv_transfer_params"] = {"kvparams": json.loads(result.model_dump_json(exclude_unset=True))}
                if self.lease_ms is not None:
                    found["kv_transfer_params"]["kvparams"]["lease"] = {"ttl_ms": self.lease_ms}
        return found

    def _ids(self, asked: dict[str, Any]) -> list[int]:
        limit = asked.get("max_completion_tokens") or asked.get("max_tokens") or 16
        return answer_to(_prompt(asked), limit)

    async def _stream(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        left = self.breaks_after
        for event in self._events(asked):
            if left == 0:
                if self.broke is not None:
                    self.broke()
                if self.breaks_with is None:
                    writer.write_eof()  # unlike a reset, it arrives behind what was sent
                    raise ConnectionResetError
                writer.write(_event(self.breaks_with) + _event(b"[DONE]"))
                break
            left = None if left is None else left - 1
            writer.write(_event(event))
            await writer.drain()
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
            if self.stalled is not None:
                await self.stalled.wait()
        writer.write(b"0\r\n\r\n")

    def _events(self, asked: dict[str, Any]) -> list[dict[str, Any] | bytes]:
        chat, with_ids = "messages" in asked, bool(asked.get("return_token_ids"))
        prompt, answer = _prompt(asked), self._ids(asked)
        head = {"id": f"engine-{self.port}", "created": self.port, "model": "stub"}
        head["object"] = "chat.completion.chunk" if chat else "text_completion"
        events: list[dict[str, Any] | bytes] = []
        ids: dict[str, Any] = {"prompt_token_ids": prompt} if with_ids else {}
        if chat:
            first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            events.append({**head, "choices": [first], **ids})
            ids = {}
        for number, token in enumerate(answer, 1):
            finish = "length" if number == len(answer) else None
            said: dict[str, Any] = {"delta": {"content": chr(token)}} if chat else {"text": chr(token)}
            choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish, **ids}
            if finish or not chat:
                choice["stop_reason"] = None
            events.append({**head, "choices": [choice | ({"token_ids": [token]} if with_ids else {})]})
            ids = {}
        options: dict[str, Any] = asked.get("stream_options") or {}
        if options.get("include_usage"):
            total = len(prompt) + len(answer)
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(answer), "total_tokens": total}
            events.append({**head, "choices": [], "usage": usage})
        return [*events, b"[DONE]"]


def _prompt(asked: dict[str, Any]) -> list[int]:
    given = asked.get("prompt")
    if isinstance(given, list):
        ids = cast("list[object]", given)
        return [token for token in ids if isinstance(token, int)]
    return list((given if isinstance(given, str) else json.dumps(asked["messages"])).encode())


def _event(event: dict[str, Any] | bytes) -> bytes:
    raw = b"data: %b\n\n" % (event if isinstance(event, bytes) else json.dumps(event).encode())
    return b"%x\r\n%b\r\n" % (len(raw), raw)


def _whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body
