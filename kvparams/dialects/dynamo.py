"""Dynamo's own requests between its frontend and its workers: an envelope around what each engine says.

Three engines, three envelopes; the NIXL keys, SGLang's room and TensorRT-LLM's parameters are those of their own files.
"""

from dataclasses import replace
from typing import Final

from kvparams.dialects.neuron import NEURON_KEYS
from kvparams.dialects.nixl import NIXL_TABLE
from kvparams.dialects.sglang import BOOTSTRAP_KEYS
from kvparams.dialects.shared_keys import KV_HINT, PROMPT_TOKEN_IDS, hint_keys
from kvparams.dialects.table import DialectTable, NativeKey
from kvparams.dialects.trtllm import TRTLLM_KEYS, TRTLLM_TABLE
from kvparams.dialects.value_types import RANK, TOKENS, WHOLE, IntegerType, TextType
from kvparams.field_types import MAX_LABEL, MAX_TEXT

__all__ = ["DYNAMO_SGLANG_TABLE", "DYNAMO_TRTLLM_TABLE", "DYNAMO_VLLM_TABLE"]

_ROUTING: Final = ("routing",)
_REQUEST: Final = (
    NativeKey("token_ids", TOKENS, "PD", "the prompt", member="prefix", location="body"),
    NativeKey("dp_rank", RANK, "PD", "the rank that shall take it", parents=_ROUTING, location="body"),
    NativeKey("prefill_dp_rank", RANK, "PD", "prefill's rank", parents=_ROUTING, location="body"),
    NativeKey("prefill_worker_id", IntegerType(0, 2**64 - 1), "PD", "who prefills", parents=_ROUTING, location="body"),
    NativeKey("decode_worker_id", IntegerType(0, 2**64 - 1), "PD", "who decodes", parents=_ROUTING, location="body"),
    NativeKey(
        "cache_salt", TextType(MAX_LABEL), "PD", "", member="isolation.cache_salt", parents=_ROUTING, location="body"
    ),
    *hint_keys("kv_hint", where="body", since="1.6.1"),
)
_SOURCE: Final = "ai-dynamo 1.6.1"
_NESTED: Final = "prefill_result.disaggregated_params"
_BARE: Final = "disaggregated_params"
_SINCE: Final = "0.9"
"""0.7.0 has none of the three envelopes, 0.9.0 all."""
_ELSEWHERE: Final = {row.name for row in (PROMPT_TOKEN_IDS, *KV_HINT)}
"""What stands in the request itself, and not among the engine's keys."""

DYNAMO_VLLM_TABLE: Final = DialectTable(
    name="dynamo-vllm",
    title="Dynamo, vLLM workers",
    family="nixl",
    extension="com.nvidia.dynamo-vllm",
    mode="pull",
    order="prefill first",
    container_paths={
        "P": "kv_transfer_params",
        "R": f"{_BARE}.kv_transfer_params",
        "D": f"{_NESTED}.kv_transfer_params",
    },
    transfer_id_source="the prefill engine: remote_request_id",
    software="Dynamo",
    since=_SINCE,
    source=f"{_SOURCE} dynamo/vllm/handlers.py and dynamo/vllm/kv_connector_protocols.py",
    native_keys=(
        *(row for row in NEURON_KEYS if row.location == "home" and row.name not in _ELSEWHERE),
        *_REQUEST,
    ),
    indistinguishable_from=NIXL_TABLE,
    notes=("Other connectors of vLLM stand in the same envelope; this is the one with NIXL's keys.",),
)

DYNAMO_SGLANG_TABLE: Final = DialectTable(
    name="dynamo-sglang",
    title="Dynamo, SGLang workers",
    family="bootstrap",
    extension="com.nvidia.dynamo-sglang",
    mode="rendezvous",
    order="together",
    container_paths={"P": "bootstrap_info", "R": _BARE, "D": "bootstrap_info"},
    transfer_id_source="the prefill worker or the router: bootstrap_room",
    software="Dynamo",
    since=_SINCE,
    source=f"{_SOURCE} dynamo/sglang/request_handlers/llm/prefill_handler.py and decode_handler.py",
    native_keys=(
        *(replace(row, legs="PRD", required_legs="RD") for row in BOOTSTRAP_KEYS),
        NativeKey("handoff_id", TextType(256), "PD", "names the hand-over"),
        *_REQUEST,
    ),
    notes=("Prefill answers before it computes.",),
)

_RENAMED: Final = NativeKey(
    "opaque_state", TextType(MAX_TEXT, r"[A-Za-z0-9+/=]*", "base64", least=0), "RD", "where the KV is"
)

DYNAMO_TRTLLM_TABLE: Final = DialectTable(
    name="dynamo-trtllm",
    title="Dynamo, TensorRT-LLM workers",
    family="trtllm",
    extension="com.nvidia.dynamo-trtllm",
    mode="rendezvous",
    order="prefill first",
    container_paths={"P": _BARE, "R": _BARE, "D": _NESTED},
    transfer_id_source="the context engine: ctx_request_id",
    software="Dynamo",
    since=_SINCE,
    source=f"{_SOURCE} dynamo/trtllm/utils/disagg_utils.py",
    native_keys=(
        *(
            replace(row, marker_values={}) if row.marker_values else row
            for row in TRTLLM_KEYS
            if row.name != "encoded_opaque_state"
        ),
        _RENAMED,
        NativeKey("worker_id", WHOLE, "RD", "who prefilled"),
        *_REQUEST,
    ),
    indistinguishable_from=TRTLLM_TABLE,
)
