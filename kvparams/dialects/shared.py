"""Rows that several dialects have, word for word."""

from dataclasses import replace
from typing import Final, Literal

from kvparams.dialects.forms import FLAG, ID, OBJECT, TOKEN, Digits, Each, Text
from kvparams.dialects.table import Row
from kvparams.fields import MAX_LABEL
from kvparams.tokens import MAX_TOKENS

__all__ = ["CACHE_SALT", "DATA_PARALLEL_RANK", "KV_HINT", "PROMPT_TOKEN_IDS", "flags", "hints", "undated"]

CACHE_SALT: Final = Row(
    "cache_salt",
    Text(MAX_LABEL),
    "PD",
    "KV under other salts is not shared with this",
    member="isolation.cache_salt",
    where="body",
)
"""vLLM 0.32.0 entrypoints/openai/completion/protocol.py; SGLang 0.5.23 srt/entrypoints/openai/protocol.py."""

DATA_PARALLEL_RANK: Final = Row(
    "x-data-parallel-rank", Digits(0, 4095), "PD", "the data-parallel rank that shall take this leg", where="headers"
)
"""vLLM 0.32.0 entrypoints/generate/base/serving.py."""

PROMPT_TOKEN_IDS: Final = Row(
    "prompt_token_ids",
    Each(TOKEN, MAX_TOKENS, 1),
    "D",
    "the prompt as prefill has tokenised it, so that decode need not",
    member="prefix",
    since="0.32",
)
"""vLLM 0.32.0 renderers/online_renderer.py; of chat requests only."""


def hints(name: str, *, where: Literal["home", "body"] = "home", since: str) -> tuple[Row, ...]:
    """An envelope of hints, which an engine may ignore: vLLM 0.32.0 v1/kv_hints/protocol.py, SGLang 0.5.23
    srt/managers/kv_hints.py, ai-dynamo 1.6.1 vllm/kv_hints.py. Its actions name addresses."""
    inside = (name,)
    return (
        Row(
            name,
            OBJECT,
            "PD",
            "an envelope of hints, which the engine may ignore",
            address="url",
            where=where,
            since=since,
        ),
        Row("protocol_version", Text(64), "PD", "that of the envelope", inside=inside, where=where, since=since),
        Row("message_id", ID, "PD", "names the envelope", inside=inside, where=where, since=since),
        Row(
            "actions",
            Each(OBJECT, 1024),
            "PD",
            "each of a type and version of its own",
            inside=inside,
            where=where,
            since=since,
        ),
    )


KV_HINT: Final = hints("kv_hint", since="0.32")
"""As Dynamo hands it to vLLM."""


def flags(prefill: str = "PA", decode: str = "RD") -> tuple[Row, Row]:
    """`do_remote_decode` and `do_remote_prefill`: one of the two is true and says which leg it is.

    Args:
        prefill: the legs on which `do_remote_decode` is true.
        decode: the legs on which `do_remote_prefill` is.
    """
    return (
        Row(
            "do_remote_decode",
            FLAG,
            prefill + decode,
            "keep the KV of this prompt: another engine decodes",
            marks=dict.fromkeys(prefill, True),
            usual=dict.fromkeys(decode, False),
        ),
        Row(
            "do_remote_prefill",
            FLAG,
            prefill + decode,
            "the KV of this prompt was computed by another engine",
            marks=dict.fromkeys(decode, True),
            usual=dict.fromkeys(prefill, False),
        ),
    )


def undated(row: Row) -> Row:
    """The row for another software than its own, whose releases have other numbers: what came with some release may be
    missing, and no release decides it."""
    return replace(row, since=None, until=None, needed="" if row.since else row.needed)
