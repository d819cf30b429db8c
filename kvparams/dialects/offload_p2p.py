"""vLLM's OffloadingConnector with its P2P tier: decode pulls chunks from prefill's host memory."""

from typing import Final

from kvparams.dialects.forms import HOST, ID, OBJECT, PORT, WHOLE, Each
from kvparams.dialects.shared import CACHE_SALT
from kvparams.dialects.table import Row, Table

__all__ = ["OFFLOAD_P2P_TABLE"]

_TO: Final = ("remote_decoder",)
_FROM: Final = ("remote_prefiller",)
_CACHE: Final = ("remote_kv_source",)

OFFLOAD_P2P_TABLE: Final = Table(
    name="offload-p2p",
    title="vLLM OffloadingConnector, P2P tier",
    extension="ai.vllm.offload-p2p",
    mode="pull",
    order="together",
    carried=dict.fromkeys("PRD", "kv_transfer_params"),
    mints="the router: kv_request_id",
    software="vLLM",
    since="0.26",
    source="vLLM 0.32.0 v1/kv_offload/tiering/p2p/manager.py and "
    "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py",
    rows=(
        Row("kv_request_id", ID, "P", "offered under this id", "P", member="transfer.id", inside=_TO, since="0.32"),
        Row("kv_request_id", ID, "D", "fetched under this id", "D", member="transfer.id", inside=_FROM, since="0.32"),
        Row("remote_host", HOST, "D", "the prefill engine", "D", inside=_FROM, address="host", since="0.32"),
        Row("remote_port", PORT, "D", "where its tier listens", "D", inside=_FROM, address="port", since="0.32"),
        Row("kv_request_id", ID, "PD", "the same for a prefix that some engine has", inside=_CACHE, since="0.32"),
        Row("remote_host", HOST, "PD", "that engine", inside=_CACHE, address="host", since="0.32"),
        Row("remote_port", PORT, "PD", "where its tier listens", inside=_CACHE, address="port", since="0.32"),
        Row("kv_request_id", ID, "P", "offered under this id", inside=("decode",), until="0.32"),
        Row("kv_request_id", ID, "D", "fetched under this id", inside=("prefill",), until="0.32"),
        Row("remote_host", HOST, "D", "the prefill engine", inside=("prefill",), address="host", until="0.32"),
        Row("remote_port", PORT, "D", "where its tier listens", inside=("prefill",), address="port", until="0.32"),
        Row("max_load_tokens", WHOLE, "PD", "load no more than this", since="0.32"),
        Row(
            "kv_load_tiers",
            Each(OBJECT, 64),
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
