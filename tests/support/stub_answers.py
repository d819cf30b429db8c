"""Parses requests and writes answers for the stub engine: bytes in, bytes out, without I/O or a clock.

It never parses a whole body. It finds the few members that matter by searching backwards for their quoted names. A
quoted name cannot occur inside a JSON string, where its quotes would be escaped; of duplicates the last wins, as in a
JSON parser. So a 40 KB prompt costs microseconds: the stub must not dominate what it helps measure.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

__all__ = ["MAX_TOKENS", "SSE_HEAD", "Ask", "Writer", "plain_answer", "read_ask"]

MAX_TOKENS = 40_000
"""The most tokens one answer has, whatever the request says."""

SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: stub\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)

_NUMBER = re.compile(rb"\d+")
_PHASE_PREFILL = re.compile(rb'"phase"\s*:\s*"prefill"')
_MODE_STORE = re.compile(rb'"mode"\s*:\s*"store"')
_BLOCK_TOKENS = 16
_FIRST_BLOCK = 1000
_MAX_BLOCKS = 9000
# All ids have four digits, so the list of the first n blocks is a slice of this text.
_BLOCK_IDS = b",".join(b"%d" % block for block in range(_FIRST_BLOCK, _FIRST_BLOCK + _MAX_BLOCKS))


@dataclass(frozen=True, slots=True)
class Ask:
    """What one completion request wants of the stub."""

    chat: bool
    stream: bool
    include_usage: bool
    max_tokens: int
    prompt_tokens: int
    """About four bytes of body per token: good enough to make answers of a real size."""
    nixl_prefill: bool
    """`do_remote_decode` is true: to be answered with block ids."""
    nixl_decode: bool
    """Carries a list of `remote_block_ids` and a `remote_engine_id`."""
    kvparams: bool
    """Carries a kvparams document."""
    store_keys_loaded: bool
    """Carries `load_keys`, not empty: a decode leg in mode store."""
    store_prefill: Mapping[str, object] | None
    """The kvparams document, if its phase is prefill and its mode is store."""
    cached_tokens: int | None = None
    """Found in its own cache by an engine that has one (`stub_connection.Work`)."""

    @property
    def prefill(self) -> bool:
        """Whether this is the prefill leg of a request."""
        return self.nixl_prefill or self.store_prefill is not None


def _value(body: bytes, quoted_name: bytes) -> bytes:
    """The first bytes of the value of the last member of that name; empty if there is none."""
    at = body.rfind(quoted_name)
    if at < 0:
        return b""
    at += len(quoted_name)
    return body[at : at + 24].lstrip(b" \t\r\n:")


def _number(body: bytes, quoted_name: bytes) -> int | None:
    found = _NUMBER.match(_value(body, quoted_name))
    return int(found[0]) if found else None


def read_ask(body: bytes, *, chat: bool) -> Ask:
    """Read what matters in the body of a completion (`chat` false) or chat request."""
    tokens = _number(body, b'"max_completion_tokens"')
    if tokens is None:
        tokens = _number(body, b'"max_tokens"')
    stream = _value(body, b'"stream"').startswith(b"true")
    kvparams_at = body.rfind(b'"kvparams"')
    return Ask(
        chat=chat,
        stream=stream,
        include_usage=stream and _value(body, b'"include_usage"').startswith(b"true"),
        max_tokens=max(1, min(16 if tokens is None else tokens, MAX_TOKENS)),
        prompt_tokens=len(body) // 4 + 1,
        nixl_prefill=_value(body, b'"do_remote_decode"').startswith(b"true"),
        nixl_decode=_value(body, b'"remote_block_ids"').startswith(b"[")
        and _value(body, b'"remote_engine_id"').startswith(b'"'),
        kvparams=kvparams_at >= 0,
        store_keys_loaded=kvparams_at >= 0 and _value(body, b'"load_keys"').startswith(b'["'),
        store_prefill=_store_document(body, kvparams_at) if kvparams_at >= 0 else None,
    )


def _store_document(body: bytes, at: int) -> Mapping[str, object] | None:
    if not (_PHASE_PREFILL.search(body, at) and _MODE_STORE.search(body, at)):
        return None
    text = body[at + len(b'"kvparams"') :].lstrip(b" \t\r\n:").decode()
    document, _ = cast("tuple[object, int]", json.JSONDecoder().raw_decode(text))
    return cast("Mapping[str, object]", document) if isinstance(document, dict) else None


def plain_answer(status: bytes, body: bytes, content_type: bytes = b"application/json") -> bytes:
    """A whole HTTP answer with that status line ("200 OK") and body."""
    return b"HTTP/1.1 %b\r\nserver: stub\r\ncontent-length: %d\r\ncontent-type: %b\r\n\r\n%b" % (
        status,
        len(body),
        content_type,
        body,
    )


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes the answers of one engine, in the shapes of vLLM 0.32's OpenAI server and its NixlConnector."""

    model: bytes
    engine_id: bytes
    side_channel_port: int
    cached_tokens: int
    """What the engine says it found in its own cache."""

    def whole(self, ask: Ask, serial: int) -> bytes:
        """The HTTP answer to a request that does not stream."""
        tokens = 1 if ask.prefill else ask.max_tokens
        text = b" tok" * tokens
        if ask.chat:
            choice = b'"message":{"role":"assistant","content":"%b","refusal":null,"tool_calls":[]}' % text
            kind, prefix = b"chat.completion", b"chatcmpl"
        else:
            choice = b'"text":"%b"' % text
            kind, prefix = b"text_completion", b"cmpl"
        return plain_answer(
            b"200 OK",
            b'{"id":"%b-%016x","object":"%b","created":1790000000,"model":"%b","choices":[{"index":0,%b,'
            b'"logprobs":null,"finish_reason":"length","stop_reason":null}],"usage":%b,"kv_transfer_params":%b}'
            % (prefix, serial, kind, self.model, choice, self._usage(ask, tokens), self._transfer(ask, serial)),
        )

    def event(self, ask: Ask, serial: int, finish: bytes = b"null") -> bytes:
        """One token as an HTTP chunk holding one event."""
        return _chunk(self._token(ask, serial, finish))

    def stream_end(self, ask: Ask, serial: int) -> bytes:
        """The last token, the usage event if asked for, `[DONE]` and the end of the chunked body."""
        parts = [self._token(ask, serial, b'"length"')]
        if ask.include_usage:
            kind, prefix = (b"chat.completion.chunk", b"chatcmpl") if ask.chat else (b"text_completion", b"cmpl")
            parts.append(
                b'data: {"id":"%b-%016x","object":"%b","created":1790000000,"model":"%b","choices":[],"usage":%b}\n\n'
                % (prefix, serial, kind, self.model, self._usage(ask, ask.max_tokens))
            )
        parts.append(b"data: [DONE]\n\n")
        return b"".join(_chunk(part) for part in parts) + b"0\r\n\r\n"

    def _token(self, ask: Ask, serial: int, finish: bytes) -> bytes:
        if ask.chat:
            return (
                b'data: {"id":"chatcmpl-%016x","object":"chat.completion.chunk","created":1790000000,"model":"%b",'
                b'"choices":[{"index":0,"delta":{"content":" tok"},"logprobs":null,"finish_reason":%b,'
                b'"token_ids":null}]}\n\n' % (serial, self.model, finish)
            )
        return (
            b'data: {"id":"cmpl-%016x","object":"text_completion","created":1790000000,"model":"%b",'
            b'"choices":[{"index":0,"text":" tok","logprobs":null,"finish_reason":%b,"stop_reason":null}],'
            b'"usage":null}\n\n' % (serial, self.model, finish)
        )

    def _cached(self, ask: Ask) -> int:
        # A decode engine counts what it loaded from elsewhere as cached: all of the prompt but its last token.
        loaded = ask.nixl_decode or ask.store_keys_loaded
        if loaded:
            return ask.prompt_tokens - 1
        return min(self.cached_tokens if ask.cached_tokens is None else ask.cached_tokens, ask.prompt_tokens)

    def _usage(self, ask: Ask, tokens: int) -> bytes:
        return (
            b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,'
            b'"prompt_tokens_details":{"cached_tokens":%d}}'
            % (ask.prompt_tokens, ask.prompt_tokens + tokens, tokens, self._cached(ask))
        )

    def _transfer(self, ask: Ask, serial: int) -> bytes:
        members: list[bytes] = []
        if ask.nixl_prefill:
            blocks = min(-(-ask.prompt_tokens // _BLOCK_TOKENS), _MAX_BLOCKS)
            members.append(
                b'"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[%b]],"remote_engine_id":"%b",'
                b'"remote_request_id":"cmpl-%016x-0","remote_host":"127.0.0.1","remote_port":%d,"tp_size":1,'
                b'"dcp_size":1,"pp_size":1,"remote_num_tokens":%d,"remote_blocks_expiry_time":null,'
                b'"transfer_mode":"pull","remote_prefill_cached_tokens":%d'
                % (
                    _BLOCK_IDS[: blocks * 5 - 1],
                    self.engine_id,
                    serial,
                    self.side_channel_port,
                    ask.prompt_tokens,
                    self._cached(ask),
                )
            )
        if ask.store_prefill is not None:
            members.append(b'"kvparams":' + json.dumps(self._store_result(ask.store_prefill, ask)).encode())
        return b"{%b}" % b",".join(members) if members else b"null"

    def _store_result(self, document: Mapping[str, object], ask: Ask) -> dict[str, object]:
        """The `prefill_result` to a kvparams document: the same request and transfer, and the keys it had to store."""
        engine = self.engine_id.decode()
        return {
            "version": "1.0",
            "request_id": document.get("request_id"),
            "transfer": document.get("transfer"),
            "phase": "prefill_result",
            "mode": "store",
            "store_keys": document.get("store_keys") or [f"{engine}.page.0"],
            "producer": {"id": engine, "incarnation": "stub-1"},
            "usage": {"prompt_tokens": ask.prompt_tokens, "cached_tokens": self._cached(ask)},
        }
