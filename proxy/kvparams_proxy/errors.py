"""Errors reported to clients, in the OpenAI format.

A message says what is wrong and what to do. It never contains addresses or internals of engines.
"""

import json

__all__ = ["ProxyError"]


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

    def body(self) -> bytes:
        """The OpenAI error object as JSON text."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False, separators=(",", ":")).encode()

    def headers(self) -> bytes:
        """Header lines beside content-type."""
        return b"" if self.retry_after_s is None else b"retry-after: %d\r\n" % self.retry_after_s

    def sse_event(self, *, sends_done_event: bool) -> bytes:
        """Returns the error as one server-sent event, for a stream that has begun.

        Args:
            sends_done_event: whether the endpoint's streams end with `[DONE]`, as all but those of `/v1/responses` do.

        Source of the shape that `/v1/responses` has: OpenAI's API reference, streaming events, `error`.
        """
        if sends_done_event:
            return b"data: " + self.body() + b"\n\n"
        error = {"type": "error", "code": self.code or self.kind, "message": self.message, "param": self.param}
        return b"event: error\ndata: %b\n\n" % json.dumps(error, ensure_ascii=False, separators=(",", ":")).encode()
