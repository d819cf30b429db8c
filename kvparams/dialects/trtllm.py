"""TensorRT-LLM: `disaggregated_params` of the request, and of the answer's first choice.

Decode goes on behind the first token that the context engine has generated; most of the rest is an opaque text.
"""

from typing import Final

from kvparams.dialects.forms import (
    ANYTHING,
    FLAG,
    OBJECT,
    RANK,
    TOKENS,
    WHOLE,
    Each,
    Either,
    OneOf,
    Text,
)
from kvparams.dialects.shared import CACHE_SALT
from kvparams.dialects.table import Row, Table
from kvparams.fields import MAX_ITEMS, MAX_TEXT

__all__ = ["TRTLLM_ROWS", "TRTLLM_TABLE"]

_BASE64: Final = Text(MAX_TEXT, r"[A-Za-z0-9+/=]*", "base64", least=0)
_LEG: Final = {"P": "context_only", "R": "context_only", "D": "generation_only"}

TRTLLM_ROWS: Final = (
    Row("request_type", OneOf(tuple(dict.fromkeys(_LEG.values()))), "PRD", "which leg it is", marks=_LEG),
    Row("disagg_request_id", WHOLE, "PRD", "by which both engines know the transfer", member="transfer.id"),
    Row("ctx_request_id", WHOLE, "RD", "the context engine's own id", "D"),
    Row("first_gen_tokens", TOKENS, "RD", "the tokens that are generated already"),
    Row("first_gen_log_probs", Each(ANYTHING, MAX_ITEMS), "RD", "their probabilities"),
    Row("first_gen_logits", Each(ANYTHING, MAX_ITEMS), "RD", "their logits"),
    Row("encoded_opaque_state", _BASE64, "RD", "where the KV is, for TensorRT-LLM alone"),
    Row("draft_tokens", TOKENS, "RD", "tokens that were guessed"),
    Row("ctx_dp_rank", RANK, "RD", "the context engine's rank"),
    Row(
        "ctx_info_endpoint", Either((Text(2048), Each(Text(2048), 4096))), "RD", "where it can be asked", address="url"
    ),
    Row("schedule_style", OneOf((0, 1)), "PRD", "0: context first, 1: generation first"),
    Row("conversation_id", Text(256), "PD", "the conversation"),
    Row("ctx_usage", OBJECT, "D", "what the context leg counted"),
    Row("return_prompt_token_ids_b64", FLAG, "P", "wants the prompt's ids in base64"),
    Row("resolved_thinking", FLAG, "RD", "whether the template opened a thought"),
)

TRTLLM_TABLE: Final = Table(
    name="trtllm",
    title="TensorRT-LLM",
    extension="com.nvidia.tensorrt-llm",
    mode="rendezvous",
    order="either",
    family="trtllm",
    carried={"P": "disaggregated_params", "R": "choices.0.disaggregated_params", "D": "disaggregated_params"},
    mints="the router: disagg_request_id, a snowflake; the context engine: ctx_request_id",
    software="TensorRT-LLM",
    since="0.17",
    source="TensorRT-LLM (2026) tensorrt_llm/serve/openai_protocol.py, tensorrt_llm/disaggregated_params.py and "
    "tensorrt_llm/serve/disagg_auth.py",
    rows=(
        *TRTLLM_ROWS,
        Row("prompt_token_ids", TOKENS, "RD", "the prompt as token ids", member="prefix", where="body"),
        Row("prompt_token_ids_b64", _BASE64, "R", "the same as int32, little-endian", where="body"),
        Row(
            "x-trtllm-disagg-auth",
            Text(71, r"sha256=[0-9a-f]{64}"),
            "PD",
            "HMAC over ctx_info_endpoint and encoded_opaque_state",
            where="headers",
        ),
        CACHE_SALT,
    ),
    notes=(
        "If the context leg did not end by length, its answer is the whole answer.",
        "Ids are larger than 2^53: whoever passes them through doubles changes them.",
        "Generation first: its leg has to be sent at once, the context engine waits for it.",
    ),
)
