"""TensorRT-LLM: `disaggregated_params` of the request, and of the answer's first choice.

Decode goes on behind the first token that the context engine has generated; most of the rest is an opaque text.
"""

from typing import Final

from kvparams.dialects.shared_keys import CACHE_SALT
from kvparams.dialects.table import DialectTable, NativeKey
from kvparams.dialects.value_types import (
    ANYTHING,
    FLAG,
    OBJECT,
    RANK,
    TOKENS,
    WHOLE,
    EnumType,
    ListType,
    TextType,
    UnionType,
)
from kvparams.field_types import MAX_ITEMS, MAX_TEXT

__all__ = ["TRTLLM_KEYS", "TRTLLM_TABLE"]

_BASE64: Final = TextType(MAX_TEXT, r"[A-Za-z0-9+/=]*", "base64", least=0)
_LEG: Final = {"P": "context_only", "R": "context_only", "D": "generation_only"}

TRTLLM_KEYS: Final = (
    NativeKey(
        "request_type", EnumType(tuple(dict.fromkeys(_LEG.values()))), "PRD", "which leg it is", marker_values=_LEG
    ),
    NativeKey("disagg_request_id", WHOLE, "PRD", "by which both engines know the transfer", member="transfer.id"),
    NativeKey("ctx_request_id", WHOLE, "RD", "the context engine's own id", "D"),
    NativeKey("first_gen_tokens", TOKENS, "RD", "the tokens that are generated already"),
    NativeKey("first_gen_log_probs", ListType(ANYTHING, MAX_ITEMS), "RD", "their probabilities"),
    NativeKey("first_gen_logits", ListType(ANYTHING, MAX_ITEMS), "RD", "their logits"),
    NativeKey("encoded_opaque_state", _BASE64, "RD", "where the KV is, for TensorRT-LLM alone"),
    NativeKey("draft_tokens", TOKENS, "RD", "tokens that were guessed"),
    NativeKey("ctx_dp_rank", RANK, "RD", "the context engine's rank"),
    NativeKey(
        "ctx_info_endpoint",
        UnionType((TextType(2048), ListType(TextType(2048), 4096))),
        "RD",
        "where it can be asked",
        address="url",
    ),
    NativeKey("schedule_style", EnumType((0, 1)), "PRD", "0: context first, 1: generation first"),
    NativeKey("conversation_id", TextType(256), "PD", "the conversation"),
    NativeKey("ctx_usage", OBJECT, "D", "what the context leg counted"),
    NativeKey("return_prompt_token_ids_b64", FLAG, "P", "wants the prompt's ids in base64"),
    NativeKey("resolved_thinking", FLAG, "RD", "whether the template opened a thought"),
)

TRTLLM_TABLE: Final = DialectTable(
    name="trtllm",
    title="TensorRT-LLM",
    extension="com.nvidia.tensorrt-llm",
    mode="rendezvous",
    order="either",
    family="trtllm",
    container_paths={"P": "disaggregated_params", "R": "choices.0.disaggregated_params", "D": "disaggregated_params"},
    transfer_id_source="the router: disagg_request_id, a snowflake; the context engine: ctx_request_id",
    software="TensorRT-LLM",
    since="0.17",
    source="TensorRT-LLM (2026) tensorrt_llm/serve/openai_protocol.py, tensorrt_llm/disaggregated_params.py and "
    "tensorrt_llm/serve/disagg_auth.py",
    native_keys=(
        *TRTLLM_KEYS,
        NativeKey("prompt_token_ids", TOKENS, "RD", "the prompt as token ids", member="prefix", location="body"),
        NativeKey("prompt_token_ids_b64", _BASE64, "R", "the same as int32, little-endian", location="body"),
        NativeKey(
            "x-trtllm-disagg-auth",
            TextType(71, r"sha256=[0-9a-f]{64}"),
            "PD",
            "HMAC over ctx_info_endpoint and encoded_opaque_state",
            location="headers",
        ),
        CACHE_SALT,
    ),
    notes=(
        "If the context leg did not end by length, its answer is the whole answer.",
        "Ids are larger than 2^53: whoever passes them through doubles changes them.",
        "Generation first: its leg has to be sent at once, the context engine waits for it.",
    ),
)
