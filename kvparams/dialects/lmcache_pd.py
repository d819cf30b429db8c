"""LMCacheConnectorV1 with its PD backend: prefill is told where decode listens, and pushes KV there.

Decode has therefore to be chosen first; it is sent the prompt and the first token, and no native keys.
"""

from typing import Final

from kvparams.dialects.forms import ANYTHING, HOST, ID, PORT, TOKEN, WHOLE, Each, Either
from kvparams.dialects.shared import CACHE_SALT
from kvparams.dialects.table import Row, Table

__all__ = ["LMCACHE_PD_TABLE"]

_SPEC: Final = ("disagg_spec",)
_PORTS: Final = Either((Each(PORT, 4096, 1), PORT))
"""One for each tensor-parallel rank; LMCache's dataclass says an integer, its proxy sends a list."""

LMCACHE_PD_TABLE: Final = Table(
    name="lmcache-pd",
    title="LMCacheConnectorV1, PD over NIXL",
    extension="ai.lmcache.pd",
    mode="push",
    order="prefill first",
    carried=dict.fromkeys("PRD", "kv_transfer_params"),
    mints="the proxy: disagg_spec.req_id",
    software="LMCache",
    since="0.3.9",
    source="LMCache 0.5.6 integration/vllm/vllm_v1_adapter.py, v1/storage_backend/pd_backend.py and "
    "examples/disagg_prefill/disagg_proxy_server.py",
    rows=(
        Row("ret_first_tok", ANYTHING, "P", "asks for the first token; its presence counts", usual={"P": True}),
        Row("req_id", ID, "P", "by which KV is announced to the proxy", "P", member="transfer.id", inside=_SPEC),
        Row("receiver_host", HOST, "P", "the decode engine", "P", inside=_SPEC, address="host"),
        Row("receiver_init_port", _PORTS, "P", "where its ranks shake hands", "P", inside=_SPEC, address="port"),
        Row("receiver_alloc_port", _PORTS, "P", "where its ranks give out memory", "P", inside=_SPEC, address="port"),
        Row(
            "receiver_query_port",
            Either((Each(PORT, 4096), PORT)),
            "P",
            "where they are asked",
            inside=_SPEC,
            address="port",
            since="0.5.6",
        ),
        Row("first_tok", TOKEN, "R", "the first token, which decode is sent behind the prompt", "R"),
        Row("num_lmcache_cached_tokens", WHOLE, "R", "tokens that LMCache had", since="0.5.6"),
        Row("lmcache.*", ANYTHING, "PD", "settings of LMCache for this request"),
        CACHE_SALT,
    ),
    notes=(
        "That KV has arrived, the proxy is told over ZMQ, once for each rank; LMCache's proxy waits for ever.",
        "The decode leg is a completion of token ids: the prompt and first_tok, with one token less to generate.",
    ),
)
