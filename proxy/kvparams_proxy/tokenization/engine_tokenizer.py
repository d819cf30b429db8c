"""Gets token ids from the engine's own `/tokenize`, for a model whose tokenizer is not at hand.

The question has a short time limit. An engine that is slow, busy or does not know the path is not waited for, and is
not marked as broken.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import Final, cast

from pydantic_core import to_json

from kvparams.errors import JSONTextError
from kvparams.instances import Role
from kvparams.jsontext.document import read_object
from kvparams.jsontext.receivers import SHORT_BYTES, AbridgedObjectReceiver
from kvparams.jsontext.scanner import UNLIMITED, MemberSpan
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.event_loop.deadlines import Deadlines
from kvparams_proxy.fleet.member import Member
from kvparams_proxy.fleet.upstream_pools import UpstreamPools
from kvparams_proxy.requests.endpoints import EndpointKind
from kvparams_proxy.requests.intake import ParsedRequest
from kvparams_proxy.requests.long_body_receivers import TokenIdsReceiver, token_id_array
from kvparams_proxy.tokenization.chat_conversion import as_chat
from kvparams_proxy.tokenization.errors import UnsupportedChatError
from kvparams_proxy.upstream.interface import ExchangeHandle
from kvparams_proxy.upstream.types import ResponseCollector, ResponseHead, UpstreamError

__all__ = ["EngineTokenizer", "build_tokenize_body", "parse_tokenize_response"]

_PATH: Final = b"/tokenize"
_TIMEOUT_S: Final = 0.5
_MOST: Final = 32
"""Questions at a time."""
_ANSWER_BYTES: Final = 8 << 20
_REWRITTEN: Final = ("chat_template_kwargs", "documents", "reasoning_effort")
"""Members of a chat whose values are written anew, into the first one."""
_MEMBERS: Final = {
    "completions": ("model", "prompt", "add_special_tokens"),
    "chat": (
        *("model", "messages", "tools", "add_generation_prompt", "continue_final_message"),
        *("add_special_tokens", "chat_template", "chat_template_kwargs", "mm_processor_kwargs"),
    ),
}
"""What `/tokenize` reads of a request (vLLM 0.32.0 entrypoints/serve/tokenize/protocol.py)."""

TokenizeCallback = Callable[[bytes | None], None]


class EngineTokenizer:
    """Asks the engines of a fleet in turn."""

    def __init__(
        self,
        members: Callable[[], Iterable[Member]],
        pools: UpstreamPools,
        watch: Deadlines,
        timeout_s: float = _TIMEOUT_S,
        most: int = _MOST,
    ) -> None:
        """Creates the tokenizer; no engine is asked yet.

        Args:
            members: who is in the fleet now.
            pools: the connections to them.
            watch: knows when the time is over.
            timeout_s: for one question.
            most: so many questions at a time; further ones are not asked.
        """
        self._members = members
        self._pools = pools
        self._watch = watch
        self._timeout_s = timeout_s
        self._most = most
        self._turn = 0
        self._asking = 0

    def request_tokens(self, kind: EndpointKind, inbound: ParsedRequest, answered: TokenizeCallback) -> None:
        """Asks an engine that serves the model, prefill engines first.

        `answered` is called once, with the answer's body or None.
        """
        body = build_tokenize_body(kind, inbound)
        able = [each for each in self._members() if each.available and each.serves(inbound.facts.model)]
        able = [each for each in able if each.instance.role is Role.PREFILL] or able
        if body is None or not able or self._asking >= self._most:
            answered(None)
            return
        self._turn += 1
        pool = self._pools[able[self._turn % len(able)].instance.id]
        self._asking += 1
        question = _TokenizeRequest(self._watch, answered, self._ended)
        question.exchange = pool.exchange(
            pool.request(_PATH, b"", body), ResponseCollector(_ANSWER_BYTES, question.collected)
        )
        self._watch.start(question, self._timeout_s)

    def _ended(self) -> None:
        self._asking -= 1


class _TokenizeRequest:
    """A request to `/tokenize`, until it is answered or its time is over."""

    def __init__(self, watch: Deadlines, answered: TokenizeCallback, ended: Callable[[], None]) -> None:
        self._watch = watch
        self._answered = answered
        self._ended = ended
        self.exchange: ExchangeHandle | None = None

    def collected(self, head: ResponseHead, raw: bytes, error: UpstreamError | None) -> None:
        self._watch.stop(self)
        self._ended()
        self._answered(raw if error is None and head.status == 200 else None)

    def expire(self) -> None:
        if self.exchange is not None:
            self.exchange.abort(UpstreamError("its time is over"))


def build_tokenize_body(kind: EndpointKind, inbound: ParsedRequest) -> bytes | None:
    """Builds the `/tokenize` body for a request, with the client's own members.

    Returns None for a request that it cannot express.
    """
    document = inbound.document
    if kind in ("messages", "responses") and document is not None:
        return (
            _converted_body(kind, {**document, "model": inbound.facts.model}) if inbound.is_document_complete else None
        )
    names = _MEMBERS.get(kind)
    if names is None or document is None or (kind == "completions" and not isinstance(document.get("prompt"), str)):
        return None
    body, spans = inbound.body, inbound.member_spans
    if not inbound.is_document_complete and any(_is_long(spans.get(name)) for name in _REWRITTEN):
        return None
    members = {name: body[spans[name].value : spans[name].end] for name in names if name in spans}
    if (model := inbound.changes.get("model")) is not None:  # the client has said another name
        members["model"] = model
    if kind == "chat":
        further = {name: document[name] for name in _REWRITTEN[1:] if document.get(name) is not None}
        given = document.get("chat_template_kwargs")
        if further and isinstance(given, dict | None):
            effort = document.get("reasoning_effort")
            thinking = {} if effort is None else {"enable_thinking": effort != "none"}
            members["chat_template_kwargs"] = to_json({**thinking, **cast("dict[str, object]", given or {}), **further})
    return b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), value) for name, value in members.items())


def _converted_body(kind: EndpointKind, document: Mapping[str, object]) -> bytes | None:
    """Builds the body for a request that an engine makes a chat of."""
    try:
        chat = dict(as_chat(kind, document))
        effort = chat.pop("reasoning_effort", None)
        if effort is not None:
            given = cast("dict[str, object]", chat.get("chat_template_kwargs") or {})
            chat["chat_template_kwargs"] = {
                "enable_thinking": effort != "none",
                **given,
                "reasoning_effort": effort,
            }
        return to_json(chat)
    except (UnsupportedChatError, TypeError, ValueError):
        return None


def _is_long(field: MemberSpan | None) -> bool:
    """Returns whether a member's value is missing from the document of a body that was read in steps."""
    return field is not None and field.end - field.start > SHORT_BYTES


def parse_tokenize_response(raw: bytes) -> "array[int] | None":
    """Parses the ids in an answer of `/tokenize`, or returns None.

    No part of it takes long, so that other threads run beside it.
    """
    answer = AbridgedObjectReceiver(special={"tokens": (tokens := TokenIdsReceiver("tokens"))})
    try:
        for _ in read_object(raw, answer, UNLIMITED, strict=False):
            pass
        if answer.long:
            return tokens.ids if tokens.problem is None else None
        ids = answer.document.get("tokens")
        if not isinstance(ids, list):
            return None
        return token_id_array(cast("list[object]", ids), "tokens") if ids else array("I")
    except (JSONTextError, ProxyError):
        return None
