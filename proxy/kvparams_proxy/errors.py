"""Errors reported to clients, in the form of the API that they use.

A message says what is wrong and what to do. It never contains addresses or internals of engines.
"""

import json
from typing import Final, Literal

__all__ = ["ErrorForm", "ProxyError"]

ErrorForm = Literal["openai", "responses", "anthropic"]
"""The form of errors. That of `/v1/responses` is OpenAI's but for errors in streams."""

_ANTHROPIC: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error types by status. Source: Anthropic's API reference, errors. Theirs of 529 is ours of 503."""


class ProxyError(Exception):
    """An error response to the client. `kind` is OpenAI's error `type`."""

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
        """The error's short name, used in logs, metrics and traces."""
        return self.kind if self.code is None else str(self.code)

    def body(self, form: ErrorForm = "openai") -> bytes:
        """The error object as JSON text, in the form of an API."""
        if form == "anthropic":
            return _text(self._anthropic())
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return _text({"error": error})

    def _anthropic(self) -> dict[str, object]:
        kind = _ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def headers(self) -> bytes:
        """Header lines beside content-type."""
        return b"" if self.retry_after_s is None else b"retry-after: %d\r\n" % self.retry_after_s

    def sse_event(self, form: ErrorForm = "openai") -> bytes:
        """Returns the error as one server-sent event, for a stream that has begun.

        Source of the form of `/v1/responses`: OpenAI's API reference, streaming events, `error`.
        """
        if form == "openai":
            return b"data: " + self.body() + b"\n\n"
        if form == "anthropic":
            return b"event: error\ndata: %b\n\n" % _text(self._anthropic())
        error = {"type": "error", "code": self.code or self.kind, "message": self.message, "param": self.param}
        return b"event: error\ndata: %b\n\n" % _text(error)


def _text(document: object) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
