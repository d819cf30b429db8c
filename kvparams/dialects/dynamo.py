"""Dynamo's own requests between its frontend and its workers: an envelope around what each engine says.

Three engines, three envelopes; the NIXL keys, SGLang's room and TensorRT-LLM's parameters are those of their own files.
"""

from dataclasses import replace
from typing import Final

from kvparams.dialects.forms import RANK, TOKENS, WHOLE, Text, Whole
from kvparams.dialects.neuron import UNASKED_ROWS
from kvparams.dialects.nixl import NIXL_TABLE
from kvparams.dialects.sglang import BOOTSTRAP_ROWS
from kvparams.dialects.shared import KV_HINT, PROMPT_TOKEN_IDS, hints
from kvparams.dialects.table import Row, Table
from kvparams.dialects.trtllm import TRTLLM_ROWS, TRTLLM_TABLE
from kvparams.fields import MAX_LABEL, MAX_TEXT

__all__ = ["DYNAMO_SGLANG_TABLE", "DYNAMO_TRTLLM_TABLE", "DYNAMO_VLLM_TABLE"]

_ROUTING: Final = ("routing",)
_REQUEST: Final = (
    Row("token_ids", TOKENS, "PD", "the prompt", member="prefix", where="body"),
    Row("dp_rank", RANK, "PD", "the rank that shall take it", inside=_ROUTING, where="body"),
    Row("prefill_dp_rank", RANK, "PD", "prefill's rank", inside=_ROUTING, where="body"),
    Row("prefill_worker_id", Whole(0, 2**64 - 1), "PD", "who prefills", inside=_ROUTING, where="body"),
    Row("decode_worker_id", Whole(0, 2**64 - 1), "PD", "who decodes", inside=_ROUTING, where="body"),
    Row("cache_salt", Text(MAX_LABEL), "PD", "", member="isolation.cache_salt", inside=_ROUTING, where="body"),
    *hints("kv_hint", where="body", since="1.6.1"),
)
_SOURCE: Final = "ai-dynamo 1.6.1"
_NESTED: Final = "prefill_result.disaggregated_params"
_BARE: Final = "disaggregated_params"
_SINCE: Final = "0.9"
"""0.7.0 has none of the three envelopes, 0.9.0 all."""
_ELSEWHERE: Final = {row.name for row in (PROMPT_TOKEN_IDS, *KV_HINT)}
"""What stands in the request itself, and not among the engine's keys."""

DYNAMO_VLLM_TABLE: Final = Table(
    name="dynamo-vllm",
    title="Dynamo, vLLM workers",
    family="nixl",
    extension="com.nvidia.dynamo-vllm",
    mode="pull",
    order="prefill first",
    carried={"P": "kv_transfer_params", "R": f"{_BARE}.kv_transfer_params", "D": f"{_NESTED}.kv_transfer_params"},
    mints="the prefill engine: remote_request_id",
    software="Dynamo",
    since=_SINCE,
    source=f"{_SOURCE} dynamo/vllm/handlers.py and dynamo/vllm/kv_connector_protocols.py",
    rows=(
        *(row for row in UNASKED_ROWS if row.where == "home" and row.name not in _ELSEWHERE),
        *_REQUEST,
    ),
    like=NIXL_TABLE,
    notes=("Other connectors of vLLM stand in the same envelope; this is the one with NIXL's keys.",),
)

DYNAMO_SGLANG_TABLE: Final = Table(
    name="dynamo-sglang",
    title="Dynamo, SGLang workers",
    family="bootstrap",
    extension="com.nvidia.dynamo-sglang",
    mode="rendezvous",
    order="together",
    carried={"P": "bootstrap_info", "R": _BARE, "D": "bootstrap_info"},
    mints="the prefill worker or the router: bootstrap_room",
    software="Dynamo",
    since=_SINCE,
    source=f"{_SOURCE} dynamo/sglang/request_handlers/llm/prefill_handler.py and decode_handler.py",
    rows=(
        *(replace(row, legs="PRD", needed="RD") for row in BOOTSTRAP_ROWS),
        Row("handoff_id", Text(256), "PD", "names the hand-over"),
        *_REQUEST,
    ),
    notes=("Prefill answers before it computes.",),
)

_RENAMED: Final = Row("opaque_state", Text(MAX_TEXT, r"[A-Za-z0-9+/=]*", "base64", least=0), "RD", "where the KV is")

DYNAMO_TRTLLM_TABLE: Final = Table(
    name="dynamo-trtllm",
    title="Dynamo, TensorRT-LLM workers",
    family="trtllm",
    extension="com.nvidia.dynamo-trtllm",
    mode="rendezvous",
    order="prefill first",
    carried={"P": _BARE, "R": _BARE, "D": _NESTED},
    mints="the context engine: ctx_request_id",
    software="Dynamo",
    since=_SINCE,
    source=f"{_SOURCE} dynamo/trtllm/utils/disagg_utils.py",
    rows=(
        *(replace(row, marks={}) if row.marks else row for row in TRTLLM_ROWS if row.name != "encoded_opaque_state"),
        _RENAMED,
        Row("worker_id", WHOLE, "RD", "who prefilled"),
        *_REQUEST,
    ),
    like=TRTLLM_TABLE,
)
