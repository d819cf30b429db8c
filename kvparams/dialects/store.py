"""A store that both sides reach, spoken to in our own document alone: keys say what to put and what to get."""

from collections.abc import Mapping
from typing import Final

from kvparams.codec import DOCUMENT_KEY
from kvparams.dialects import HandoffMissing
from kvparams.params import Mode
from kvparams.scheduling import RequestFacts

__all__ = ["STORE", "Store"]


class Store:
    """See the module."""

    mode: Mode = "store"

    def refuse(self, request: RequestFacts) -> str | None:
        """Nothing: pages are found by content, so several prompts and several answers share them."""
        return None

    def prefill_keys(self) -> bytes:
        """None beside our document."""
        return b"{}"

    def decode_keys(self, answer: Mapping[str, object]) -> Mapping[str, object]:
        """None beside our document, which prefill must have answered with."""
        if DOCUMENT_KEY not in answer:
            raise HandoffMissing(
                "the prefill engine's answer carries no kv_transfer_params.kvparams: does its connector speak kvparams?"
            )
        return {}


STORE: Final = Store()
