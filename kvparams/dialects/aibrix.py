"""AIBrix's `shfs` connector: NIXL's keys, with `remote_host` overwritten by the prefill pod's address.

Its out-of-tree AIBrixPDReuseConnector answers with placeholders in these keys, and finds KV by content. The connector
types `nixl` and the engines SGLang and TensorRT-LLM of AIBrix are the dialects neuron, sglang and trtllm.
"""

from dataclasses import replace
from typing import Final

from kvparams.dialects.forms import PORT, Either, Text, Whole
from kvparams.dialects.nixl import NIXL_TABLE
from kvparams.dialects.shared import undated
from kvparams.dialects.table import Row, Table

__all__ = ["AIBRIX_TABLE"]


def _placeholders(row: Row) -> Row:
    if row.name == "remote_host":
        return replace(row, form=Text(255, r"[A-Za-z0-9._:%\[\]-]*", "a host, or nothing", least=0))
    if row.name == "remote_port":
        return replace(row, form=Either((PORT, Whole(-1, -1))))
    return replace(row, needed="") if row.name == "remote_request_id" else row


AIBRIX_TABLE: Final = Table(
    name="aibrix",
    title="AIBrix shfs",
    extension="ai.vllm.aibrix",
    mode="pull",
    order="prefill first",
    family="nixl",
    carried=dict.fromkeys("PRD", "kv_transfer_params"),
    mints="the prefill engine: remote_request_id",
    software="AIBrix",
    since="0.4",
    source="AIBrix e3e10f9 pkg/plugins/gateway/algorithms/pd/ and "
    "python/aibrix_kvcache/ (aibrix_pd_reuse_connector.py)",
    rows=tuple(_placeholders(undated(row)) for row in NIXL_TABLE.rows),
    notes=("Overwriting remote_host breaks where the side channel listens on another address than HTTP.",),
    like=NIXL_TABLE,
)
