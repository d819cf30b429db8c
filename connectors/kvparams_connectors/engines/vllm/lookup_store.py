"""The scheduler's own handle on the store: it asks what is there, and reads or writes no page.

It must see what the workers see. A store that keeps values in the process that opened it cannot be asked from here, but
for peer memory, which says at a known place what it has.
"""

from dataclasses import dataclass, replace

from kvparams_connectors.store import KVStore
from kvparams_connectors.store_url import StoreError, StoreURL
from kvparams_connectors.stores.guard.store import GuardedStore, open_guarded

__all__ = ["LookupStore", "open_lookup_store"]

_UNUSED_BYTES = 1 << 20
"""Of memory for own values, of which there are none."""


@dataclass(frozen=True, slots=True)
class LookupStore:
    """A store to ask."""

    store: KVStore
    address: str | None
    """Where this engine's own pages are read, by its scheduler and by others; None: in the store itself."""


def open_lookup_store(url: str, *, ranks: int) -> LookupStore:
    """Open the store that `url` names, to ask it.

    Args:
        url: of the workers' store.
        ranks: how many workers there are.

    Raises:
        StoreError: the URL is wrong, the store cannot be opened, or cannot be asked from here.
    """
    parsed = StoreURL.parse(url)
    if parsed.scheme == "peer":
        return _peer(parsed, ranks)
    store = open_guarded(url)
    if not store.capabilities.shared:
        store.close()
        raise StoreError(
            f"the store {parsed.scheme}: keeps its values in one process, but vLLM's scheduler and workers are "
            "several processes; choose a shared store, such as file: on one machine, or valkey:"
        )
    return LookupStore(store, store.address)


def _peer(url: StoreURL, ranks: int) -> LookupStore:
    from kvparams_connectors.stores.peer.settings import PeerSettings
    from kvparams_connectors.stores.peer.store import PeerStore

    settings = PeerSettings.of(url)
    if ranks > 1:
        raise StoreError("peer: the workers of tensor parallelism would all listen at one port; use a shared store")
    if settings.port is None:
        raise StoreError("peer: give the port of the worker, which the scheduler needs: peer://host:7000")
    own = f"{settings.reachable}:{settings.port}" if settings.port else None
    store = PeerStore(replace(settings, port=0, size_bytes=_UNUSED_BYTES, transport="tcp"))
    return LookupStore(GuardedStore(store, name="peer"), own)
