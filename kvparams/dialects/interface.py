"""Defines `Dialect`: the native keys that engines with one KV connector read and write beside the document.

A dialect is one small file: a table of native keys (`kvparams.dialects.table`), which is all that translation needs,
and where a proxy can route with it an object as below, which takes what it writes from its `table`. Either is
registered under the dialect's name in the entry-point group `kvparams.dialects`. An engine's statements about its own
KV are carried to the decode engine unchanged.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvparams.errors import KVParamsError
from kvparams.instances import DataParallelRank, RequestFacts, Role
from kvparams.params import Mode

__all__ = [
    "BootstrapInfo",
    "BootstrapProtocol",
    "Dialect",
    "HandoffMissing",
    "ReleaseRequest",
]

BootstrapInfo = Mapping[str, object]
"""Where decode engines find one prefill engine: native members of `kv_transfer_params`."""


@dataclass(slots=True)
class ReleaseRequest:
    """A `ReleaseRequest` is a small request to an engine that releases KV which nobody will fetch."""

    role: Role
    """Whom to ask: the producer itself (prefill), or any decode engine."""
    native: bytes
    """Native members of `kv_transfer_params`, as the text of a JSON object."""
    leg: bool
    """Whether it is a decode leg of one token of the client's own request; otherwise our document alone is posted, in
    phase `release`, to `/v1/kvparams`."""


class HandoffMissing(KVParamsError):
    """The prefill engine answered, but not with what the decode engine needs to find the KV."""


class BootstrapProtocol(Protocol):
    """A small server beside a prefill engine, that says who the engine is to those who fetch its KV."""

    path: str
    """What it is asked, with GET."""
    port: int
    """Where it listens if nobody says otherwise, on the engine's own host."""

    def parse_info(self, url: str, answer: object, rank: DataParallelRank | None = None) -> BootstrapInfo:
        """Parses the bootstrap server's answer into the facts about the prefill engine that decode engines need.

        Args:
            url: of the bootstrap server, as decode engines reach it, without a slash at its end.
            answer: the JSON that it answered.
            rank: which of the engine's data-parallel ranks is meant; left out where the engine has no ranks.

        Raises:
            HandoffMissing: the answer says nothing that can be used; the message says what is wrong with it.
        """
        ...


class Dialect(Protocol):
    """A `Dialect` translates between a plan's legs and the native keys of one KV connector.

    A class that derives from it has the defaults of the members that few connectors need.
    """

    mode: Mode
    """How the KV travels."""
    sends_legs_together: bool
    """Whether prefill ends only once decode has met it: then whoever runs both legs sends them at once."""
    carries_keys_in_body: bool
    """Whether both engines get the client's own body with native keys in it, instead of in `kv_transfer_params`:
    where the first token is prefill's, it needs all that the client says of tokens."""
    has_reusable_kv: bool
    """Whether another decode engine can fetch the same KV after one may have done so."""
    lease_s: float
    """How long the producer keeps it where its answer does not say."""
    bootstrap: BootstrapProtocol | None
    """What each prefill engine is asked before it is given work; None where its answers say enough."""
    rank_key: str | None = None
    """The member of a leg's body that names the data-parallel rank for it, for a connector that has one. The header
    `x-data-parallel-rank` goes to every rank besides."""
    prompt_ids_key: str | None = None
    """The native member in which both legs carry the token ids of the prompt, for a connector that has one. Most
    engines tokenize for themselves."""

    @abstractmethod
    def can_split(self, request: RequestFacts) -> bool:
        """Returns True if the connector can carry this request between prefill and decode.

        Otherwise one decode engine answers it alone.
        """
        ...

    @abstractmethod
    def prefill_keys(self, transfer_id: str) -> bytes:
        """The native members of `kv_transfer_params` on the prefill request, as the text of a JSON object.

        Args:
            transfer_id: of this try to move the KV, as in our document.
        """
        ...

    @abstractmethod
    def decode_keys(
        self, answer: Mapping[str, object], transfer_id: str, place: BootstrapInfo | None
    ) -> Mapping[str, object]:
        """The native members of `kv_transfer_params` on the decode request.

        Args:
            answer: `kv_transfer_params` of the prefill engine's answer; empty if it had none.
            transfer_id: the one that the prefill request had.
            place: what the prefill engine's bootstrap server said; None where there is none.

        Raises:
            HandoffMissing: decode could only recompute with this.
        """
        ...

    @abstractmethod
    def release_request(self, native: bytes | None) -> ReleaseRequest | None:
        """Returns the request that releases KV which no decode engine has fetched.

        None means that the KV may stay until its lease expires.

        Args:
            native: what `decode_keys` made, as the text of a JSON object; None where prefill broke off before it had
                answered, and may have left something behind all the same.
        """
        ...
