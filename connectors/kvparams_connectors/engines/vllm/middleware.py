"""`KVParamsMiddleware`: answers wrong documents with 400 in vLLM's API server.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVParamsConnector", ...}'
        --middleware kvparams_connectors.engines.vllm.middleware.KVParamsMiddleware

vLLM asks connectors in its scheduler, where a request can no longer be refused. There `KVParamsConnector` computes the
prompt of a wrong document and leaves the store alone. This class stands in front, so that a proxy hears of the fault.
It also says in `/v1/models` which versions the engine speaks, and reads `kv_transfer_params` that are JSON text. It has
no settings: it reads those of the connector. The connector verifies again, with a memory of its own.
"""

import json
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final, NoReturn, cast

from kvparams.codec import DOCUMENT_KEY, read_request
from kvparams.errors import InvalidParams, JSONTextError, Problem
from kvparams.jsontext import document as json_document
from kvparams.jsontext.editing import edit
from kvparams.jsontext.scanner import UNLIMITED
from kvparams.params import KVTransferParams
from kvparams.signing.keyring import SigningKeyringError
from kvparams.signing.request_verifier import RequestVerifier
from kvparams.signing.verification import UntrustedParams
from kvparams.versions import SUPPORTED_VERSIONS
from kvparams_connectors.engines.process_start import process_start_time
from kvparams_connectors.engines.vllm.settings import VLLMSettings
from kvparams_connectors.store_url import StoreError

__all__ = ["KVParamsMiddleware"]

_CARRIER: Final = "kv_transfer_params"
_NAME: Final = "KVParamsConnector"
_PHASES: Final = ("prefill", "decode")
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
        self._gate: _Gate | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or refuses it."""
        if scope["type"] == "lifespan" and self._gate is None:
            self._gate = _Gate(scope["app"].state.vllm_config.kv_transfer_config)
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["method"] == "POST" and scope["path"] != _CONTROL:
            await self._post(scope, receive, send)
        elif scope["method"] == "GET" and scope["path"] == "/v1/models":
            await self._app(scope, receive, _WithVersions(send))
        else:
            await self._app(scope, receive, send)

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, last = await _read(receive)
        if last["type"] == "http.request" and (_CARRIER.encode() in body or b"\\u" in body):
            if self._gate is None:
                self._gate = _Gate(scope["app"].state.vllm_config.kv_transfer_config)
            try:
                body = self._gate.judge(body)
            except InvalidParams as error:
                problem = error.problems[0]
                await _refuse(send, str(error), ".".join(map(str, (_CARRIER, *problem.path))))
                return
            except UntrustedParams as error:
                await _refuse(send, str(error), _CARRIER)
                return
            scope = {**scope, "headers": _with_length(scope["headers"], len(body))}
        pending: list[Message] = [{**last, "body": body, "more_body": False} if "body" in last else last]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)


class _Gate:
    """Judges bodies, with the settings of the connector."""

    def __init__(self, transfer: Any) -> None:
        settings = VLLMSettings.of(_extra_config(transfer))
        self._recomputes: Final = transfer.kv_load_failure_policy != "fail"
        self._verifier: RequestVerifier | None = None
        if settings.verify_with is not None and settings.audience is not None:
            try:
                self._verifier = RequestVerifier(
                    settings.verify_with, settings.audience, time.time, since=process_start_time()
                )
            except SigningKeyringError as error:
                raise StoreError(f"kv_connector_extra_config.verify_with: {error}") from error

    def judge(self, body: bytes) -> bytes:
        """Returns the body for vLLM, in which `kv_transfer_params` is an object.

        Raises:
            InvalidParams: it breaks the protocol, or asks for what this engine does not do.
            UntrustedParams: it is not signed as it has to be.
        """
        try:
            found, spans = json_document.load_object(body, UNLIMITED)
        except JSONTextError as error:
            if _CARRIER.encode() not in body:
                return body  # vLLM says what is wrong with it
            raise InvalidParams((Problem((), "json", str(error)),)) from None
        carrier = found.get(_CARRIER)
        if carrier is None:
            return body
        params = self._read(carrier)
        if params is not None:
            self._check_role(params)
        if isinstance(carrier, str):
            body = edit(body, spans, {_CARRIER: carrier.encode()})
        return body

    def _read(self, carrier: object) -> KVTransferParams | None:
        told = cast("Mapping[str, object] | str", carrier)  # anything else is a problem of the kind `type`
        has_document = not isinstance(told, Mapping) or DOCUMENT_KEY in told  # a trio is for the connector alone
        params = read_request(told, request_id="-") if has_document else None
        return params if self._verifier is None else self._verifier.verify(told)

    def _check_role(self, params: KVTransferParams) -> None:
        if params.phase not in _PHASES:
            _raise("phase", "does not belong to a request for tokens")
        if params.mode == "store" and params.on_load_failure == "fail" and self._recomputes:
            _raise("on_load_failure", "this engine recomputes; `fail` needs kv_load_failure_policy `fail`")


def _raise(member: str, text: str) -> NoReturn:
    raise InvalidParams((Problem(("kvparams", member), "value", text),))


def _extra_config(transfer: Any) -> Mapping[str, object] | None:
    """Returns what was configured for our connector, which may be one of MultiConnector's.

    Raises:
        StoreError: it is not configured.
    """
    if transfer is not None:
        config = cast("Mapping[str, Any]", transfer.kv_connector_extra_config or {})
        if transfer.kv_connector == _NAME:
            return config
        children = cast("list[Mapping[str, Any]]", config.get("connectors", []))
        for child in children:
            if child.get("kv_connector") == _NAME:
                return child.get("kv_connector_extra_config")
    raise StoreError(f"KVParamsMiddleware needs --kv-transfer-config with kv_connector {_NAME}")


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


async def _read(receive: Receive) -> tuple[bytes, Message]:
    """Returns the body of a request, and the last message, which says whether the client has left."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            return b"".join(parts), message


async def _refuse(send: Send, message: str, param: str) -> None:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _with_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    """Returns the headers of a body of this length."""
    others = [(name, value) for name, value in headers if name.lower() not in (b"content-length", b"transfer-encoding")]
    return [*others, (b"content-length", b"%d" % length)]
