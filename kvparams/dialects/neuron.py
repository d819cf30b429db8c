"""NIXL as AWS Neuron's engines read it: the whole answer of prefill stands in decode's body.

Source of the wrapping: production-stack a6c01db src/vllm_router/services/request_service/request.py, and AIBrix e3e10f9
pkg/plugins/gateway/algorithms/pd/transfer/nixl.go.
"""

from dataclasses import replace
from typing import Final

from kvparams.dialects.nixl import NIXL_TABLE
from kvparams.dialects.shared import undated
from kvparams.dialects.table import Row, Table

__all__ = ["NEURON_TABLE", "UNASKED_ROWS"]


def _unmarked(row: Row) -> Row:
    marks = {leg: value for leg, value in row.marks.items() if leg != "P"}
    usual = {} if row.marks != marks else {leg: value for leg, value in row.usual.items() if leg != "P"}
    return replace(undated(row), marks=marks, usual=usual)


UNASKED_ROWS: Final = tuple(_unmarked(row) for row in NIXL_TABLE.rows)
"""NIXL's, where prefill need not be told anything."""

NEURON_TABLE: Final = Table(
    name="neuron",
    title="Neuron NIXL, wrapped",
    extension="com.amazonaws.neuron",
    mode="pull",
    order="prefill first",
    family="nixl",
    carried={"P": "kv_transfer_params", "R": "kv_transfer_params", "D": "disagg_prefill_resp.kv_transfer_params"},
    mints="the prefill engine: remote_request_id",
    software="vLLM for Neuron",
    source="AIBrix e3e10f9 pkg/plugins/gateway/algorithms/pd/transfer/nixl.go; production-stack a6c01db "
    "src/vllm_router/services/request_service/request.py",
    rows=UNASKED_ROWS,
    like=NIXL_TABLE,
    notes=(
        "`disagg_prefill_resp` holds the whole answer, the generated text included.",
        "Which release was the first is not known here: the engine's package is not public.",
    ),
)
