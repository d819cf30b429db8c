"""Asks an external endpoint picker where a request should go: the part that Envoy has in the protocol."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import grpc
from grpc import aio

from kvparams_proxy.ext_proc.message_types import ProcessingRequest, ProcessingResponse
from kvparams_proxy.ext_proc.messages import DESTINATION, NAMESPACE, SERVICE, SUBSET, SUBSET_NAMESPACE

__all__ = ["PickerClient", "PickerFailed", "PickerQuestion"]

_grpc: Final[Any] = grpc
_aio: Final[Any] = aio
_FULL_DUPLEX_STREAMED: Final = 4
"""`ProcessingMode.BodySendMode`, of Envoy's processing_mode.proto."""
_CHUNK_BYTES: Final = 62_000
_MOST_MESSAGES: Final = 16
"""Messages that are read before one that names an endpoint."""

FailureReason = Literal["timeout", "unreachable", "refused", "format"]


class PickerFailed(Exception):
    """The picker has named no endpoint."""

    def __init__(self, reason: FailureReason, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason: Final[FailureReason] = reason


class PickerQuestion(NamedTuple):
    """A request, as the picker is shown it."""

    path: str
    request_id: str
    body: Sequence[bytes | memoryview]
    """In pieces."""
    endpoints: Sequence[str]
    """Those to choose from, `ip:port` each."""


class PickerClient:
    """The connection to one picker, for the event loop that makes it."""

    def __init__(self, target: str, has_tls: bool, timeout_s: float) -> None:
        """Creates the connection, which is opened when it is needed.

        Args:
            target: `host:port`.
            has_tls: whether it speaks TLS, with the system's authorities.
            timeout_s: how long an answer may take.
        """
        # The picker of this machine's own network is reached directly, whatever the environment says of proxies.
        options = [("grpc.enable_http_proxy", 0)]
        if has_tls:
            self._channel: Any = _aio.secure_channel(target, _grpc.ssl_channel_credentials(), options)
        else:
            self._channel = _aio.insecure_channel(target, options)
        self._timeout_s = timeout_s
        self._process: Any = self._channel.stream_stream(
            f"/{SERVICE}/Process", ProcessingRequest.SerializeToString, ProcessingResponse.FromString
        )

    async def ask(self, question: PickerQuestion) -> list[str]:
        """Returns the endpoints that the picker names, in its order.

        Raises:
            PickerFailed: it names none in time.
        """
        call: Any = self._process()
        try:
            async with asyncio.timeout(self._timeout_s):
                for message in _messages(question):
                    await call.write(message)
                for _ in range(_MOST_MESSAGES):
                    answer: Any = await call.read()
                    if answer is _aio.EOF:
                        raise PickerFailed("format", "the picker has ended the stream")
                    if (endpoints := _endpoints(answer)) is not None:
                        return endpoints
                raise PickerFailed("format", "the picker names no endpoint")
        except TimeoutError:
            raise PickerFailed("timeout") from None
        except (_aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise PickerFailed("unreachable", str(error)) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()


def _messages(question: PickerQuestion) -> list[Any]:
    """Returns the messages that show a request."""
    body = b"".join(question.body)
    headers = {
        ":method": "POST",
        ":path": question.path,
        ":scheme": "http",
        ":authority": "kvparams",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": question.request_id,
    }
    first = ProcessingRequest()
    for name, value in headers.items():
        first.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    first.metadata_context.filter_metadata[SUBSET_NAMESPACE].update({SUBSET: list(question.endpoints)})
    first.protocol_config.request_body_mode = _FULL_DUPLEX_STREAMED
    messages = [first]
    for start in range(0, max(1, len(body)), _CHUNK_BYTES):
        piece = ProcessingRequest()
        piece.request_body.body = body[start : start + _CHUNK_BYTES]
        piece.request_body.end_of_stream = start + _CHUNK_BYTES >= len(body)
        messages.append(piece)
    return messages


def _endpoints(answer: Any) -> list[str] | None:
    """Returns the endpoints that a message names, or None if it names none.

    Raises:
        PickerFailed: the picker refuses the request.
    """
    kind = answer.WhichOneof("response")
    if kind == "immediate_response":
        raise PickerFailed("refused", f"the picker answers {answer.immediate_response.status.code}")
    named = ""
    if NAMESPACE in answer.dynamic_metadata.fields:
        fields = answer.dynamic_metadata.fields[NAMESPACE].struct_value.fields
        named = fields[DESTINATION].string_value if DESTINATION in fields else ""
    if not named and kind in ("request_headers", "request_body"):
        for each in getattr(answer, kind).response.header_mutation.set_headers:
            if each.header.key.lower() == DESTINATION:
                named = each.header.raw_value.decode("latin-1") or each.header.value
    endpoints = [part for each in named.split(",") if (part := each.strip())]
    return endpoints or None
