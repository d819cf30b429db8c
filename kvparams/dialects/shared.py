"""Rows that several dialects have, word for word."""

from typing import Final

from kvparams.dialects.forms import FLAG, OBJECT, TOKEN, Digits, Each, Text
from kvparams.dialects.table import Row
from kvparams.fields import MAX_LABEL
from kvparams.tokens import MAX_TOKENS

__all__ = ["CACHE_SALT", "DATA_PARALLEL_RANK", "KV_HINT", "PROMPT_TOKEN_IDS", "flags"]

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

KV_HINT: Final = Row(
    "kv_hint", OBJECT, "PD", "Dynamo's envelope of hints; the engine may ignore it", address="url", since="0.32"
)
"""ai-dynamo 1.6.1 vllm/kv_hints.py."""


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
