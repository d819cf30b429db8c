"""Holds what every save and every load of one connector works with.

It is put together once, when the connector is made.
"""

from dataclasses import dataclass

from kvparams.page_auth import PageAuthKeys
from kvparams_connectors.arena import Arena
from kvparams_connectors.store import KVStore
from kvparams_connectors.transfer.block_copier import BlockCopier
from kvparams_connectors.transfer.connector_settings import ConnectorSettings
from kvparams_connectors.transfer.layout import PagedKVLayout
from kvparams_connectors.transfer.page_pipeline import PagePipeline
from kvparams_connectors.transfer.sequence_plan import SequencePlan
from kvparams_connectors.value_memory import ValueMemory

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

    @property
    def memory(self) -> ValueMemory | None:
        """Returns the store's values, if pages can be copied straight between them and the engine's blocks."""
        return self.store.memory if self.copier.host is not None else None

    def pages_of(self, plan: SequencePlan) -> PagePipeline:
        """Returns what seals and verifies the pages of a sequence, with the keys of its tenant."""
        keys = None if self.page_auth is None else self.page_auth.for_tenant(plan.namespace.cache_salt)
        return PagePipeline(self.store, keys, self.settings.deadline_s, verifies=self.settings.verify)
