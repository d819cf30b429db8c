"""Rows that several dialects have, word for word."""

from dataclasses import replace
from typing import Final, Literal

from kvparams.dialects.table import NativeKey
from kvparams.dialects.value_types import FLAG, ID, OBJECT, TOKEN, DecimalTextType, ListType, TextType
from kvparams.field_types import MAX_LABEL
from kvparams.tokens import MAX_TOKENS

__all__ = [
    "CACHE_SALT",
    "DATA_PARALLEL_RANK",
    "KV_HINT",
    "PROMPT_TOKEN_IDS",
    "RANK_SUFFIX",
    "hint_keys",
    "leg_flags",
    "without_releases",
]

CACHE_SALT: Final = NativeKey(
    "cache_salt",
    TextType(MAX_LABEL),
    "PD",
    "KV under other salts is not shared with this",
    member="isolation.cache_salt",
    location="body",
)
"""vLLM 0.32.0 entrypoints/openai/completion/protocol.py; SGLang 0.5.23 srt/entrypoints/openai/protocol.py."""

DATA_PARALLEL_RANK: Final = NativeKey(
    "x-data-parallel-rank",
    DecimalTextType(0, 4095),
    "PD",
    "the data-parallel rank that shall take this leg",
    location="headers",
)
"""vLLM 0.32.0 entrypoints/generate/base/serving.py."""

RANK_SUFFIX: Final = "_dp"
"""In vLLM's engine ids, which are else the same for all ranks: vLLM 0.32.0 v1/engine/core.py (`run_engine_core`)."""

PROMPT_TOKEN_IDS: Final = NativeKey(
    "prompt_token_ids",
    ListType(TOKEN, MAX_TOKENS, 1),
    "D",
    "the prompt as prefill has tokenised it, so that decode need not",
    member="prefix",
    since="0.32",
)
"""vLLM 0.32.0 renderers/online_renderer.py; of chat requests only."""


def hint_keys(name: str, *, where: Literal["home", "body"] = "home", since: str) -> tuple[NativeKey, ...]:
    """Returns the keys of an envelope of hints, which an engine may ignore.

    Sources: vLLM 0.32.0 v1/kv_hints/protocol.py, SGLang 0.5.23 srt/managers/kv_hints.py, ai-dynamo 1.6.1
    vllm/kv_hints.py. Its actions name addresses.
    """
    inside = (name,)
    return (
        NativeKey(
            name,
            OBJECT,
            "PD",
            "an envelope of hints, which the engine may ignore",
            address="url",
            location=where,
            since=since,
        ),
        NativeKey(
            "protocol_version", TextType(64), "PD", "that of the envelope", parents=inside, location=where, since=since
        ),
        NativeKey("message_id", ID, "PD", "names the envelope", parents=inside, location=where, since=since),
        NativeKey(
            "actions",
            ListType(OBJECT, 1024),
            "PD",
            "each of a type and version of its own",
            parents=inside,
            location=where,
            since=since,
        ),
    )


KV_HINT: Final = hint_keys("kv_hint", since="0.32")
"""As Dynamo hands it to vLLM."""


def leg_flags(prefill: str = "PA", decode: str = "RD") -> tuple[NativeKey, NativeKey]:
    """`do_remote_decode` and `do_remote_prefill`: one of the two is true and says which leg it is.

    Args:
        prefill: the legs on which `do_remote_decode` is true.
        decode: the legs on which `do_remote_prefill` is.
    """
    return (
        NativeKey(
            "do_remote_decode",
            FLAG,
            prefill + decode,
            "keep the KV of this prompt: another engine decodes",
            marker_values=dict.fromkeys(prefill, True),
            default_values=dict.fromkeys(decode, False),
        ),
        NativeKey(
            "do_remote_prefill",
            FLAG,
            prefill + decode,
            "the KV of this prompt was computed by another engine",
            marker_values=dict.fromkeys(decode, True),
            default_values=dict.fromkeys(prefill, False),
        ),
    )


def without_releases(row: NativeKey) -> NativeKey:
    """Returns the row without release bounds, for software whose releases are numbered differently.

    A key that came with some release may be missing, and no release decides it.
    """
    return replace(row, since=None, until=None, required_legs="" if row.since else row.required_legs)
