"""A store that both sides reach, spoken to in our own document alone: keys say what to put and what to get.

Where the engines meet, decode is told at once and waits in the store for what prefill puts there.
"""

from collections.abc import Mapping
from typing import Final

from kvparams.codec import DOCUMENT_KEY
from kvparams.dialects import Abandon, Bootstrap, HandoffMissing, Place
from kvparams.params import Mode
from kvparams.scheduling import RequestFacts, Role

__all__ = ["DROPPING_STORE", "MEETING_STORE", "STORE", "Store"]


class Store:
    """See the module."""

    together = in_body = False
    reusable = True
    lease_s = 600.0
    """A page that has gone meanwhile is a miss, so this only bounds how long a request may wait for decode."""
    bootstrap: Bootstrap | None = None

    def __init__(self, *, drop: bool, meet: bool = False) -> None:
        """`drop`: pages that nobody fetched are dropped at once; otherwise they stay for others, until their time.
        `meet`: decode may be told before prefill has answered."""
        self._drop = drop
        self.mode: Mode = "rendezvous" if meet else "store"

    def splits(self, request: RequestFacts) -> bool:
        """Always: pages are found by content, so several prompts and several answers share them."""
        return True

    def prefill_keys(self, transfer_id: str) -> bytes:
        """None beside our document."""
        return b"{}"

    def decode_keys(self, answer: Mapping[str, object], transfer_id: str, place: Place | None) -> Mapping[str, object]:
        """None beside our document, which prefill must have answered with."""
        if DOCUMENT_KEY not in answer and self.mode == "store":
            raise HandoffMissing(
                "the prefill engine's answer carries no kv_transfer_params.kvparams: does its connector speak kvparams?"
            )
        return {}

    def abandon(self, native: bytes | None) -> Abandon | None:
        """Nothing, or the release of what this transfer saved, be it a part of it."""
        return Abandon(Role.PREFILL, native or b"{}", leg=False) if self._drop else None


STORE: Final = Store(drop=False)
DROPPING_STORE: Final = Store(drop=True)
MEETING_STORE: Final = Store(drop=False, meet=True)
