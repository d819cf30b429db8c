"""What a client is told when something goes wrong, in the OpenAI shape.

The one rule: the message says what is wrong and what to do; addresses and the inside of engines are never in it.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from kvparams.errors import JSONTextError
from kvparams.jsontext.document import JSONLimits, load_object
from kvparams_proxy.execution.response_privacy import EngineAddresses, embedded_error, public_error
from kvparams_proxy.requests.endpoints import APIEndpoint

__all__ = ["ProxyError", "engine_error_response", "reported_engine_error"]

_LIMITS: Final = JSONLimits(max_bytes=64 << 10, max_containers=1_000, max_strings=4_000)
"""Of an engine's error that is read; of a longer one the client learns the status."""


class ProxyError(Exception):
    """An answer other than the one the client hoped for. `kind` is OpenAI's error `type`."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        code: str | int | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        """When it is worth asking again: the `Retry-After` header."""
        self.detail: str | None = None
        """What the operator may know besides; it goes to the log, never to the client."""
        self.model: str | None = None
        """Which model was asked for, where the error is about a request of which no more is known."""

    @property
    def name(self) -> str:
        """Which error it is, in one word: for what is told of requests."""
        return self.kind if self.code is None else str(self.code)

    def body(self) -> bytes:
        """The OpenAI error object as JSON text."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False, separators=(",", ":")).encode()

    def headers(self) -> bytes:
        """Header lines beside content-type."""
        return b"" if self.retry_after_s is None else b"retry-after: %d\r\n" % self.retry_after_s

    def sse_event(self, endpoint: APIEndpoint) -> bytes:
        """The same as one server-sent event, for a stream of this endpoint that has begun.

        Source of the shape that `/v1/responses` has: OpenAI's API reference, streaming events, `error`.
        """
        if endpoint.sends_done_event:
            return b"data: " + self.body() + b"\n\n"
        error = {"type": "error", "code": self.code or self.kind, "message": self.message, "param": self.param}
        return b"event: error\ndata: %b\n\n" % json.dumps(error, ensure_ascii=False, separators=(",", ":")).encode()


def engine_error_response(
    role: str, status: int, raw: bytes, addresses: EngineAddresses, sent: bytes, *, own_key: bool = True
) -> ProxyError:
    """What an engine's answer other than 200 means for the client.

    A 4xx is about the client's request: its message, param and code are passed on, unless it is about KV params or
    credentials, which are not the client's. Anything else is the engine's own trouble, of which the client learns only
    the status.
    """
    document: Mapping[str, object] = {}
    with suppress(JSONTextError):
        document, _ = load_object(raw, _LIMITS)
    return reported_engine_error(role, status, embedded_error(document) or document, addresses, sent, own_key=own_key)


def reported_engine_error(
    role: str,
    status: int,
    error: Mapping[str, object],
    addresses: EngineAddresses,
    sent: bytes,
    *,
    own_key: bool = True,
) -> ProxyError:
    """The same of an error object; `sent` is the client's body: what stands in it is no secret. `own_key`: the engine
    was shown a key of ours, or none, and not the client's."""
    message, param = error.get("message"), error.get("param")
    failed = ProxyError(502, "upstream_error", f"the {role} engine answered {status}", code=f"{role}_failed")
    failed.detail = message if isinstance(message, str) else None
    if own_key and status in (401, 403):
        failed.message, failed.code = f"the {role} engine refuses the proxy's credentials", f"{role}_unauthorized"
        return failed
    if not 400 <= status < 500:
        return failed
    if isinstance(param, str) and f"{param}.".startswith("kv_transfer_params."):
        failed.message = f"the {role} engine refuses the KV params; is --connector right for it?"
        return failed
    plain = public_error(error, addresses, sent)
    refused = ProxyError(
        status,
        plain.kind or "invalid_request_error",
        plain.message or f"the {role} engine refused the request ({status})",
        param=plain.param,
        code=plain.code,
    )
    refused.detail = None if plain.message else failed.detail
    return refused
