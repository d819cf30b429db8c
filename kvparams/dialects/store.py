"""A store that both sides reach, spoken to in our own document alone: keys say what to put and what to get."""

from collections.abc import Mapping
from typing import Final

from kvparams.codec import DOCUMENT_KEY
from kvparams.dialects import Abandon, Bootstrap, HandoffMissing, Place
from kvparams.params import Mode
from kvparams.scheduling import RequestFacts, Role

__all__ = ["DROPPING_STORE", "STORE", "Store"]


class Store:
    """See the module."""

    mode: Mode = "store"
    reusable = True
    lease_s = 600.0
    """A page that has gone meanwhile is a miss, so this only bounds how long a request may wait for decode."""
    bootstrap: Bootstrap | None = None

    def __init__(self, *, drop: bool) -> None:
        """`drop`: pages that nobody fetched are dropped at once; otherwise they stay for others, until their time."""
        self._drop = drop

    def splits(self, request: RequestFacts) -> bool:
        """Always: pages are found by content, so several prompts and several answers share them."""
        return True

    def prefill_keys(self, transfer_id: str) -> bytes:
        """None beside our document."""
        return b"{}"

    def decode_keys(self, answer: Mapping[str, object], transfer_id: str, place: Place | None) -> Mapping[str, object]:
        """None beside our document, which prefill must have answered with."""
        if DOCUMENT_KEY not in answer:
            raise HandoffMissing(
                "the prefill engine's answer carries no kv_transfer_params.kvparams: does its connector speak kvparams?"
            )
        return {}

    def abandon(self, native: bytes | None) -> Abandon | None:
        """Nothing, or the release of what this transfer saved, be it a part of it."""
        return Abandon(Role.PREFILL, native or b"{}", leg=False) if self._drop else None


STORE: Final = Store(drop=False)
DROPPING_STORE: Final = Store(drop=True)
