"""NIXL as AWS Neuron's engines read it: the whole answer of prefill stands in decode's body.

Source of the wrapping: production-stack a6c01db src/vllm_router/services/request_service/request.py, and AIBrix e3e10f9
pkg/plugins/gateway/algorithms/pd/transfer/nixl.go.
"""

from dataclasses import replace
from typing import Final

from kvparams.dialects.nixl import NIXL_TABLE
from kvparams.dialects.shared_keys import without_releases
from kvparams.dialects.table import DialectTable, NativeKey

__all__ = ["NEURON_KEYS", "NEURON_TABLE"]


def _unmarked(row: NativeKey) -> NativeKey:
    marks = {leg: value for leg, value in row.marker_values.items() if leg != "P"}
    usual = (
        {} if row.marker_values != marks else {leg: value for leg, value in row.default_values.items() if leg != "P"}
    )
    return replace(without_releases(row), marker_values=marks, default_values=usual)


NEURON_KEYS: Final = tuple(_unmarked(row) for row in NIXL_TABLE.native_keys)
"""NIXL's, where prefill need not be told anything."""

NEURON_TABLE: Final = DialectTable(
    name="neuron",
    title="Neuron NIXL, wrapped",
    extension="com.amazonaws.neuron",
    mode="pull",
    order="prefill first",
    family="nixl",
    container_paths={
        "P": "kv_transfer_params",
        "R": "kv_transfer_params",
        "D": "disagg_prefill_resp.kv_transfer_params",
    },
    transfer_id_source="the prefill engine: remote_request_id",
    software="vLLM for Neuron",
    source="AIBrix e3e10f9 pkg/plugins/gateway/algorithms/pd/transfer/nixl.go; production-stack a6c01db "
    "src/vllm_router/services/request_service/request.py",
    native_keys=NEURON_KEYS,
    indistinguishable_from=NIXL_TABLE,
    notes=(
        "`disagg_prefill_resp` holds the whole answer, the generated text included.",
        "Which release was the first is not known here: the engine's package is not public.",
    ),
)
