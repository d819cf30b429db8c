"""vLLM's NixlPushConnector: the prefill engine writes into blocks that decode has registered with it.

The keys are NIXL's; what is in them counts less, because decode tells prefill itself where to write.
"""

from dataclasses import replace
from typing import Final

from kvparams.dialects.nixl import NIXL_TABLE
from kvparams.dialects.table import DialectTable, NativeKey
from kvparams.dialects.value_types import EnumType

__all__ = ["NIXL_PUSH_TABLE"]

_CHANGED: Final = {
    "transfer_mode": {"value_type": EnumType(("push",))},
    "tp_size": {"required_legs": "D"},
    "remote_block_ids": {"required_legs": "", "description": "ignored by decode"},
    "remote_request_id": {"required_legs": ""},
}


def _pushed(row: NativeKey) -> NativeKey:
    return replace(row, **_CHANGED[row.name]) if row.name in _CHANGED else row  # pyright: ignore[reportArgumentType]


NIXL_PUSH_TABLE: Final = DialectTable(
    name="nixl-push",
    title="vLLM NixlPushConnector",
    extension="ai.vllm.nixl-push",
    mode="push",
    order="either",
    container_paths=dict.fromkeys("PRD", "kv_transfer_params"),
    transfer_id_source="nobody: the request id without vLLM's suffix has to be the same on both legs",
    software="vLLM",
    since="0.26",
    source="vLLM 0.32.0 distributed/kv_transfer/kv_connector/v1/nixl/push_scheduler.py",
    native_keys=tuple(_pushed(row) for row in NIXL_TABLE.native_keys if row.name != "remote_blocks_expiry_time"),
    notes=(
        "Both legs need the same X-Request-Id, the same endpoint and the same number of the prompt.",
        "A decode engine that never registers is given up after 480 s.",
    ),
)
