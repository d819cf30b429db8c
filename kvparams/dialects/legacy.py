"""Engines that speak only the three fields of vLLM pull request #12957: the proxy chooses a key for each transfer.

Both legs name the prompt (`prefix_prompt_ids`) where the proxy knows its token ids. Prefill is told to put its KV under
the key, decode to get it from there. Nothing is expected of prefill's answer, so a wrong `--connector` shows only in
what decode computes.
"""

import json
from collections.abc import Mapping
from typing import Final

from kvparams.dialects.interface import BootstrapInfo, BootstrapProtocol, Dialect, ReleaseRequest
from kvparams.instances import RequestFacts
from kvparams.params import Mode

__all__ = ["LEGACY", "LegacyDialect"]

_PREFIX: Final = "kvp-"


class LegacyDialect(Dialect):
    """See the module."""

    mode: Mode = "store"
    sends_legs_together = carries_keys_in_body = False
    has_reusable_kv = True
    lease_s = 600.0
    """What has gone meanwhile is a miss, so this only bounds how long a request may wait for decode."""
    bootstrap: BootstrapProtocol | None = None
    prompt_ids_key = "prefix_prompt_ids"

    def can_split(self, request: RequestFacts) -> bool:
        """Returns True for one prompt: a key stands for the KV of one."""
        return request.prompts == 1

    def prefill_keys(self, transfer_id: str) -> bytes:
        """Returns where to put the KV."""
        return json.dumps({"kvcache_store_keys": [_PREFIX + transfer_id], "kvcache_load_keys": None}).encode()

    def decode_keys(
        self, answer: Mapping[str, object], transfer_id: str, place: BootstrapInfo | None
    ) -> Mapping[str, object]:
        """Returns where to get the KV."""
        return {"kvcache_load_keys": [_PREFIX + transfer_id], "kvcache_store_keys": None}

    def release_request(self, native: bytes | None) -> ReleaseRequest | None:
        """Returns None: the three fields cannot ask a store to drop anything."""
        return None


LEGACY: Final = LegacyDialect()
