"""What every save and every load of one connector works with.

The one rule: it is put together once, when the connector is made.
"""

from dataclasses import dataclass

from kvparams.page_auth import PageAuthKeys, TenantPageAuthKeys
from kvparams.pages import PageIdentity, PageRefusal, seal, verify
from kvparams_connectors.arena import Arena, Slot
from kvparams_connectors.store import KVStore, Result, ResultCode
from kvparams_connectors.transfer.block_copier import BlockCopier
from kvparams_connectors.transfer.connector_settings import ConnectorSettings
from kvparams_connectors.transfer.layout import PagedKVLayout
from kvparams_connectors.transfer.sequence_plan import SequencePlan

__all__ = ["TransferContext"]


@dataclass(frozen=True, slots=True)
class TransferContext:
    """A store, the engine's tensors, and what lies between them."""

    store: KVStore
    arena: Arena
    layout: PagedKVLayout
    copier: BlockCopier
    settings: ConnectorSettings
    page_auth: PageAuthKeys | None

    def seal(
        self, slot: Slot, plan: SequencePlan, identity: PageIdentity, payload_checksum: int | None = None
    ) -> memoryview:
        """Write the header of a part in front of its payload in `slot`; the bytes to store. See `seal`."""
        buffer = slot.view[: identity.stored_bytes]
        seal(buffer, identity, self._keys(plan), payload_checksum=payload_checksum)
        return buffer

    def verify(
        self,
        slot: Slot,
        result: Result,
        plan: SequencePlan,
        identity: PageIdentity,
        payload_checksum: int | None = None,
    ) -> PageRefusal | None:
        """Why what the store put into `slot` is not the part that was asked for; None if it is. See `verify`."""
        if result.code is ResultCode.TOO_LARGE or (not self.settings.verify and result.nbytes != identity.stored_bytes):
            return PageRefusal("torn", f"{result.nbytes} of {identity.stored_bytes} bytes")
        if not self.settings.verify:
            return None
        page = slot.view[: result.nbytes]
        return verify(page, identity, self._keys(plan), payload_checksum=payload_checksum)

    def _keys(self, plan: SequencePlan) -> TenantPageAuthKeys | None:
        return None if self.page_auth is None else self.page_auth.for_tenant(plan.namespace.cache_salt)
