"""The store on Valkey servers: one, or a cluster; TCP, TLS or a unix socket.

Values go over connections of our own (`resp.py`), straight from and into the caller's buffers; valkey-py asks what the
server is (`server_facts.py`). `benchmarks/valkey_bench.py` says why. A put is `SET ... NX` of a whole value, so the
value of a key never changes and is never incomplete.

Outside a cluster a replica may take the place of its primary (by Sentinel, or by hand). When a server refuses a put
because it is a replica, or is away, it and the replicas that were seen are asked who the primary is, and that one has
everything from then on. Two primaries do no harm: what is under a key is the same, or a miss.

What Valkey does differently from the stores of our own: its clock for "least recently used" counts seconds and it
evicts the oldest of a few samples, so that values used within the same second go in any order.
"""

import logging
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kvparams_connectors.advice import Advice
from kvparams_connectors.store import (
    BlockingStore,
    Capabilities,
    GetOp,
    KVStore,
    PutOp,
    Result,
    ResultCode,
    Results,
    StoreError,
)
from kvparams_connectors.store_url import StoreURL
from kvparams_connectors.stores.valkey.connection_pool import ValkeyAccess, ValkeyConnectionPool
from kvparams_connectors.stores.valkey.pipeline import BatchOutcome, run_batch, run_sizes
from kvparams_connectors.stores.valkey.requests import DeleteRequest, GetRequest, PutRequest, SizeRequest, ValkeyRequest
from kvparams_connectors.stores.valkey.server_facts import (
    ServerFacts,
    TLSFiles,
    advice_from_facts,
    find_primary,
    read_facts,
    read_password,
    read_slots,
    tls_context,
)
from kvparams_connectors.stores.valkey.settings import ValkeySettings, ValkeysSettings
from kvparams_connectors.stores.valkey.topology import ClusterTopology, ValkeyNode

__all__ = ["ValkeyStore", "open_url"]

_LOGGER: Final = logging.getLogger(__name__)

_PLACE: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_PORT: Final = 6379
_CONNECT_S: Final = 1.0
_REFRESH_S: Final = 1.0
_SHORTEST_S: Final = 0.05
"""With less time than this a server is not asked for the map."""


class ValkeyStore(BlockingStore):
    """Values on Valkey servers."""

    calls_before_read = True

    def __init__(
        self,
        node: ValkeyNode,
        access: ValkeyAccess,
        *,
        tls: TLSFiles | None = None,
        prefix: str = "",
        ttl_s: int = 0,
        threads: int = 1,
    ) -> None:
        """Connects, and asks the server for its version and kind.

        Args:
            node: the server, or one server of a cluster.
            access: the credentials and kind of connection; its `tls` belongs to `tls`.
            tls: the files behind `access.tls`.
            prefix: precedes every key, with a colon; it separates deployments that share a server.
            ttl_s: the server deletes a value so many seconds after its put; 0: never.
            threads: the number of batches that are worked on at a time, each over connections of its own.

        Raises:
            StoreError: the server cannot be reached, refuses the credentials, or is too old.
        """
        facts = read_facts(node, access, tls)
        self._access = access
        self._tls = tls
        self._topology = ClusterTopology(node)
        if facts.cluster:
            self._topology.replace(read_slots(node, access, tls))
        else:
            self._topology.follow(node, facts.replicas)
        for advice in advice_from_facts(facts, ttl=bool(ttl_s)):
            if advice.level != "ok":
                _LOGGER.warning("valkey: %s: %s; %s", node, advice.finding, advice.action)
        self._node = node
        self._prefix = prefix.encode() + b":" if prefix else b""
        self._ttl_ms = ttl_s * 1000
        self._capabilities = Capabilities(
            persistent=True, shared=True, max_value_bytes=facts.max_value_bytes, exact_lru=False
        )
        self._pool = ValkeyConnectionPool(access)
        self._refreshing = threading.Lock()
        self._refreshed = time.monotonic()
        self._followed = -_REFRESH_S
        self._doubtful = False
        """Outside a cluster: the server did not answer in time."""
        super().__init__("valkey", threads=threads)

    @property
    def capabilities(self) -> Capabilities:
        """Returns what this store can do."""
        return self._capabilities

    def advice(self) -> Sequence[Advice]:
        """For `kvparams doctor`: what the server says of itself now."""
        asked = self._node if self._topology.cluster else self._topology.single
        try:
            facts = read_facts(asked, self._access, self._tls)
        except StoreError as error:
            return [Advice("error", str(error), "start the server, or use another one")]
        found = advice_from_facts(facts, ttl=bool(self._ttl_ms))
        if asked != self._node:
            found.append(Advice("warning", f"{asked} has taken the place of {self._node}", f"name {asked}"))
        return found

    @property
    def connections(self) -> int:
        """Returns how many connections for values were made so far."""
        return self._pool.opened_count

    def put_blocking(self, ops: Sequence[PutOp], deadline: float) -> Results:
        """Stores values; see `BlockingStore`."""
        requests = [PutRequest(self._key(op.key), op, self._ttl_ms) for op in ops]
        results = [Result(ResultCode.TOO_LARGE)] * len(ops)
        small = [at for at, request in enumerate(requests) if request.nbytes <= self._capabilities.max_value_bytes]
        for at, result in zip(small, self._run([requests[at] for at in small], deadline), strict=True):
            results[at] = result
        # A server that is full says so before it looks whether the key is there.
        full = [at for at, result in enumerate(results) if result.code is ResultCode.FULL]
        if full:
            found = self._run([SizeRequest(requests[at].key) for at in full], deadline)
            for at, result in zip(full, found, strict=True):
                if result.code is ResultCode.OK:
                    results[at] = Result(ResultCode.EXISTS)
        return results

    def get_blocking(self, ops: Sequence[GetOp], deadline: float) -> Results:
        """Reads values; see `BlockingStore`."""
        return self._run([GetRequest(self._key(op.key), op) for op in ops], deadline)

    def exists_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        """Looks keys up; see `BlockingStore`."""
        self._settle_doubt(deadline)
        batch = run_sizes(self._pool, self._topology, [self._key(key) for key in keys], deadline)
        self._learn(batch, deadline)
        return batch.results

    def delete_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        """Deletes keys; see `BlockingStore`."""
        return self._run([DeleteRequest(self._key(key)) for key in keys], deadline)

    def release(self) -> None:
        """Lets go of everything; no worker runs any more."""
        self._pool.close()

    def _key(self, key: str) -> bytes:
        return self._prefix + key.encode()

    def _run(self, requests: Sequence[ValkeyRequest], deadline: float) -> Results:
        self._settle_doubt(deadline)
        asked = self._topology.single
        batch = run_batch(self._pool, self._topology, requests, deadline)
        self._learn(batch, deadline)
        if batch.read_only and self._topology.single != asked:
            again = [requests[index] for index in batch.read_only]
            for index, result in zip(
                batch.read_only, run_batch(self._pool, self._topology, again, deadline).results, strict=True
            ):
                batch.results[index] = result
        return batch.results

    def _learn(self, batch: BatchOutcome, deadline: float) -> None:
        """Find out who has what, if a batch says that this has changed."""
        if batch.stale and self._topology.cluster:
            self._refresh(deadline)
        elif batch.read_only or (batch.stale and len(self._topology.known()) > 1):
            self._follow(deadline)
        elif batch.late:
            self._doubtful = True  # there is no time left to ask now

    def _settle_doubt(self, deadline: float) -> None:
        if self._doubtful and not self._topology.cluster:
            self._doubtful = False
            if len(self._topology.known()) > 1:
                self._follow(deadline)

    def _follow(self, deadline: float) -> None:
        """Outside a cluster: ask who the primary is, at most once in a while and not behind the deadline."""
        with self._refreshing:
            if time.monotonic() - self._followed < _REFRESH_S:
                return
            self._followed = time.monotonic()
            asked = self._topology.single
            found = find_primary(self._topology.known(), lambda node: self._facts(node, deadline))
            if found is None:
                _LOGGER.warning("valkey: %s cannot be written to, and no new primary answers", asked)
                return
            primary, facts = found
            self._topology.follow(primary, facts.replicas)
            if primary != asked:
                _LOGGER.warning("valkey: %s has taken the place of %s", primary, asked)

    def _facts(self, node: ValkeyNode, deadline: float) -> ServerFacts | None:
        """Returns what a server says of itself; None if it says nothing in time: others have to be asked as well."""
        left_s = min(self._access.connect_s, (deadline - time.monotonic()) / 2)
        if left_s < _SHORTEST_S:
            return None
        try:
            return read_facts(node, replace(self._access, connect_s=left_s), self._tls)
        except StoreError:
            return None

    def _refresh(self, deadline: float) -> None:
        """Ask for the map of the cluster again, at most once in a while and not behind the deadline."""
        with self._refreshing:
            if time.monotonic() - self._refreshed < _REFRESH_S:
                return
            self._refreshed = time.monotonic()
        for node in self._topology.known():
            left_s = min(self._access.connect_s, deadline - time.monotonic())
            if left_s < _SHORTEST_S:
                return
            try:
                self._topology.replace(read_slots(node, replace(self._access, connect_s=left_s), self._tls))
            except StoreError as error:
                _LOGGER.warning("%s", error)
            else:
                return


def open_url(url: StoreURL) -> KVStore:
    """`valkey://host:6379?prefix=...&ttl=3600`, `valkeys://` for TLS, `valkey:///path/to.sock` for a unix socket.

    `ValkeySettings` has the settings, `ValkeysSettings` those with TLS.

    What an ACL has to allow: `+get +set +strlen +exists +unlink` on `~PREFIX:*`, in a cluster `+cluster|slots` and
    `+asking` as well; with `+info +config|get` the server's limits are known and its settings are checked.
    """
    files = None
    if url.scheme == "valkeys":
        settings = ValkeysSettings.read(url)
        files = TLSFiles(settings.ca or "", settings.cert or "", settings.key or "")
    else:
        settings = ValkeySettings.read(url)
    access = ValkeyAccess(
        connect_s=_CONNECT_S,
        user=settings.user or "",
        password=b"" if settings.password_file is None else read_password(settings.password_file),
        tls=tls_context(files) if files else None,
    )
    return ValkeyStore(
        _node(url),
        access,
        tls=files,
        prefix=settings.prefix or "",
        ttl_s=settings.ttl or 0,
        threads=settings.threads,
    )


def _node(url: StoreURL) -> ValkeyNode:
    if not url.location and url.path.startswith("/") and url.scheme == "valkey":
        return ValkeyNode("", 0, url.path)
    place = _PLACE.fullmatch(url.location)
    if place is None or url.path not in ("", "/") or not 0 < int(place[2] or _PORT) < 65536:
        raise StoreError(
            f"{url.scheme} store: {url.redacted!r} has no server; write {url.scheme}://host:6379"
            + (" or valkey:///path/to.sock" if url.scheme == "valkey" else "")
        )
    return ValkeyNode(place[1].strip("[]"), int(place[2] or _PORT))
