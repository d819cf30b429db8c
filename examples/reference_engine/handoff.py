"""Derives the KV instructions of one request from its document.

Every value here follows from the request; the module knows nothing of the engine.
"""

from dataclasses import dataclass
from hashlib import blake2b

from kvparams import peer_reads
from kvparams.params import KVTransferParams

__all__ = ["Handoff"]


@dataclass(frozen=True, slots=True)
class Handoff:
    """A `Handoff` holds the document of one request, and the facts that follow from it."""

    params: KVTransferParams | None
    """The document that came; None: an ordinary request."""
    shared: KVTransferParams | None
    """The same with the request's own cache salt: what page keys are derived with."""

    @property
    def prefilling(self) -> bool:
        """Returns True if the answer must wait until the KV is stored."""
        return self.params is not None and self.params.phase == "prefill"

    @property
    def source(self) -> str | None:
        """Returns the address at which prefill may find another engine's KV of the prompt."""
        return None if self.params is None else peer_reads.peer_source(self.params)

    @property
    def decoding(self) -> bool:
        """Returns True if the KV is promised to be stored."""
        return self.params is not None and self.params.phase == "decode"

    @property
    def meeting(self) -> bool:
        """Returns True if the KV may not be stored yet, because prefill runs at the same time."""
        return self.decoding and self.params is not None and self.params.mode == "rendezvous"

    @property
    def fails(self) -> bool:
        """Returns True if KV that cannot be loaded ends the request."""
        return self.params is not None and self.params.on_load_failure == "fail"

    @property
    def cache_root(self) -> bytes:
        """Returns the root of the names of locally cached blocks, which differs by salt and adapter."""
        isolation = self.shared.isolation if self.shared is not None else None
        parts = (isolation.cache_salt, isolation.lora) if isolation is not None else (None, None)
        return blake2b(repr(parts).encode(), digest_size=16).digest()
