"""A store that both sides reach, spoken to in our own document alone: keys say what to put and what to get.

Where the engines meet, decode is told at once and waits in the store for what prefill puts there.
"""

from collections.abc import Mapping
from typing import Final

from kvparams.codec import DOCUMENT_KEY
from kvparams.dialects.interface import BootstrapInfo, BootstrapProtocol, Dialect, HandoffMissing, ReleaseRequest
from kvparams.instances import RequestFacts, Role
from kvparams.params import Mode

__all__ = ["STORE", "STORE_DROP", "STORE_MEET", "StoreDialect"]


class StoreDialect(Dialect):
    """See the module."""

    sends_legs_together = carries_keys_in_body = False
    has_reusable_kv = True
    lease_s = 600.0
    """A page that has gone meanwhile is a miss, so this only bounds how long a request may wait for decode."""
    bootstrap: BootstrapProtocol | None = None

    def __init__(self, *, drop: bool, meet: bool = False) -> None:
        """`drop`: pages that nobody fetched are dropped at once; otherwise they stay for others, until their time.
        `meet`: decode may be told before prefill has answered."""
        self._drop = drop
        self.mode: Mode = "rendezvous" if meet else "store"

    def can_split(self, request: RequestFacts) -> bool:
        """Always: pages are found by content, so several prompts and several answers share them."""
        return True

    def prefill_keys(self, transfer_id: str) -> bytes:
        """None beside our document."""
        return b"{}"

    def decode_keys(
        self, answer: Mapping[str, object], transfer_id: str, place: BootstrapInfo | None
    ) -> Mapping[str, object]:
        """None beside our document, which prefill must have answered with."""
        if DOCUMENT_KEY not in answer and self.mode == "store":
            raise HandoffMissing(
                "the prefill engine's answer carries no kv_transfer_params.kvparams: does its connector speak kvparams?"
            )
        return {}

    def release_request(self, native: bytes | None) -> ReleaseRequest | None:
        """Returns the request that drops the KV saved by this transfer, or None if nothing is dropped.

        The transfer may have saved only a part of its KV.
        """
        return ReleaseRequest(Role.PREFILL, native or b"{}", leg=False) if self._drop else None


STORE: Final = StoreDialect(drop=False)
STORE_DROP: Final = StoreDialect(drop=True)
STORE_MEET: Final = StoreDialect(drop=False, meet=True)
