"""The store on LMCache's `lm://` server (`lmcache_server HOST PORT`), by opaque key; LMCache itself is not needed here.

What that server (0.5.6, `lmcache/v1/server/`) does not have is made of what it has. It does not acknowledge a put: what
is asked behind it on the same connection is its answer. It does not say how large a value is: a record beside each
value does, without bytes, so that a lookup moves none. It has no delete: a value is overwritten by an empty one, which
frees its memory but for 1.3 KB. A record is written after its value, so that a value that a lookup finds is whole.

What cannot be made: it never evicts, and it has no put that spares what is there, so of several clients who put one key
at the same time each may be told OK; the value of one of them stays, whole.
"""

import re
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Final, TypeVar

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
from kvparams_connectors.store_url import StoreUnreachable, StoreURL, is_loopback
from kvparams_connectors.stores.connection_pool import ServerConnectionPool
from kvparams_connectors.stores.lmcache.connection import LMCacheAddress, LMCacheConnection, connect
from kvparams_connectors.stores.lmcache.pipeline import (
    PUT_WINDOW_BYTES,
    FetchValueRequest,
    LMCacheRequest,
    StoreValueRequest,
    TombstoneRequest,
    flatten_buffers,
    read_records,
    result_of_error,
    run_requests,
    total_bytes,
)
from kvparams_connectors.stores.lmcache.reader import ValueRead, read_values
from kvparams_connectors.stores.lmcache.settings import LMCacheSettings
from kvparams_connectors.stores.lmcache.wire import (
    LMCacheCommand,
    LMCacheNames,
    LMCacheProtocolError,
    encode_request,
)

__all__ = ["LMCacheStore", "open_url"]

Op = TypeVar("Op", PutOp, GetOp)

_PLACE: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_CONNECT_S: Final = 1.0
_LARGEST: Final = 256 << 20
_NO_VALUE: Final = (ResultCode.MISS, ResultCode.CORRUPT)
"""What a record may say where a put is to write: nothing, or something that is not ours."""


class LMCacheStore(BlockingStore):
    """Values on an `lm://` server."""

    def __init__(
        self,
        server: LMCacheAddress,
        *,
        prefix: str = "",
        max_value_bytes: int = _LARGEST,
        threads: int = 1,
        connect_s: float = _CONNECT_S,
    ) -> None:
        """Connects, and checks that the server speaks `lm://`.

        Args:
            server: the host and port.
            prefix: separates deployments that share a server.
            max_value_bytes: larger values are refused; the server's only limit is its machine's memory.
            threads: the number of batches that are worked on at a time, each over a connection of its own.
            connect_s: the time limit of a connection, in seconds.

        Raises:
            StoreError: the server cannot be reached, or is something else.
        """
        self._server = server
        self._connect_s = connect_s
        self._names = LMCacheNames(prefix)
        self._capabilities = Capabilities(
            persistent=True, shared=True, max_value_bytes=max_value_bytes, evicts=False, one_winner=False
        )
        self._check()
        self._pool: ServerConnectionPool[LMCacheAddress, LMCacheConnection] = ServerConnectionPool(self._connect)
        super().__init__("lmcache", threads=threads)

    @property
    def capabilities(self) -> Capabilities:
        """Returns what this store can do."""
        return self._capabilities

    def advice(self) -> Sequence[Advice]:
        """For `kvparams doctor`: what is known of every such server, which says nothing of itself."""
        try:
            self._check()
        except StoreError as error:
            return [Advice("error", str(error), "start the server, or use another one")]
        found = [
            Advice("ok", "the server speaks the lm:// protocol of LMCache 0.5.6"),
            Advice(
                "warning",
                "the server never evicts: it grows until its machine has no memory left",
                "limit the memory of its process and have it restarted, or use the store lmcache-mp or valkey",
            ),
        ]
        if not is_loopback(self._server[0]):
            who = (
                "every client that reaches its port can read and replace values: the server has no passwords and no TLS"
            )
            found.append(Advice("warning", who, "keep it in a private network, and use authenticated pages"))
        return found

    @property
    def connections(self) -> int:
        """Returns how many connections were made so far."""
        return self._pool.opened_count

    def put_blocking(self, ops: Sequence[PutOp], deadline: float) -> Results:
        """Stores values; see `BlockingStore`."""
        results = [Result(ResultCode.INVALID)] * len(ops)
        values = _whole(ops)
        for at in [at for at, parts in values.items() if total_bytes(parts) > self._capabilities.max_value_bytes]:
            results[at] = Result(ResultCode.TOO_LARGE)
            del values[at]
        firsts: dict[str, int] = {}
        for at in values:
            firsts.setdefault(ops[at].key, at)
        absent: list[int] = []
        for at, record in zip(firsts.values(), self._records(list(firsts), deadline), strict=True):
            results[at] = Result(ResultCode.EXISTS) if record.code is ResultCode.OK else record
            if record.code in _NO_VALUE:
                absent.append(at)
        puts = [StoreValueRequest(*self._named(ops[at].key), values[at]) for at in absent]
        for at, result in zip(absent, self._do(puts, deadline), strict=True):
            results[at] = result
        for at in values:
            first = firsts[ops[at].key]
            if at != first:
                results[at] = Result(ResultCode.EXISTS) if results[first].code is ResultCode.OK else results[first]
        return results

    def get_blocking(self, ops: Sequence[GetOp], deadline: float) -> Results:
        """Reads values; see `BlockingStore`."""
        results = [Result(ResultCode.INVALID)] * len(ops)
        targets = _whole(ops)
        wanted: list[ValueRead] = []
        for at, parts in targets.items():
            value, record = self._named(ops[at].key)
            wanted.append(ValueRead(value, record, FetchValueRequest(value, parts, ops[at].on_complete)))
        for at, result in zip(targets, read_values(self._pool, self._server, wanted, deadline), strict=True):
            results[at] = result
        return results

    def exists_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        """Looks keys up; see `BlockingStore`."""
        return self._records(keys, deadline)

    def delete_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        """Deletes keys; see `BlockingStore`."""
        unique = list(dict.fromkeys(keys))
        found = dict(zip(unique, self._records(unique, deadline), strict=True))
        there = [key for key, record in found.items() if record.code in (ResultCode.OK, ResultCode.CORRUPT)]
        buried = self._do([TombstoneRequest(*self._named(key)) for key in there], deadline)
        found.update(zip(there, buried, strict=True))
        results: Results = []
        for key in keys:
            results.append(found[key])
            if found[key].code is ResultCode.OK:  # the same key again: it is gone
                found[key] = Result(ResultCode.MISS)
        return results

    def release(self) -> None:
        """Lets go of everything; no worker runs any more."""
        self._pool.close()

    def _named(self, key: str) -> tuple[bytes, bytes]:
        return self._names.value(key), self._names.record(key)

    def _records(self, keys: Sequence[str], deadline: float) -> Results:
        return read_records(self._pool, self._server, [self._names.record(key) for key in keys], deadline)

    def _do(self, questions: Sequence[LMCacheRequest], deadline: float) -> list[Result]:
        came = run_requests(self._pool, self._server, questions, deadline, window=PUT_WINDOW_BYTES)
        if came.error is None:
            return came.results
        return came.results + [result_of_error(came.error, self._server)] * (len(questions) - len(came.results))

    def _connect(self, server: LMCacheAddress, deadline: float) -> LMCacheConnection:
        return connect(server, deadline, self._connect_s)

    def _check(self) -> None:
        """Ask the server for its health. Raises StoreError."""
        host, port = self._server
        until = time.monotonic() + self._connect_s
        try:
            with closing(self._connect(self._server, until)) as connection:
                connection.set_deadline(until)
                connection.ask([encode_request(LMCacheCommand.HEALTH, self._names.value("health"))], 1)
                (health,) = connection.replies(1)
        except LMCacheProtocolError as error:
            raise StoreError(f"lmcache store: {host}:{port} is not an lm:// server: {error}") from error
        except OSError as error:
            message = f"lmcache store: {host}:{port} cannot be used, or is no lm:// server: {error}"
            raise StoreUnreachable(message) from error
        if not health.found:
            raise StoreError(f"lmcache store: {host}:{port} reports that it is unhealthy")


def _whole(ops: Sequence[Op]) -> dict[int, list[memoryview]]:
    """The flat buffers of each operation, but of those whose buffers the caller has released."""
    whole: dict[int, list[memoryview]] = {}
    for at, op in enumerate(ops):
        try:
            whole[at] = flatten_buffers(op.buffers)
        except ValueError:
            continue
    return whole


def open_url(url: StoreURL) -> KVStore:
    """`lmcache://host:65432?prefix=...`, the port that `lmcache_server` was started with; see `LMCacheSettings`."""
    settings = LMCacheSettings.read(url)
    place = _PLACE.fullmatch(url.location)
    if place is None or url.path not in ("", "/") or not 0 < int(place[2]) < 65536:
        raise StoreError(f"lmcache store: {url.redacted!r} has no server; write lmcache://host:65432")
    return LMCacheStore((place[1].strip("[]"), int(place[2])), prefix=settings.prefix or "")
