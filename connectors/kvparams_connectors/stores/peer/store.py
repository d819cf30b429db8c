"""The store of peers: what this process has put lies in its own memory, and others read it from there.

Nothing is pushed and nothing is looked up in a directory: whoever made pages says so in the params, the connector hands
that on with `locate`, and `get` and `exists` of what is not here ask there. What this process has put is its own and
stays a while (`lease`); what others have is read, checked by whoever asked for it, and never kept.

    peer://10.0.0.5:7400?size=64GiB&peers=10.0.0.0/8        a prefill engine
    peer://10.0.0.6:0?size=1GiB&peers=10.0.0.0/8            a decode engine that nobody reads from

Who can reach the port can read all pages, unless `secret_file` is set on all sides. The connection is neither encrypted
nor authenticated after its beginning.

With `transport=mooncake` that is not so: the transfer engine listens on a port of its own, on all addresses of the
machine whatever `host` says, and lets whoever reaches it read and write the memory that is registered with it. Neither
`secret_file` (refused) nor a loopback address protects anything. And a reader's engine connects to where the engine of
a peer says that its data is: an allowed peer can send it to any host. Keep all of it to a network of engines that trust
each other, and use authenticated pages (`kvparams.page_auth`), so that what was written by others is not used.
"""

import logging
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvparams_connectors.advice import Advice
from kvparams_connectors.jobs import Job
from kvparams_connectors.log_rate_limiter import LogRateLimiter
from kvparams_connectors.store import (
    DEFAULT_DEADLINE_S,
    Capabilities,
    GetOp,
    KVStore,
    PutOp,
    ResultCode,
    Results,
)
from kvparams_connectors.store_url import StoreError, StoreURL
from kvparams_connectors.stores.memory.store import MemoryStore
from kvparams_connectors.stores.peer.addresses import PeerAddress, parse_peer_address
from kvparams_connectors.stores.peer.connections import PeerConnections
from kvparams_connectors.stores.peer.gather import AskPeer, BatchGatherer
from kvparams_connectors.stores.peer.key_locations import KeyLocations
from kvparams_connectors.stores.peer.reader import PeerReader
from kvparams_connectors.stores.peer.server import PeerServer
from kvparams_connectors.stores.peer.settings import PeerSettings
from kvparams_connectors.stores.peer.transfer_engine import GuardedTransferEngine

if TYPE_CHECKING:
    from kvparams_connectors.arena import Arena

__all__ = ["PeerSettings", "PeerStatistics", "PeerStore", "open_url"]

_LOGGER: Final = logging.getLogger(__name__)

_MOST_LOCATED: Final = 65_536
_LOCATED_S: Final = 300.0
_BACKLOG: Final = 128
_CLOSE_S: Final = 10.0
"""For readers and reads together."""


@dataclass(frozen=True, slots=True)
class PeerStatistics:
    """Describes what was seen until now."""

    values_served: int
    """Sent to others, or held for them to read."""
    bytes_served: int
    values_pinned: int
    """Being copied, sent or held at the moment: not evicted."""
    readers: int
    """Connected now."""
    readers_refused: int
    """They did not know the secret, or were too many."""
    values_read: int
    """From others."""
    bytes_read: int
    bytes_transferred: int
    """Of these, by Mooncake's transfer engine."""
    connections: int
    """Begun to others."""
    places_refused: int
    """Hints that named somebody who is not among the peers; nobody was asked."""
    values_lost: int
    """Answers that were a MISS because whoever was said to have the value failed, was too slow, refused, or was left
    alone: for a get and for an exists each."""
    places_resting: int
    """Left alone at the moment, because they failed."""
    slots_lost: int
    """Of the landing areas of Mooncake's transfer engine, by reads that failed."""


class PeerStore(KVStore):
    """This process's memory, and that of others."""

    def __init__(self, settings: PeerSettings, *, transfer: GuardedTransferEngine | None = None) -> None:
        """Allocates the memory, and listens for readers.

        Args:
            settings: the settings.
            transfer: a transfer engine that several stores share; the caller closes it. None: one of its own, if the
                settings ask for one.

        Raises:
            StoreError: the address is taken or not of this machine, or the transfer engine cannot be used.
        """
        self._settings = settings
        self._allowed = settings.allowed
        self._located = KeyLocations(_MOST_LOCATED, _LOCATED_S)
        self._counting = threading.Lock()
        self._refused = 0
        self._refusals = LogRateLimiter()
        self._closing = threading.Lock()
        self._released = False
        self._transfer: GuardedTransferEngine | None = None
        listener = None if settings.port == 0 else _listen(settings)
        own: MemoryStore | None = None
        try:
            lease_s, unit_bytes = settings.lease_s, settings.unit_bytes
            own = MemoryStore(settings.size_bytes, unit_bytes=unit_bytes, lease_s=lease_s, name="peer-own")
            self._shares_transfer = transfer is not None
            self._transfer = transfer or _transfer(settings)
            if self._transfer is not None and listener is not None:
                self._transfer.register_memory(own.buffer)
        except BaseException:
            if listener is not None:
                listener.close()
            if own is not None:
                own.close()
            if self._transfer is not None and transfer is None:
                self._transfer.close()
            raise
        self._own = own
        max_value_bytes = own.capabilities.max_value_bytes
        self._capabilities = Capabilities(persistent=False, shared=False, max_value_bytes=max_value_bytes)
        self._address = None if listener is None else str(PeerAddress(settings.reachable, listener.getsockname()[1]))
        self._sources = PeerConnections(self._allowed, secret=settings.secret, connect_s=settings.connect_s)
        self._reader = PeerReader(self._sources, self._located, self._transfer)
        session = "" if self._transfer is None else self._transfer.session
        self._server = None if listener is None else PeerServer(self._own, listener, settings.secret, session)
        self._gatherings = BatchGatherer(settings.threads)

    @property
    def capabilities(self) -> Capabilities:
        """Its own memory's: alone it is private. What others have is seen by whoever is told of it."""
        return self._capabilities

    @property
    def address(self) -> str | None:
        """Returns where other processes can read, or None; see `KVStore.address`."""
        return self._address

    @property
    def statistics(self) -> PeerStatistics:
        """Returns what was seen until now."""
        server, reader = self._server, self._reader
        return PeerStatistics(
            values_served=server.values if server else 0,
            bytes_served=server.nbytes if server else 0,
            values_pinned=self._own.pinned_count,
            readers=server.readers if server else 0,
            readers_refused=server.turned_away if server else 0,
            values_read=reader.values,
            bytes_read=reader.nbytes,
            bytes_transferred=reader.transferred,
            connections=self._sources.opened,
            places_refused=self._refused,
            values_lost=reader.lost,
            places_resting=self._sources.backed_off_count,
            slots_lost=0 if self._transfer is None else self._transfer.lost_slots,
        )

    def advice(self) -> Sequence[Advice]:
        """For `kvparams doctor`."""
        settings = self._settings
        found = [
            Advice("ok", "the store only reads from others, because the port is 0")
            if self._address is None
            else Advice("ok", f"others can read at {self._address}")
        ]
        if not settings.private and not settings.secret:
            anybody = (
                "every client that reaches it can read all pages"
                if self._address
                else "the store cannot verify the peers that it reads from"
            )
            found.append(Advice("warning", anybody, "set secret_file on all engines"))
        if settings.transport == "mooncake":
            open_to_all = (
                "Mooncake's transfer engine listens on all addresses, and every client that reaches it can read "
                "and write registered memory; neither a secret_file nor a loopback address prevents that"
            )
            found.append(
                Advice("warning", open_to_all, "let only engines reach its ports, and use authenticated pages")
            )
            follows = (
                "Mooncake's transfer engine reads from every host that a peer's engine names, also outside of peers="
            )
            found.append(Advice("warning", follows, "let engines reach only each other, or use transport=tcp"))
        if self._transfer is not None and self._transfer.is_exhausted:
            spent = "Mooncake's transfer engine is no longer used, because too many of its reads failed"
            found.append(Advice("warning", spent, "see the log for the peers that failed, and restart"))
        return found

    def register(self, arena: "Arena") -> None:
        """Does nothing: values arrive over a socket, or in the store's own landing area (see `transfer_engine.py`)."""

    # ---- what others have

    def hint_location(self, keys: Sequence[str], source: str) -> None:
        """Believed for five minutes, or until there is something newer; a source that is not allowed is not kept."""
        place = parse_peer_address(source)
        if place is None or place not in self._allowed:
            self._refuse()
        elif source != self._address:
            self._located.add(keys, place, time.monotonic())

    def quarantine(self, keys: Sequence[str]) -> None:
        """They are not read from where they were said to be."""
        self._located.forget(keys)

    def _refuse(self) -> None:
        with self._counting:
            self._refused += 1
        if self._refusals.is_due():
            _LOGGER.warning("peer: a request names a source that is not among the peers; it is not read from")

    # ---- operations

    def put(self, ops: Sequence[PutOp], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Stores values; see `KVStore.put`."""
        return self._own.put(ops, deadline_s)

    def delete(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Here, at once, leased or not. What others have is theirs."""
        return self._own.delete(keys, deadline_s)

    def get(self, ops: Sequence[GetOp], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """Returns what a place does not give, for whatever reason, is a MISS: this store has not failed with it."""

        def ask(place: PeerAddress, indexes: Sequence[int], deadline: float) -> Results:
            return self._reader.get(place, [ops[index] for index in indexes], deadline)

        return self._complete([op.key for op in ops], self._own.get(ops, deadline_s), ask)

    def exists(self, keys: Sequence[str], deadline_s: float = DEFAULT_DEADLINE_S) -> Job[Results]:
        """As `get`."""

        def ask(place: PeerAddress, indexes: Sequence[int], deadline: float) -> Results:
            return self._reader.sizes(place, [keys[index] for index in indexes], deadline)

        return self._complete(keys, self._own.exists(keys, deadline_s), ask)

    def _complete(self, keys: Sequence[str], own: Job[Results], ask: AskPeer) -> Job[Results]:
        """Returns what others may have waits for them; what nobody else has waits for nobody."""
        if all(place is None for place in self._located.find(keys, time.monotonic())):
            return own
        return self._gatherings.gather(own, lambda results: self._left(keys, results), ask, len(keys))

    def _left(self, keys: Sequence[str], results: Results) -> dict[PeerAddress, list[int]]:
        """Returns what is not here, by where it is said to be."""
        left: dict[PeerAddress, list[int]] = {}
        for index, place in enumerate(self._located.find(keys, time.monotonic())):
            if place is not None and results[index].code is ResultCode.MISS:
                left.setdefault(place, []).append(index)
        return left

    # ---- the end

    def close(self) -> None:
        """Nobody reads here any more; then as every store."""
        give_up = time.monotonic() + _CLOSE_S
        if self._server is not None:
            self._server.close(_CLOSE_S / 2)
        ended = self._gatherings.close(max(0.0, give_up - time.monotonic()))
        with self._closing:
            first, self._released = ended and not self._released, self._released or ended
        if first:
            self._release()
        elif not ended:
            _LOGGER.error("peer: a store was closed while a read was stuck in it; its connections are kept")
        self._own.close()

    def _release(self) -> None:
        self._sources.close()
        if self._transfer is not None and self._shares_transfer:
            self._transfer.unregister_memory(self._own.buffer)
        elif self._transfer is not None:
            self._transfer.close()


def _listen(settings: PeerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port or 0))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise StoreError(
            f"peer store: cannot listen on {settings.host} port {settings.port or 'of its own'}: {error}; give an "
            "address of this machine and a free port, or no port"
        ) from error
    return listener


def _transfer(settings: PeerSettings) -> GuardedTransferEngine | None:
    if settings.transport != "mooncake":
        return None
    return GuardedTransferEngine(
        settings.reachable,
        protocol=settings.protocol,
        devices=settings.devices,
        buffer_bytes=settings.buffer_bytes,
        threads=settings.threads,
    )


def open_url(url: StoreURL) -> KVStore:
    """`peer://10.0.0.5:7400?size=64GiB&lease=60&peers=10.0.0.0/8&transport=tcp`; see `PeerURLSettings`."""
    return PeerStore(PeerSettings.of(url))
