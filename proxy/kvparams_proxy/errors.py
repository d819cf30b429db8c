"""What a client is told when something goes wrong, in the OpenAI shape.

The one rule: the message says what is wrong and what to do; addresses and the inside of engines are never in it.
"""

import json
from typing import cast

from kvparams.errors import JSONTextError
from kvparams.jsontext import load_object

__all__ = ["ProxyError", "engine_refusal"]


class ProxyError(Exception):
    """An answer other than the one the client hoped for. `kind` is OpenAI's error `type`."""

    def __init__(
        self, status: int, kind: str, message: str, *, param: str | None = None, code: str | int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.detail: str | None = None
        """What the operator may know besides; it goes to the log, never to the client."""

    def body(self) -> bytes:
        """The OpenAI error object as JSON text."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False, separators=(",", ":")).encode()

    def event(self) -> bytes:
        """The same as one server-sent event, for a stream that has begun."""
        return b"data: " + self.body() + b"\n\n"


def engine_refusal(role: str, status: int, raw: bytes) -> ProxyError:
    """What an engine's answer other than 200 means for the client.

    A 4xx is about the client's request: its message, param and code are passed on, unless it is about KV params, which
    are never the client's. Anything else is the engine's own trouble, of which the client learns only the status.
    """
    failed = ProxyError(502, "upstream_error", f"the {role} engine answered {status}", code=f"{role}_failed")
    if not 400 <= status < 500:
        return failed
    try:
        document, _ = load_object(raw)
    except JSONTextError:
        document = {}
    inner = document.get("error")
    error = cast("dict[str, object]", inner) if isinstance(inner, dict) else document
    message, kind, param, code = (error.get(name) for name in ("message", "type", "param", "code"))
    if isinstance(param, str) and param.startswith("kv_transfer_params"):
        failed.message = f"the {role} engine refuses the KV params; is --connector right for it?"
        failed.detail = message if isinstance(message, str) else None
        return failed
    return ProxyError(
        status,
        kind if isinstance(kind, str) else "invalid_request_error",
        message if isinstance(message, str) else f"the {role} engine refused the request ({status})",
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str | int) else None,
    )
