"""Mooncake's client library: what is used of it, and how it is loaded and set up.

It has no types of its own. Nothing here calls it but to set it up; everything else goes through `client.py`.
"""

import importlib
import threading
from collections.abc import Sequence
from typing import Any, Final, Protocol, cast

from kvparams_connectors.store_url import StoreError
from kvparams_connectors.stores.mooncake.settings import MooncakeSettings
from kvparams_connectors.stores.mooncake.status_codes import MooncakeStatus

__all__ = [
    "MooncakeDistributedStore",
    "ReplicaDescriptors",
    "ReplicaPlacement",
    "load_library",
    "replica_placement",
    "replicate_config",
    "set_up_client",
]

_SETUP_S: Final = 20.0

ReplicaPlacement = list[tuple[str, int, int]]
"""Where the copies of one value lie: endpoint, address there, size in bytes."""


ReplicaDescriptors = Sequence[Any]
"""The same in the library's own words; not empty."""


class MooncakeDistributedStore(Protocol):
    """Describes what is used of `MooncakeDistributedStore`. All but `setup` and `close` let other threads run."""

    def setup(
        self, local: str, metadata: str, segment: int, buffer: int, protocol: str, devices: str, master: str, /
    ) -> int:
        """Connects to the cluster."""
        ...

    def close(self) -> int:
        """Leaves the cluster."""
        ...

    def register_buffer(self, address: int, size: int, /) -> int:
        """Registers memory."""
        ...

    def unregister_buffer(self, address: int, /) -> int:
        """Takes back memory that was registered."""
        ...

    def batch_is_exist(self, keys: list[str], /) -> list[int]:
        """Looks keys up."""
        ...

    def batch_get_replica_desc(self, keys: list[str], /) -> dict[str, list[Any]]:
        """Returns where values lie."""
        ...

    def batch_remove(self, keys: list[str], force: bool, /) -> list[int]:
        """Deletes keys."""
        ...

    def batch_put_session_start(self, keys: list[str], sizes: list[int], config: object, /) -> list[int]:
        """Begins to put values."""
        ...

    def batch_put_from_multi_buffer_ranges(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], offsets: list[list[int]], /
    ) -> list[int]:
        """Writes parts of values."""
        ...

    def batch_put_session_end(self, keys: list[str], /) -> list[int]:
        """Makes values visible."""
        ...

    def batch_put_session_revoke(self, keys: list[str], /) -> list[int]:
        """Gives values up that were begun."""
        ...

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int], /) -> list[int]:
        """Reads values into one buffer each."""
        ...

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], /
    ) -> list[int]:
        """Reads values into several buffers each."""
        ...

    def get_into_ranges(
        self,
        addresses: list[int],
        keys: list[list[str]],
        targets: list[list[list[int]]],
        sources: list[list[list[int]]],
        sizes: list[list[list[int]]],
        /,
    ) -> list[list[list[int]]]:
        """Reads parts of values."""
        ...


def replica_placement(copies: ReplicaDescriptors) -> ReplicaPlacement:
    """Returns where a value lies."""
    if len(copies) == 1 and copies[0].is_memory_replica():
        only = copies[0].get_memory_descriptor().buffer_descriptor
        return [(only.transport_endpoint, only.buffer_address, only.size)]
    found: ReplicaPlacement = []
    for copy in copies:
        if copy.is_memory_replica():
            where = copy.get_memory_descriptor().buffer_descriptor
            found.append((where.transport_endpoint, where.buffer_address, where.size))
        else:
            disk = copy.get_disk_descriptor()
            found.append((disk.file_path, 0, disk.object_size))
    return found


def load_library() -> Any:
    """The library. Raises StoreError if it is not installed or cannot be loaded here."""
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise StoreError(
            f"mooncake store: its client library cannot be loaded ({error}); pip install 'kvparams[mooncake]' on "
            "machines with CUDA, 'kvparams[mooncake-cpu]' on others, and the package libibverbs1"
        ) from error


def replicate_config(module: Any, settings: MooncakeSettings) -> object:
    """Returns what every put is told. Raises StoreError if the library is too old."""
    if not hasattr(module.MooncakeDistributedStore, "batch_put_session_start"):
        raise StoreError("mooncake store: its client library is too old; 0.3.13 or later is needed")
    config = module.ReplicateConfig()
    config.replica_num = settings.replicas
    return cast("object", config)


def set_up_client(module: Any, settings: MooncakeSettings) -> MooncakeDistributedStore:
    """A client that is set up, by a thread of its own: it is not known how long that takes.

    Raises:
        StoreError: it could not be, or not in time.
    """
    made: list[MooncakeDistributedStore] = []
    answers: list[int] = []

    def work() -> None:
        native = cast("MooncakeDistributedStore", module.MooncakeDistributedStore())
        answer = native.setup(
            settings.local,
            settings.metadata,
            settings.segment_bytes,
            0,  # of the library's own copies none is used
            settings.protocol,
            settings.devices,
            settings.master,
        )
        made.append(native)
        answers.append(answer)

    thread = threading.Thread(target=work, name="kvparams-mooncake-setup", daemon=True)
    thread.start()
    thread.join(_SETUP_S)
    if not answers and not thread.is_alive():
        raise StoreError("mooncake store: the client library failed to set up a client; its messages are on stderr")
    if not answers:
        raise StoreError(f"mooncake store: the master at {settings.master} accepts connections, but does not answer")
    if answers[0] != MooncakeStatus.OK:
        raise StoreError(
            f"mooncake store: the client library cannot be set up with the master at {settings.master} as "
            f"{settings.local} over {settings.protocol}: {answers[0]}"
        )
    return made[0]
