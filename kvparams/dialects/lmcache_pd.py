"""LMCacheConnectorV1 with its PD backend: prefill is told where decode listens, and pushes KV there.

Decode has therefore to be chosen first; it is sent the prompt and the first token, and no native keys.
"""

from typing import Final

from kvparams.dialects.shared_keys import CACHE_SALT
from kvparams.dialects.table import DialectTable, NativeKey
from kvparams.dialects.value_types import ANYTHING, HOST, ID, PORT, TOKEN, WHOLE, ListType, UnionType

__all__ = ["LMCACHE_PD_TABLE"]

_SPEC: Final = ("disagg_spec",)
_PORTS: Final = UnionType((ListType(PORT, 4096, 1), PORT))
"""One for each tensor-parallel rank; LMCache's dataclass says an integer, its proxy sends a list."""

LMCACHE_PD_TABLE: Final = DialectTable(
    name="lmcache-pd",
    title="LMCacheConnectorV1, PD over NIXL",
    extension="ai.lmcache.pd",
    mode="push",
    order="prefill first",
    container_paths=dict.fromkeys("PRD", "kv_transfer_params"),
    transfer_id_source="the proxy: disagg_spec.req_id",
    software="LMCache",
    since="0.3.9",
    source="LMCache 0.5.6 integration/vllm/vllm_v1_adapter.py, v1/storage_backend/pd_backend.py and "
    "examples/disagg_prefill/disagg_proxy_server.py",
    native_keys=(
        NativeKey(
            "ret_first_tok", ANYTHING, "P", "asks for the first token; its presence counts", default_values={"P": True}
        ),
        NativeKey("req_id", ID, "P", "by which KV is announced to the proxy", "P", member="transfer.id", parents=_SPEC),
        NativeKey("receiver_host", HOST, "P", "the decode engine", "P", parents=_SPEC, address="host"),
        NativeKey("receiver_init_port", _PORTS, "P", "where its ranks shake hands", "P", parents=_SPEC, address="port"),
        NativeKey(
            "receiver_alloc_port", _PORTS, "P", "where its ranks give out memory", "P", parents=_SPEC, address="port"
        ),
        NativeKey(
            "receiver_query_port",
            UnionType((ListType(PORT, 4096), PORT)),
            "P",
            "where they are asked",
            parents=_SPEC,
            address="port",
            since="0.5.6",
        ),
        NativeKey("first_tok", TOKEN, "R", "the first token, which decode is sent behind the prompt", "R"),
        NativeKey("num_lmcache_cached_tokens", WHOLE, "R", "tokens that LMCache had", since="0.5.6"),
        NativeKey("lmcache.*", ANYTHING, "PD", "settings of LMCache for this request"),
        CACHE_SALT,
    ),
    notes=(
        "That KV has arrived, the proxy is told over ZMQ, once for each rank; LMCache's proxy waits for ever.",
        "The decode leg is a completion of token ids: the prompt and first_tok, with one token less to generate.",
    ),
)
