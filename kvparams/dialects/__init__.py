"""How one kind of KV connector is spoken to: what its engines read and write beside our document.

A dialect is one small object in one file, registered under its name in the entry-point group `kvparams.dialects`. The
one rule: what an engine wrote about its own KV is carried to the decode engine as it came.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from kvparams.errors import KVParamsError
from kvparams.params import Mode
from kvparams.scheduling import RequestFacts, Role

__all__ = ["Abandon", "Dialect", "HandoffMissing"]


class Abandon(NamedTuple):
    """One small request to an engine that gives back KV which nobody will fetch."""

    role: Role
    """Whom to ask: the producer itself (prefill), or any decode engine."""
    native: bytes
    """Native members of `kv_transfer_params`, as the text of a JSON object."""
    leg: bool
    """Whether it is a decode leg of one token of the client's own request; otherwise our document alone is posted, in
    phase `release`, to `/v1/kvparams`."""


class HandoffMissing(KVParamsError):
    """The prefill engine answered, but not with what the decode engine needs to find the KV."""


class Dialect(Protocol):
    """One kind of connector."""

    mode: Mode
    """How the KV travels."""
    reusable: bool
    """Whether another decode engine can fetch the same KV after one may have done so."""
    lease_s: float
    """How long the producer keeps it where its answer does not say."""

    def splits(self, request: RequestFacts) -> bool:
        """Whether such a connector can carry this request between prefill and decode; if not, one decode engine
        answers it alone."""
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

    def abandon(self, native: bytes | None) -> Abandon | None:
        """How to give back KV that no decode engine has fetched; None where it may stay until its time is over.

        Args:
            native: what `decode_keys` made, as the text of a JSON object; None where prefill broke off before it had
                answered, and may have left something behind all the same.
        """
        ...
