"""Connectors that find KV by its content and take nothing with a request: prefill saves, decode looks it up.

Of vLLM 0.32.0: MooncakeStoreConnector, LMCacheConnectorV1 and LMCacheMPConnector, ExampleConnector, FlexKVConnectorV1,
HF3FSKVConnector, and OffloadingConnector over a tier that both engines reach. Legs are not told where the KV is, so the
proxy cannot know whether it is there. Decode computes the tokens that it does not find, and only its metrics count them
(`vllm:external_prefix_cache_hits`).
"""

from collections.abc import Mapping
from typing import Final

from kvparams.dialects.interface import BootstrapInfo, BootstrapProtocol, Dialect, ReleaseRequest
from kvparams.dialects.shared_keys import CACHE_SALT
from kvparams.dialects.table import DialectTable, NativeKey
from kvparams.dialects.value_types import ANYTHING, WHOLE, NumberType
from kvparams.instances import RequestFacts
from kvparams.params import Mode

__all__ = ["CONTENT", "CONTENT_TABLE", "ContentDialect"]

CONTENT_TABLE: Final = DialectTable(
    name="content",
    title="Found by content: MooncakeStore, LMCache, LMCacheMP, FlexKV, HF3FS, Example, Offloading",
    extension="ai.vllm.content",
    mode="store",
    order="prefill first",
    container_paths=dict.fromkeys("PRD", "kv_transfer_params"),
    transfer_id_source="nobody: the content of the prompt is the key",
    software="vLLM",
    since="0.9",
    source="vLLM 0.32.0 distributed/kv_transfer/kv_connector/factory.py, lmcache_mp_connector.py and mooncake/store/; "
    "LMCache 0.5.6 integration/vllm/; llm-d-router ebab687 pkg/sidecar/proxy/connector_shared_storage.go",
    native_keys=(
        NativeKey(
            "num_lmcache_extra_cached_tokens",
            WHOLE,
            "PDR",
            "asked for by its presence: hits beyond vLLM's own",
            since="0.20",
        ),
        NativeKey(
            "cached_token_stats", ANYTHING, "PDR", "the same of LMCache's own connector, which answers with an object"
        ),
        NativeKey("lmcache.*", ANYTHING, "PD", "settings of LMCache for this request"),
        NativeKey(
            "cache_hit_threshold",
            NumberType(0, 1),
            "PD",
            "the part of the prompt that must be cached, or decode refuses; llm-d's shared storage sends 0",
            location="body",
        ),
        CACHE_SALT,
    ),
    notes=("Most requests carry nothing; decode computes what it does not find.",),
)


class ContentDialect(Dialect):
    """See the module."""

    table = CONTENT_TABLE
    mode: Mode = CONTENT_TABLE.mode
    sends_legs_together = carries_keys_in_body = False
    has_reusable_kv = True
    lease_s = 600.0
    """What has gone meanwhile is a miss, so this only bounds how long a request may wait for decode."""
    bootstrap: BootstrapProtocol | None = None

    def can_split(self, request: RequestFacts) -> bool:
        """Always: each prompt is found by its own content."""
        return True

    def prefill_keys(self, transfer_id: str) -> bytes:
        """None."""
        return b"{}"

    def decode_keys(
        self, answer: Mapping[str, object], transfer_id: str, place: BootstrapInfo | None
    ) -> Mapping[str, object]:
        """None, and nothing is expected of the answer."""
        return {}

    def release_request(self, native: bytes | None) -> ReleaseRequest | None:
        """Returns None, because saved KV stays available to other requests."""
        return None


CONTENT: Final = ContentDialect()
