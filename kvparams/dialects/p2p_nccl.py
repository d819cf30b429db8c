"""vLLM's P2pNcclConnector, which no release speaks any more: both addresses stood in the request id.

Its tensors were named by the engine's internal request id, which vLLM made random on each leg from 0.14 on, so that
every transfer hung, until the connector was removed.
"""

from typing import Final

from kvparams.dialects.table import DialectTable

__all__ = ["P2P_NCCL_TABLE"]

P2P_NCCL_TABLE: Final = DialectTable(
    name="p2p-nccl",
    title="vLLM P2pNcclConnector",
    extension="ai.vllm.p2p-nccl",
    mode="push",
    order="prefill first",
    container_paths=dict.fromkeys("PRD", "kv_transfer_params"),
    transfer_id_source="the router: X-Request-Id, the same on both legs",
    software="vLLM",
    since="0.9",
    until="0.26",
    source="vLLM 0.20.0 distributed/kv_transfer/kv_connector/v1/p2p/p2p_nccl_connector.py",
    request_id=r"^___prefill_addr_[A-Za-z0-9._\[\]:-]{1,80}:[0-9]{1,5}___decode_addr_[A-Za-z0-9._\[\]:-]{1,80}:[0-9]{1,5}_[0-9a-f]{32}$",
    notes=("The body has no native keys. Whoever chooses the request id chooses the addresses that engines contact.",),
)
