"""vLLM's NixlPushConnector: the prefill engine writes into blocks that decode has registered with it.

The keys are NIXL's; what is in them counts less, because decode tells prefill itself where to write.
"""

from dataclasses import replace
from typing import Final

from kvparams.dialects.forms import OneOf
from kvparams.dialects.nixl import NIXL_TABLE
from kvparams.dialects.table import Row, Table

__all__ = ["NIXL_PUSH_TABLE"]

_CHANGED: Final = {
    "transfer_mode": {"form": OneOf(("push",))},
    "tp_size": {"needed": "D"},
    "remote_block_ids": {"needed": "", "says": "ignored by decode"},
    "remote_request_id": {"needed": ""},
}


def _pushed(row: Row) -> Row:
    return replace(row, **_CHANGED[row.name]) if row.name in _CHANGED else row  # pyright: ignore[reportArgumentType]


NIXL_PUSH_TABLE: Final = Table(
    name="nixl-push",
    title="vLLM NixlPushConnector",
    extension="ai.vllm.nixl-push",
    mode="push",
    order="either",
    carried=dict.fromkeys("PRD", "kv_transfer_params"),
    mints="nobody: the request id without vLLM's suffix has to be the same on both legs",
    software="vLLM",
    since="0.26",
    source="vLLM 0.32.0 distributed/kv_transfer/kv_connector/v1/nixl/push_scheduler.py",
    rows=tuple(_pushed(row) for row in NIXL_TABLE.rows if row.name != "remote_blocks_expiry_time"),
    notes=(
        "Both legs need the same X-Request-Id, the same endpoint and the same number of the prompt.",
        "A decode engine that never registers is given up after 480 s.",
    ),
)
