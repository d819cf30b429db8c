"""Finds the token ids by which a request is routed: the client's own, a tokenizer's, the engine's, or pseudo tokens.

The ids affect only the choice of an instance, so a wrong id costs a misroute. All errors end in pseudo tokens, and no
part of a prompt is logged.
"""

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple, Protocol, cast

from kvparams.errors import JSONTextError
from kvparams.jsontext.document import read_object
from kvparams.jsontext.receivers import OPEN_OBJECT, TreeBuilder
from kvparams.jsontext.scanner import UNLIMITED
from kvparams_proxy.requests.endpoints import EndpointKind
from kvparams_proxy.requests.intake import ParsedRequest
from kvparams_proxy.tokenization.chat_conversion import as_chat
from kvparams_proxy.tokenization.engine_tokenizer import EngineTokenizer, parse_tokenize_response
from kvparams_proxy.tokenization.pseudo_tokens import pseudo_tokens
from kvparams_proxy.tokenization.tokenizer_choice import TokenizationMethod
from kvparams_proxy.tokenization.worker import TokenizerWorker

__all__ = ["EncodingJob", "RoutingTokens", "TokenIdSource", "TokenService", "Tokenizer", "TokenizersByModel"]

_KINDS: Final[tuple[EndpointKind, ...]] = ("completions", "chat", "messages", "responses")
"""Requests whose prompts are text."""
_MOST_CHARS: Final = 4 << 20
"""Of a prompt: some million tokens. Longer ones go by bytes."""
_AT_ONCE_CHARS: Final = 1024
"""As many are encoded in the event loop: some 0.3 ms. Handing them to a thread and back costs as much as 200."""
_AT_ONCE_BYTES: Final = 128 << 10
"""A shorter body is rendered and looked up in the event loop: some 0.3 ms."""
_AT_ONCE_MESSAGES: Final = 256
"""The same of messages: each takes a template some 10 microseconds."""
_ANSWER_AT_ONCE_BYTES: Final = 32 << 10
_MOST_VALUES: Final = 200_000
"""In a body that is read once more in the thread, to keep what it says."""
_ROOM_BYTES: Final = 16 << 20
"""Of bodies that wait for the thread: some ten seconds of work for it."""


class TokenIdSource(StrEnum):
    """The source of token ids."""

    CLIENT = "client"
    TOKENIZER = "tokenizer"
    ENGINE = "engine"
    BYTES = "bytes"


class RoutingTokens(NamedTuple):
    """A request's prompt, for routing."""

    ids: Sequence[int]
    source: TokenIdSource
    omitted_count: int = 0
    """How many there are behind these."""

    @property
    def tokens(self) -> int:
        """Returns all token ids."""
        return len(self.ids) + self.omitted_count


class EncodingJob(Protocol):
    """A text on its way to its ids: see `kvparams_proxy.tokenization.local_tokenizer.LocalEncodingJob`."""

    @property
    def missing_chars(self) -> int:
        """The number of characters that are still to be encoded."""
        ...

    def encode(self) -> "array[int]":
        """Returns all token ids of the text."""
        ...


class Tokenizer(Protocol):
    """A tokenizer in this process, independent of optional libraries.

    See `kvparams_proxy.tokenization.local_tokenizer.LocalTokenizer`.
    """

    def encode_chat(self, document: Mapping[str, object], max_chars: int) -> EncodingJob:
        """Returns a job that encodes the prompt of a chat request."""
        ...

    def encode_completion(self, document: Mapping[str, object], max_chars: int) -> EncodingJob:
        """Returns a job that encodes a completion request."""
        ...


TokenizersByModel = Mapping[str | None, Tokenizer | TokenizationMethod]
"""How the prompts of each model become token ids; under None stands how those of all others do."""
RoutingTokensCallback = Callable[[RoutingTokens | None], None]


class TokenService:
    """Finds token ids. All calls and callbacks are in the event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, tokenizers: TokenizersByModel, engines: EngineTokenizer
    ) -> None:
        self._tokenizers = tokenizers
        self._engines = engines
        self._lane: TokenizerWorker[array[int] | None] = TokenizerWorker(loop, "tokens", _ROOM_BYTES)
        self.found_counts: Final[Counter[TokenIdSource]] = Counter()
        """Prompts by whose ids they got."""
        self.missed_counts: Final[Counter[TokenIdSource]] = Counter()
        """Prompts that went by bytes since this did not work."""

    def find(self, kind: EndpointKind, inbound: ParsedRequest, found: RoutingTokensCallback) -> None:
        """Calls `found` once, now or later.

        It gets None without a chosen method, or without exactly one prompt of text.
        """
        facts = inbound.facts
        ids = facts.routing_ids if facts.token_ids is None else facts.token_ids
        if ids is not None:
            self._tell(found, ids, TokenIdSource.CLIENT)
            return
        tokenizer = self._tokenizers.get(facts.model, self._tokenizers.get(None))
        if tokenizer is None or kind not in _KINDS or facts.prompts != 1:
            found(None)
        elif tokenizer is TokenizationMethod.ENGINE:
            self._engines.request_tokens(kind, inbound, partial(self._asked, kind, inbound, found))
        elif tokenizer is TokenizationMethod.BYTES:
            self._by_bytes(kind, inbound, found)
        else:
            self._by_tokenizer(tokenizer, kind, inbound, found)

    def close(self) -> None:
        """Stops the service; callbacks of pending requests are not called."""
        self._lane.close()

    def _by_tokenizer(
        self, tokenizer: Tokenizer, kind: EndpointKind, inbound: ParsedRequest, found: RoutingTokensCallback
    ) -> None:
        document = cast("Mapping[str, object]", inbound.document)
        ended = partial(self._ended, TokenIdSource.TOKENIZER, kind, inbound, found)
        weight = len(inbound.body)
        if not inbound.is_document_complete:
            self._in_thread(partial(_reread, tokenizer, kind, inbound.body), ended, weight)
            return
        messages = document.get("input" if kind == "responses" else "messages")
        many = isinstance(messages, list) and len(cast("list[object]", messages)) > _AT_ONCE_MESSAGES
        if many or weight > _AT_ONCE_BYTES:
            self._in_thread(partial(_whole, tokenizer, kind, document), ended, weight)
            return
        work = _begun(tokenizer, kind, document)
        if work is None:
            ended(None)
        elif work.missing_chars <= _AT_ONCE_CHARS:
            ended(_ids(work))
        else:
            self._in_thread(partial(_ids, work), ended, weight)

    def _in_thread(
        self, job: "Callable[[], array[int] | None]", ended: "Callable[[array[int] | None], None]", weight: int
    ) -> None:
        if not self._lane.submit(job, ended, weight):
            ended(None)

    def _asked(
        self, kind: EndpointKind, inbound: ParsedRequest, found: RoutingTokensCallback, raw: bytes | None
    ) -> None:
        ended = partial(self._ended, TokenIdSource.ENGINE, kind, inbound, found)
        if raw is None:
            ended(None)
        elif len(raw) > _ANSWER_AT_ONCE_BYTES:
            self._in_thread(partial(parse_tokenize_response, raw), ended, len(raw))
        else:
            ended(parse_tokenize_response(raw))

    def _ended(
        self,
        source: TokenIdSource,
        kind: EndpointKind,
        inbound: ParsedRequest,
        found: RoutingTokensCallback,
        ids: "array[int] | None",
    ) -> None:
        if ids is not None:
            self._tell(found, ids, source)
        else:
            self.missed_counts[source] += 1
            self._by_bytes(kind, inbound, found)

    def _by_bytes(self, kind: EndpointKind, inbound: ParsedRequest, found: RoutingTokensCallback) -> None:
        ids, tokens = pseudo_tokens(kind, inbound.body, inbound.member_spans)
        self._tell(found, ids, TokenIdSource.BYTES, tokens - len(ids))

    def _tell(self, found: RoutingTokensCallback, ids: Sequence[int], source: TokenIdSource, more: int = 0) -> None:
        self.found_counts[source] += 1
        found(RoutingTokens(ids, source, more))


def _begun(tokenizer: Tokenizer, kind: EndpointKind, document: Mapping[str, object]) -> EncodingJob | None:
    try:
        if kind == "completions":
            return tokenizer.encode_completion(document, _MOST_CHARS)
        return tokenizer.encode_chat(as_chat(kind, document), _MOST_CHARS)
    except Exception:  # noqa: BLE001  a template is a program, and what is put into it a stranger's: it may raise anything
        return None


def _ids(work: EncodingJob) -> "array[int] | None":
    try:
        return work.encode()
    except Exception:  # noqa: BLE001  the library's errors are of no class of their own
        return None


def _reread(tokenizer: Tokenizer, kind: EndpointKind, body: bytes) -> "array[int] | None":
    """Reads a long body once more, whole, in small steps: other threads run beside it."""
    built = TreeBuilder(OPEN_OBJECT, _MOST_VALUES)
    try:
        for _ in read_object(body, built, UNLIMITED, strict=False):
            pass
    except JSONTextError:  # it holds too many values
        return None
    return _whole(tokenizer, kind, cast("dict[str, object]", built.value))


def _whole(tokenizer: Tokenizer, kind: EndpointKind, document: Mapping[str, object]) -> "array[int] | None":
    work = _begun(tokenizer, kind, document)
    return None if work is None else _ids(work)
