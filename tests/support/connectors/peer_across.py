"""Joins two peer stores into one, for the conformance suite: one puts and deletes, the other reads over the network.

No read is answered from the memory of the store that reads.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvparams_connectors.jobs import Job
from kvparams_connectors.store import DEFAULT_DEADLINE_S, Capabilities, GetOp, KVStore, PutOp, Results
from kvparams_connectors.stores.peer.store import PeerStore

if TYPE_CHECKING:
    from kvparams_connectors.arena import Arena

__all__ = ["Across"]


class Across(KVStore):
    """Both belong to this and are closed with it."""

    def __init__(self, owner: PeerStore, reader: PeerStore) -> None:
        self.owner, self.reader = owner, reader
        assert owner.address is not None
        self._source = owner.address

    @property
    def capabilities(self) -> Capabilities:
        return self.owner.capabilities

    def register(self, arena: "Arena") -> None:
        self.reader.register(arena)

    def put(self, ops: Sequence[PutOp], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        return self.owner.put(ops, deadline_s)

    def get(self, ops: Sequence[GetOp], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        self.reader.hint_location([op.key for op in ops], self._source)
        return self.reader.get(ops, deadline_s)

    def exists(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        self.reader.hint_location(keys, self._source)
        return self.reader.exists(keys, deadline_s)

    def delete(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        return self.owner.delete(keys, deadline_s)

    def close(self) -> None:
        self.reader.close()
        self.owner.close()
