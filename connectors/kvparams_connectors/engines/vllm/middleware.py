"""`KVParamsMiddleware`: answers wrong documents with 400 in vLLM's API server.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVParamsConnector", ...}'
        --middleware kvparams_connectors.engines.vllm.middleware.KVParamsMiddleware

vLLM asks connectors in its scheduler, where a request can no longer be refused. There `KVParamsConnector` computes the
prompt of a wrong document and leaves the store alone. This class stands in front, so that a proxy hears of the fault.
It also says in `/v1/models` which versions the engine speaks, and reads `kv_transfer_params` that are JSON text. It has
no settings: it reads those of the connector. The connector verifies again, with a memory of its own.

vLLM puts this class around its check of API keys (`serve/middleware/register.py`, vLLM 0.32). So a body is read, and
judged, when the application asks for it: without a key vLLM answers 401 and never asks.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from email.message import Message as HeaderFields
from typing import Any, Final

from kvparams.errors import InvalidParams
from kvparams.signing.verification import UntrustedParams
from kvparams.versions import SUPPORTED_VERSIONS
from kvparams_connectors.engines.vllm.body_gate import CARRIER, BodyGate
from kvparams_connectors.store_url import StoreError

__all__ = ["MAX_BODY_BYTES", "KVParamsMiddleware"]

MAX_BODY_BYTES: Final = 64 << 20
"""The longest JSON body that is judged, images in it included; a longer one is answered with 413."""
_PART_BYTES: Final = 256 << 10
"""The application gets a longer body in parts: copied at once, it would hold up the event loop."""
_CONTROL: Final = "/v1/kvparams"
"""`release` and `cancel`; vLLM does not have this path."""

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class KVParamsMiddleware:
    """See the module. An ASGI application around vLLM's."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._gate: BodyGate | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] == "lifespan":
            try:
                self._gate_of(scope)
            except StoreError as error:  # raised, it would pass for an application without a lifespan
                await receive()
                await send({"type": "lifespan.startup.failed", "message": str(error)})
                return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] == "POST" and scope["path"] != _CONTROL and _is_json(scope):
            await _JudgedRequest(self._gate_of(scope), receive, send).run(self._app, scope)
        elif scope["method"] == "GET" and scope["path"] == "/v1/models":
            await self._app(scope, receive, _WithVersions(send))
        else:
            await self._app(scope, receive, send)

    def _gate_of(self, scope: Scope) -> BodyGate:
        """Returns the gate, which is made once.

        Raises:
            StoreError: vLLM is not configured for it.
        """
        if self._gate is None:
            self._gate = BodyGate(scope["app"].state.vllm_config.kv_transfer_config)
        return self._gate


def _is_json(scope: Scope) -> bool:
    """Returns whether vLLM reads the body of a request for tokens as JSON: FastAPI 0.136 tells so, in `routing.py`."""
    for name, value in scope["headers"]:
        if name.lower() == b"content-type":
            fields = HeaderFields()
            fields["content-type"] = value.decode("latin-1")
            subtype = fields.get_content_subtype()
            is_json = subtype == "json" or subtype.endswith("+json")
            return is_json and fields.get_content_maintype() == "application"
    return False


class _JudgedRequest:
    """A `_JudgedRequest` gathers and judges the body of one request when the application first asks for it."""

    def __init__(self, gate: BodyGate, receive: Receive, send: Send) -> None:
        self._gate, self._receive, self._send = gate, receive, send
        self._body = bytearray()
        self._is_whole = self._is_refused = self._is_answered = False
        self._at: int | None = None
        """How much of the judged body the application has; None: it is not judged."""
        self._lock = asyncio.Lock()

    async def run(self, app: App, scope: Scope) -> None:
        """Lets the application answer, unless the request is refused meanwhile."""
        try:
            await app(scope, self._next_message, self._pass_on)
        except Exception:
            if not self._is_refused:
                raise
            # To the application the client has left, which it may report so.

    async def _pass_on(self, message: Message) -> None:
        """Sends what the application answers; after a refusal nothing is left to answer."""
        if not self._is_refused:
            self._is_answered = True
            await self._send(message)

    async def _next_message(self) -> Message:
        async with self._lock:
            if self._at is None and not self._is_refused and not self._is_answered:
                left = await self._gather()
                if left is not None:
                    return left
                await self._judge()
            if self._is_refused:
                return {"type": "http.disconnect"}
            if self._at is not None and (self._body or not self._at):
                return self._next_part(self._at)
        return await self._receive()

    def _next_part(self, at: int) -> Message:
        part = bytes(self._body[at : at + _PART_BYTES])
        self._at = at + max(len(part), 1)
        is_last = self._at >= len(self._body)
        if is_last:
            self._body = bytearray()
        return {"type": "http.request", "body": part, "more_body": not is_last}

    async def _gather(self) -> Message | None:
        """Receives the body, as long as it is not too long. Returns the message that says that the client has left."""
        while not self._is_whole and len(self._body) <= MAX_BODY_BYTES:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._body += message.get("body", b"")
            self._is_whole = not message.get("more_body")
        return None

    async def _judge(self) -> None:
        if len(self._body) > MAX_BODY_BYTES:
            told = f"the body is larger than {MAX_BODY_BYTES} bytes: send less, or refer to images by their URLs"
            await self._refuse(413, told, None)
            return
        try:
            await self._gate.judge(self._body)
        except InvalidParams as error:
            await self._refuse(400, str(error), ".".join(map(str, (CARRIER, *error.problems[0].path))))
        except UntrustedParams as error:
            await self._refuse(400, str(error), CARRIER)
        else:
            self._at = 0

    async def _refuse(self, status: int, message: str, param: str | None) -> None:
        self._is_refused = True
        self._body = bytearray()
        error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
        body = json.dumps({"error": error}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


class _WithVersions:
    """Adds the versions of the protocol to the answer of `/v1/models`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        """Holds an answer of 200 back until it is whole."""
        if message["type"] == "http.response.start" and message["status"] == 200:
            self._start = message
            return
        if self._start is None or message["type"] != "http.response.body":
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        body = json.dumps({**json.loads(self._body), "kvparams_versions": SUPPORTED_VERSIONS}).encode()
        await self._send({**self._start, "headers": _with_length(self._start["headers"], len(body))})
        await self._send({"type": "http.response.body", "body": body})


def _with_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    """Returns the headers of a body of this length."""
    others = [(name, value) for name, value in headers if name.lower() not in (b"content-length", b"transfer-encoding")]
    return [*others, (b"content-length", b"%d" % length)]
