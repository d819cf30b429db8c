"""`BodyGate`: judges bodies of requests to vLLM, with the settings of the connector."""

import asyncio
import json
import time
from collections.abc import Generator, Mapping
from typing import Any, Final, NamedTuple, NoReturn, TypeVar, cast

from kvparams.codec import DOCUMENT_KEY, read_request
from kvparams.errors import InvalidParams, JSONTextError, Problem
from kvparams.jsontext.document import AT_ONCE_BYTES, loads, read_object
from kvparams.jsontext.receivers import OPEN_OBJECT, TreeBuilder
from kvparams.jsontext.scanner import DEFAULT_LIMITS, JSONLimits
from kvparams.params import KVTransferParams
from kvparams.signing.keyring import SigningKeyringError
from kvparams.signing.request_verifier import RequestVerifier
from kvparams_connectors.engines.process_start import process_start_time
from kvparams_connectors.engines.vllm.body_members import ValueSpan, find_values, may_have_member
from kvparams_connectors.engines.vllm.settings import VLLMSettings
from kvparams_connectors.store_url import StoreError

__all__ = ["CARRIER", "BodyGate"]

CARRIER: Final = "kv_transfer_params"
_NAME: Final = "KVParamsConnector"
_PHASES: Final = ("prefill", "decode")
_LIMITS: Final = JSONLimits(max_bytes=8 << 20)
"""Of a member's value with a document in it: 65,536 keys of 100 characters, as many as a document may have."""
_TEXT_LIMITS: Final = JSONLimits(max_bytes=4 << 20)
"""Of a value that is text, which is read in one step."""
_MOST_VALUES: Final = 70_000
"""In it, at any depth."""
_ASIDE_BYTES: Final = 64 << 10
"""A longer value is validated in a thread: with a signature it would hold up the event loop."""
_UTF8: Final = ("utf-8", "utf-8-sig")

T = TypeVar("T")


class _Member(NamedTuple):
    """`kv_transfer_params` of a body."""

    span: ValueSpan
    spelled: bytes | None
    """The text that it is; None where it is no text."""
    value: object


class BodyGate:
    """Judges bodies. See the module."""

    def __init__(self, transfer: Any) -> None:
        """`transfer`: vLLM's `KVTransferConfig`.

        Raises:
            StoreError: the connector is not configured, or its keys cannot be read.
        """
        settings = VLLMSettings.of(_extra_config(transfer))
        self._lock: Final = asyncio.Lock()
        self._recomputes: Final = transfer.kv_load_failure_policy != "fail"
        self._verifier: RequestVerifier | None = None
        if settings.verify_with is not None and settings.audience is not None:
            try:
                self._verifier = RequestVerifier(
                    settings.verify_with, settings.audience, time.time, since=process_start_time()
                )
            except SigningKeyringError as error:
                raise StoreError(f"kv_connector_extra_config.verify_with: {error}") from error

    async def judge(self, body: bytearray) -> None:
        """Judges a body in steps of bounded work. Text in `kv_transfer_params` becomes the object that it spells.

        The length of the body stays. What is wrong elsewhere in it is for vLLM to tell.

        Raises:
            InvalidParams: it breaks the protocol, or asks for what this engine does not do.
            UntrustedParams: it is not signed as it has to be.
        """
        member = await _in_steps(self._read_in_steps(body))
        if member is None:
            return
        if member.value is not None:  # whoever stops waiting does not let the next one in
            await asyncio.shield(self._check_alone(member))
        if member.spelled is not None:
            start, end = member.span
            body[start:end] = member.spelled.ljust(end - start)  # without quotes and escapes it is shorter

    def _read_in_steps(self, body: bytearray) -> "Generator[None, None, _Member | None]":
        """Returns the member to check; None where there is none, or nothing in it is for this connector."""
        encoding = json.detect_encoding(body)
        if encoding not in _UTF8:  # vLLM would read it
            raise _not_plain(f"the body is {encoding.upper()}: send it as UTF-8")
        if not (yield from may_have_member(body, CARRIER.encode())):
            return None
        try:
            spans = yield from find_values(body, CARRIER.encode(), DEFAULT_LIMITS)
            if not spans:
                return None
            if len(spans) > 1:
                raise _not_plain("stands twice in the body")
            text = bytes(body[spans[0].start : spans[0].end])
            spelled = _spelled(text)
            if spelled is None and self._verifier is None and not (yield from _may_have_document(text)):
                return None
            return _Member(spans[0], spelled, (yield from _value(text if spelled is None else spelled)))
        except JSONTextError as error:
            raise _not_plain(str(error)) from None

    async def _check_alone(self, member: "_Member") -> None:
        async with self._lock:  # a verifier is not for several threads at once
            if member.span.end - member.span.start > _ASIDE_BYTES:
                await asyncio.to_thread(self._check, member.value)
            else:
                self._check(member.value)

    def _check(self, carrier: object) -> None:
        if not isinstance(carrier, dict):
            raise InvalidParams((Problem((), "type", "should be an object"),))
        told = cast("dict[str, object]", carrier)
        # A trio is for the connector alone.
        params = read_request(told, request_id="-") if DOCUMENT_KEY in told else None
        if self._verifier is not None:
            params = self._verifier.verify(told)
        if params is not None:
            self._check_role(params)

    def _check_role(self, params: KVTransferParams) -> None:
        if params.phase not in _PHASES:
            _raise("phase", "does not belong to a request for tokens")
        if params.mode == "store" and params.on_load_failure == "fail" and self._recomputes:
            _raise("on_load_failure", "this engine recomputes; `fail` needs kv_load_failure_policy `fail`")


async def _in_steps(steps: Generator[None, None, T]) -> T:
    """Returns what the steps lead to; between two of them other requests have their turn."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        await asyncio.sleep(0)


def _spelled(text: bytes) -> bytes | None:
    """Returns the text that a JSON string holds; None for any other value."""
    if not text.startswith(b'"'):
        return None
    return str(loads(text, _TEXT_LIMITS)).encode()


def _may_have_document(text: bytes) -> Generator[None, None, bool]:
    """Returns False for a long object without a document: the token ids of a trio, or another connector's blocks."""
    if len(text) <= AT_ONCE_BYTES or not text.startswith(b"{"):
        return True
    return bool((yield from find_values(text, DOCUMENT_KEY.encode(), DEFAULT_LIMITS)))


def _value(text: bytes) -> Generator[None, None, object]:
    """Reads a value of any length."""
    if len(text) <= AT_ONCE_BYTES:
        return loads(text, _LIMITS)
    built = TreeBuilder(OPEN_OBJECT, _MOST_VALUES)
    yield from read_object(text, built, _LIMITS)
    return built.value


def _not_plain(why: str) -> InvalidParams:
    return InvalidParams((Problem((), "json", why),))


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
