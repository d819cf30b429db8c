"""How one kind of KV connector is spoken to: what its engines read and write beside our document.

A dialect is one small object in one file, registered under its name in the entry-point group `kvparams.dialects`. The
one rule: what an engine wrote about its own KV is carried to the decode engine as it came.
"""

from collections.abc import Mapping
from typing import Protocol

from kvparams.errors import KVParamsError
from kvparams.params import Mode
from kvparams.scheduling import RequestFacts

__all__ = ["Dialect", "HandoffMissing", "NotSplittable"]


class HandoffMissing(KVParamsError):
    """The prefill engine answered, but not with what the decode engine needs to find the KV."""


class NotSplittable(KVParamsError):
    """The connector cannot carry this request between prefill and decode; the message is for its sender."""


class Dialect(Protocol):
    """One kind of connector."""

    mode: Mode
    """How the KV travels."""

    def refuse(self, request: RequestFacts) -> str | None:
        """Why this request cannot run over such a connector, in words for its sender; None when it can."""
        ...

    def prefill_keys(self) -> bytes:
        """The native members of `kv_transfer_params` on the prefill request, as the text of a JSON object."""
        ...

    def decode_keys(self, answer: Mapping[str, object]) -> Mapping[str, object]:
        """The native members of `kv_transfer_params` on the decode request.

        Args:
            answer: `kv_transfer_params` of the prefill engine's answer; empty if it had none.

        Raises:
            HandoffMissing: decode could only recompute with this.
        """
        ...
