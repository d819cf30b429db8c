"""AIBrix's `shfs` connector: NIXL's keys, with `remote_host` overwritten by the prefill pod's address.

Its out-of-tree AIBrixPDReuseConnector answers with placeholders in these keys, and finds KV by content. The connector
types `nixl` and the engines SGLang and TensorRT-LLM of AIBrix are the dialects neuron, sglang and trtllm.
"""

from dataclasses import replace
from typing import Final

from kvparams.dialects.nixl import NIXL_TABLE
from kvparams.dialects.shared_keys import without_releases
from kvparams.dialects.table import DialectTable, NativeKey
from kvparams.dialects.value_types import PORT, IntegerType, TextType, UnionType

__all__ = ["AIBRIX_TABLE"]


def _placeholders(row: NativeKey) -> NativeKey:
    if row.name == "remote_host":
        return replace(row, value_type=TextType(255, r"[A-Za-z0-9._:%\[\]-]*", "a host, or nothing", least=0))
    if row.name == "remote_port":
        return replace(row, value_type=UnionType((PORT, IntegerType(-1, -1))))
    return replace(row, required_legs="") if row.name == "remote_request_id" else row


AIBRIX_TABLE: Final = DialectTable(
    name="aibrix",
    title="AIBrix shfs",
    extension="ai.vllm.aibrix",
    mode="pull",
    order="prefill first",
    family="nixl",
    container_paths=dict.fromkeys("PRD", "kv_transfer_params"),
    transfer_id_source="the prefill engine: remote_request_id",
    software="AIBrix",
    since="0.4",
    source="AIBrix e3e10f9 pkg/plugins/gateway/algorithms/pd/ and "
    "python/aibrix_kvcache/ (aibrix_pd_reuse_connector.py)",
    native_keys=tuple(_placeholders(without_releases(row)) for row in NIXL_TABLE.native_keys),
    notes=("Overwriting remote_host breaks where the side channel listens on another address than HTTP.",),
    indistinguishable_from=NIXL_TABLE,
)
