"""vLLM's OffloadingConnector with its P2P tier: decode pulls chunks from prefill's host memory."""

from typing import Final

from kvparams.dialects.shared_keys import CACHE_SALT
from kvparams.dialects.table import DialectTable, NativeKey
from kvparams.dialects.value_types import HOST, ID, OBJECT, PORT, WHOLE, ListType

__all__ = ["OFFLOAD_P2P_TABLE"]

_TO: Final = ("remote_decoder",)
_FROM: Final = ("remote_prefiller",)
_CACHE: Final = ("remote_kv_source",)

OFFLOAD_P2P_TABLE: Final = DialectTable(
    name="offload-p2p",
    title="vLLM OffloadingConnector, P2P tier",
    extension="ai.vllm.offload-p2p",
    mode="pull",
    order="together",
    container_paths=dict.fromkeys("PRD", "kv_transfer_params"),
    transfer_id_source="the router: kv_request_id",
    software="vLLM",
    since="0.26",
    source="vLLM 0.32.0 v1/kv_offload/tiering/p2p/manager.py and "
    "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py",
    native_keys=(
        NativeKey(
            "kv_request_id", ID, "P", "offered under this id", "P", member="transfer.id", parents=_TO, since="0.32"
        ),
        NativeKey(
            "kv_request_id", ID, "D", "fetched under this id", "D", member="transfer.id", parents=_FROM, since="0.32"
        ),
        NativeKey("remote_host", HOST, "D", "the prefill engine", "D", parents=_FROM, address="host", since="0.32"),
        NativeKey("remote_port", PORT, "D", "where its tier listens", "D", parents=_FROM, address="port", since="0.32"),
        NativeKey(
            "kv_request_id", ID, "PD", "the same for a prefix that some engine has", parents=_CACHE, since="0.32"
        ),
        NativeKey("remote_host", HOST, "PD", "that engine", parents=_CACHE, address="host", since="0.32"),
        NativeKey("remote_port", PORT, "PD", "where its tier listens", parents=_CACHE, address="port", since="0.32"),
        NativeKey("kv_request_id", ID, "P", "offered under this id", parents=("decode",), until="0.32"),
        NativeKey("kv_request_id", ID, "D", "fetched under this id", parents=("prefill",), until="0.32"),
        NativeKey("remote_host", HOST, "D", "the prefill engine", parents=("prefill",), address="host", until="0.32"),
        NativeKey(
            "remote_port", PORT, "D", "where its tier listens", parents=("prefill",), address="port", until="0.32"
        ),
        NativeKey("max_load_tokens", WHOLE, "PD", "load no more than this", since="0.32"),
        NativeKey(
            "kv_load_tiers",
            ListType(OBJECT, 64),
            "PD",
            "load from these tiers only; an empty list is from none",
            since="0.32",
        ),
        CACHE_SALT,
    ),
    notes=(
        "Prefill answers without native keys.",
        "An offer that nobody fetches is given up after 60 s.",
        "The objects were called `decode` and `prefill` in 0.26.",
    ),
)
