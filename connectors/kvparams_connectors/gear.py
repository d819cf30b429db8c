"""What every save and every load of one connector works with.

The one rule: it is put together once, when the connector is made.
"""

from dataclasses import dataclass

from kvparams.pages import PageIdentity, Refusal, seal, verify
from kvparams.seals import PageKeys, SealKeys
from kvparams_connectors.arena import Arena, Slot
from kvparams_connectors.connector_settings import ConnectorSettings
from kvparams_connectors.layout import PagedKVLayout
from kvparams_connectors.plan import Plan
from kvparams_connectors.staging import Mover
from kvparams_connectors.store import Code, KVStore, Result

__all__ = ["Gear"]


@dataclass(frozen=True, slots=True)
class Gear:
    """A store, the engine's tensors, and what lies between them."""

    store: KVStore
    arena: Arena
    layout: PagedKVLayout
    mover: Mover
    settings: ConnectorSettings
    seals: SealKeys | None

    def seal(self, slot: Slot, plan: Plan, identity: PageIdentity, payload_checksum: int | None = None) -> memoryview:
        """Write the header of a part in front of its payload in `slot`; the bytes to store. See `seal`."""
        buffer = slot.view[: identity.stored_bytes]
        seal(buffer, identity, self._keys(plan), payload_checksum=payload_checksum)
        return buffer

    def judge(
        self, slot: Slot, result: Result, plan: Plan, identity: PageIdentity, payload_checksum: int | None = None
    ) -> Refusal | None:
        """Why what the store put into `slot` is not the part that was asked for; None if it is. See `verify`."""
        if result.code is Code.TOO_LARGE or (not self.settings.verify and result.nbytes != identity.stored_bytes):
            return Refusal("torn", f"{result.nbytes} of {identity.stored_bytes} bytes")
        if not self.settings.verify:
            return None
        page = slot.view[: result.nbytes]
        return verify(page, identity, self._keys(plan), payload_checksum=payload_checksum)

    def _keys(self, plan: Plan) -> PageKeys | None:
        return None if self.seals is None else self.seals.for_tenant(plan.namespace.cache_salt)
