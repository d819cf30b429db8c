"""llm-d: headers choose the pods; a sidecar beside the decode engine turns them into one of the other dialects.

What it sends to the engines is NIXL (`nixlv2`), MoRIIO, Mooncake, the offload tier or SGLang.
"""

from typing import Final

from kvparams.dialects.shared_keys import CACHE_SALT, DATA_PARALLEL_RANK
from kvparams.dialects.table import DialectTable, NativeKey
from kvparams.dialects.value_types import ADDRESSES

__all__ = ["LLM_D_TABLE"]

LLM_D_TABLE: Final = DialectTable(
    name="llm-d",
    title="llm-d headers",
    extension="ai.llm-d.routing",
    mode="pull",
    order="prefill first",
    container_paths=dict.fromkeys("PRD", "kv_transfer_params"),
    transfer_id_source="the sidecar, as its connector wants it",
    software="llm-d-router",
    since="0.2",
    source="llm-d-router ebab687 pkg/common/routing/common.go; pull request #236 (July 2025) for the header's name",
    native_keys=(
        NativeKey(
            "x-prefiller-host-port",
            ADDRESSES,
            "D",
            "the prefill pods to choose from",
            location="headers",
            address="url",
        ),
        NativeKey("x-encoder-hosts-ports", ADDRESSES, "D", "the encoder pods", location="headers", address="url"),
        NativeKey(
            "x-data-parallel-host-port", ADDRESSES, "D", "the rank of the decode pod", location="headers", address="url"
        ),
        NativeKey(
            "x-kv-cache-source-host-port",
            ADDRESSES,
            "D",
            "a pod that has a prefix of the prompt",
            location="headers",
            address="url",
        ),
        DATA_PARALLEL_RANK,
        CACHE_SALT,
    ),
    notes=(
        "The headers come with the one request that reaches the decode pod; the sidecar sends the prefill leg.",
        "Which prefill pods a header may name, the sidecar checks only where that is switched on.",
    ),
)
