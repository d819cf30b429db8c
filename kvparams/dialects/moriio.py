"""vLLM's MoRIIOConnector for AMD: decode reads (READ), or prefill writes while it computes (WRITE).

The two modes carry the same keys; which one it is, the engines' settings say.
"""

from typing import Final

from kvparams.dialects.shared_keys import CACHE_SALT, DATA_PARALLEL_RANK, KV_HINT, PROMPT_TOKEN_IDS, leg_flags
from kvparams.dialects.table import DialectTable, NativeKey
from kvparams.dialects.value_types import (
    BLOCK_GROUPS,
    BLOCKS,
    FLAG,
    HOST,
    ID,
    PORT,
    RANK,
    SIZE,
    IntegerType,
    ListType,
    UnionType,
)

__all__ = ["MORIIO_READ_TABLE", "MORIIO_WRITE_TABLE"]

_SOURCE: Final = (
    "vLLM 0.32.0 distributed/kv_transfer/kv_connector/v1/moriio/moriio_common.py (add_new_req) and "
    "moriio_connector.py (request_finished)"
)
_ROWS: Final = (
    *leg_flags("P", "RD"),
    NativeKey("transfer_id", ID, "PRD", "by which both engines know the transfer", "RD", member="transfer.id"),
    NativeKey("remote_engine_id", ID, "PRD", "who holds the KV", "RD", member="producer.id", member_legs="RD"),
    NativeKey(
        "remote_block_ids", UnionType((BLOCK_GROUPS, BLOCKS)), "PRD", "the blocks that hold it; empty for WRITE", "RD"
    ),
    NativeKey("remote_host", HOST, "PRD", "the other engine", "R", address="host"),
    NativeKey("remote_handshake_port", PORT, "PRD", "where it shakes hands", "R", address="port"),
    NativeKey("remote_notify_port", PORT, "PRD", "where it is told of blocks", "R", address="port"),
    NativeKey("remote_tp_size", IntegerType(0, 4096), "PD", "its tensor-parallel ranks; 0 is unknown"),
    NativeKey("tp_size", SIZE, "PRD", "the same under its older name"),
    NativeKey("remote_dp_size", SIZE, "PRD", "its data-parallel ranks"),
    NativeKey(
        "remote_dp_size_local",
        IntegerType(0, 4096),
        "PRD",
        "of these in one pod; 0 where an outer balancer has them",
        since="0.32",
    ),
    NativeKey("remote_dp_rank", RANK, "PRD", "the rank that holds the KV"),
    NativeKey("remote_dp_rank_override", FLAG, "PRD", "whether that rank is meant as it stands", since="0.32"),
    NativeKey("remote_hosts", ListType(HOST, 4096), "PD", "its pods", address="host", since="0.32"),
    NativeKey("is_request_leader", FLAG, "PD", "whether this engine speaks for the others", since="0.32"),
    PROMPT_TOKEN_IDS,
    *KV_HINT,
    CACHE_SALT,
    DATA_PARALLEL_RANK,
)
_NOTES: Final = (
    "Where remote_host and the two ports are missing, the request id has to hold both addresses: "
    "___prefill_addr_host:H,handshake:P,notify:P___decode_addr_..._ and 32 hexadecimal digits.",
    "Both legs must be pinned to one rank, by x-data-parallel-rank and by remote_dp_rank, or decode hangs.",
    "KV is kept only if prefill's one token ended by length.",
)

MORIIO_READ_TABLE: Final = DialectTable(
    name="moriio-read",
    title="vLLM MoRIIOConnector, READ",
    extension="ai.vllm.moriio",
    mode="pull",
    order="prefill first",
    container_paths=dict.fromkeys("PRD", "kv_transfer_params"),
    transfer_id_source="the router: transfer_id; an engine that has none makes one up, another on each leg",
    software="vLLM",
    since="0.14",
    source=_SOURCE,
    native_keys=_ROWS,
    notes=_NOTES,
)

MORIIO_WRITE_TABLE: Final = DialectTable(
    name="moriio-write",
    title="vLLM MoRIIOConnector, WRITE",
    extension="ai.vllm.moriio-write",
    mode="push",
    order="together",
    container_paths=dict.fromkeys("PRD", "kv_transfer_params"),
    transfer_id_source="the router: transfer_id",
    software="vLLM",
    since="0.14",
    source=f"{_SOURCE}; llm-d-router ebab687 pkg/sidecar/proxy/connector_nixlv2.go",
    native_keys=_ROWS,
    notes=("On the prefill leg remote_host and its ports are those of the decode engine.", *_NOTES),
)
