"""The store on LMCache 0.5.6's multi-process server (`lmcache server`): its pool in shared memory, by opaque key.

The server knows chunks of tokens, not keys, so a key stands for a chunk of pseudo tokens of its own (`mp_client.py`),
and its value for the bytes of that chunk, of which each takes the same room (`mp_shared_memory.py`). What the server
does not say is found out: a put is OK when a lookup finds it; a put for which there was no room is answered like one of
a value that is there already. A value counts as stored only if a lookup finds it, and every lookup is ended on every
path (`mp_value_lease.py`).
"""

import http.client
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar, cast

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
from kvparams_connectors.store_url import StoreUnreachable, StoreURL
from kvparams_connectors.stores.lmcache.mp_client import LMCacheMPClient, LMCacheMPLibrary, NoReplyError
from kvparams_connectors.stores.lmcache.mp_session import LMCacheMPSession
from kvparams_connectors.stores.lmcache.mp_shared_memory import HEAD_BYTES, SharedPoolMemory
from kvparams_connectors.stores.lmcache.mp_value_lease import LeaseState, ValueLease, begin_read, look_up
from kvparams_connectors.stores.lmcache.settings import LMCacheMPSettings

__all__ = ["LMCacheMPStore", "open_url"]

_LOGGER: Final = logging.getLogger(__name__)
_PLACE: Final = re.compile(r"([A-Za-z0-9._-]+):([0-9]{1,5})")
_CONNECT_S: Final = 5.0
_WINDOW: Final = 32
"""So many keys are asked for at a time."""
_ROOM_S: Final = 3.0
"""How long a put waits for the server to make room: it looks once a second whether it should."""
_PAUSE_S: Final = 0.02
_MOST_ANSWER: Final = 64 << 10

_GRACE_S: Final = 1.0
"""What was begun may end so much later than a deadline: half a put costs more than that."""

Item = TypeVar("Item")
LeaseWork = Callable[[LMCacheMPClient, SharedPoolMemory, list[ValueLease], Results, float], None]


class LMCacheMPStore(BlockingStore):
    """Values in the pool of a server on this machine."""

    def __init__(
        self, host: str, port: int, *, http_port: int, value_bytes: int, prefix: str = "", connect_s: float = 5.0
    ) -> None:
        """Connects to the server and registers with it.

        Args:
            host: the host of the server.
            port: the port for requests.
            http_port: the port for administration; deletes need it.
            value_bytes: the size of the largest value, in bytes; each value takes this much of the pool.
            prefix: separates deployments that share a server.
            connect_s: the time limit of the server's answer, in seconds.

        Raises:
            StoreError: LMCache is not installed here, or the server does not answer or shares no memory.
        """
        self._place = (host, port, http_port)
        self._value_bytes = value_bytes
        self._connect_s = connect_s
        chunk_bytes = value_bytes + HEAD_BYTES
        # To the server, chunks of another size are of another model.
        self._session = LMCacheMPSession(
            LMCacheMPLibrary(), f"{host}:{port}", f"kvparams.{prefix}.{chunk_bytes}", chunk_bytes
        )
        self._idle = threading.Event()
        try:
            self._session.ready(time.monotonic() + connect_s)
        except NoReplyError as error:
            self._session.drop()
            raise StoreUnreachable(f"lmcache-mp store: no LMCache server answers at {host}:{port}") from error
        except StoreError:
            self._session.drop()
            raise
        super().__init__("lmcache-mp")  # one thread, as a session wants it

    @property
    def capabilities(self) -> Capabilities:
        """Returns what this store can do."""
        return Capabilities(persistent=True, shared=True, max_value_bytes=self._value_bytes, exact_lru=False)

    @property
    def session(self) -> LMCacheMPSession:
        """For tests and tools: how it stands with the server."""
        return self._session

    def advice(self) -> Sequence[Advice]:
        """For `kvparams doctor`."""
        host, port, http_port = self._place
        found = [Advice("ok", f"LMCache 0.5.6 at {host}:{port}, chunks of {self._session.chunk_tokens} tokens")]
        try:
            self._http("GET", "/", b"", time.monotonic() + self._connect_s)
        except (OSError, http.client.HTTPException):
            todo = "set http=PORT to the server's --http-port"
            found.append(
                Advice("error", f"no server answers HTTP at {host}:{http_port}, so no value can be deleted", todo)
            )
        return found

    # ---- operations

    def put_blocking(self, ops: Sequence[PutOp], deadline: float) -> Results:
        """Stores values; see `BlockingStore`."""
        sizes = [sum(buffer.nbytes for buffer in op.buffers) for op in ops]
        results: Results = [Result(ResultCode.TOO_LARGE)] * len(ops)
        small = [at for at, size in enumerate(sizes) if size <= self._value_bytes]
        for window in _windows(small):
            results_there = self._put([ops[at] for at in window], [sizes[at] for at in window], deadline)
            for at, result in zip(window, results_there, strict=True):
                results[at] = result
        return results

    def _put(self, ops: Sequence[PutOp], sizes: Sequence[int], deadline: float) -> Results:
        """Put until there is room, or the patience is over: full and being written look alike, and both pass."""
        give_up = min(time.monotonic() + _ROOM_S, deadline)
        results: Results = [Result(ResultCode.FULL)] * len(ops)
        left = list(range(len(ops)))
        while left:
            some = [ops[at] for at in left]

            def store(
                link: LMCacheMPClient,
                pool: SharedPoolMemory,
                visits: list[ValueLease],
                found: Results,
                until: float,
                some: list[PutOp] = some,
            ) -> None:
                written = self._store(link, pool, visits, some, until)
                look_up(link, visits, until)
                for number, visit in enumerate(visits):
                    found[number] = Result(
                        (ResultCode.OK if written[number] else ResultCode.EXISTS) if visit.found else ResultCode.FULL
                    )

            answers = self._ask([op.key for op in some], store, deadline)
            for at, result in zip(left, answers, strict=True):
                results[at] = Result(ResultCode.OK, sizes[at]) if result.code is ResultCode.OK else result
            left = [at for at in left if results[at].code is ResultCode.FULL]
            if time.monotonic() + _PAUSE_S >= give_up:
                break
            if left:
                self._idle.wait(_PAUSE_S)
        return results

    def _store(
        self,
        link: LMCacheMPClient,
        pool: SharedPoolMemory,
        visits: Sequence[ValueLease],
        ops: Sequence[PutOp],
        deadline: float,
    ) -> list[bool]:
        """Write what the server gives room for; which those are. Others are there, or being written, or do not fit."""
        asked: list[Any] = []
        for visit in visits:
            visit.holds = LeaseState.ROOM
            asked.append(link.prepare_store(visit.own, self._session.instance))
        committed: list[Any] = []
        for op, visit, answer in zip(ops, visits, asked, strict=True):
            slot = pool.slot(link.wait(answer, deadline).context)
            if slot is None:
                visit.holds = LeaseState.NOTHING
                committed.append(None)
                continue
            pool.write(slot, op.key, op.buffers, sum(buffer.nbytes for buffer in op.buffers))
            visit.holds = LeaseState.WRITTEN
            committed.append(link.commit_store(visit.own, self._session.instance))
        written = [answer is not None and bool(link.wait(answer, deadline)) for answer in committed]
        for visit in visits:
            visit.holds = LeaseState.NOTHING
        return written

    def get_blocking(self, ops: Sequence[GetOp], deadline: float) -> Results:
        """Reads values; see `BlockingStore`."""
        return self._read([op.key for op in ops], [op.buffers for op in ops], deadline)

    def exists_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        """Looks keys up; see `BlockingStore`."""
        return self._read(keys, None, deadline)

    def _read(self, keys: Sequence[str], targets: Sequence[Sequence[memoryview]] | None, deadline: float) -> Results:
        """Values, or only their sizes. The server counts one reader for each key, so each is visited once."""
        places: dict[str, list[int]] = {}
        for at, key in enumerate(keys):
            places.setdefault(key, []).append(at)
        results: Results = [Result(ResultCode.MISS)] * len(keys)
        for window in _windows(list(places)):

            def read(
                link: LMCacheMPClient,
                pool: SharedPoolMemory,
                visits: list[ValueLease],
                found: Results,
                until: float,
                window: list[str] = window,
            ) -> None:
                look_up(link, visits, until)
                there = [number for number, visit in enumerate(visits) if visit.found]
                contexts = begin_read(link, [visits[number] for number in there], self._session.instance, until)
                opened = dict(zip(there, contexts, strict=True))
                for number, key in enumerate(window):
                    context = opened.get(number)
                    if context is None:
                        found[number] = Result(ResultCode.MISS)
                        continue
                    slot = pool.slot(context)
                    size = None if slot is None else pool.size(slot, key)
                    if slot is None or size is None:
                        found[number] = Result(ResultCode.CORRUPT)
                        continue
                    found[number] = Result(ResultCode.OK, size)
                    for at, buffers in [(at, targets[at]) for at in places[key]] if targets is not None else ():
                        if sum(buffer.nbytes for buffer in buffers) < size:
                            results[at] = Result(ResultCode.TOO_LARGE, size)
                        else:
                            pool.read(slot, buffers, size)
                            results[at] = found[number]

            for key, result in zip(window, self._ask(window, read, deadline), strict=True):
                for at in places[key]:
                    if result.code is not ResultCode.OK or targets is None:
                        results[at] = result
        return results

    def delete_blocking(self, keys: Sequence[str], deadline: float) -> Results:
        """Deletes keys; see `BlockingStore`."""
        results: Results = []
        for key in keys:
            results.append(self._delete(key, deadline))
        return results

    def _delete(self, key: str, deadline: float) -> Result:
        """By the server's administration. What is being read cannot be deleted, so it is asked again for a while."""
        body = json.dumps({"tier": "l1", "keys": [self._session.object_name(key)]}).encode()
        while True:
            try:
                status, answer = self._http("DELETE", "/cache/objects", body, deadline)
            except (OSError, http.client.HTTPException, ValueError):
                return Result(ResultCode.TIMEOUT if time.monotonic() >= deadline else ResultCode.UNAVAILABLE)
            if status != http.HTTPStatus.OK:
                _LOGGER.warning("LMCache did not delete: HTTP %d", status)
                return Result(ResultCode.DENIED if status in (401, 403) else ResultCode.UNAVAILABLE)
            if answer.get("deleted"):
                return Result(ResultCode.OK)
            if not answer.get("skipped"):
                return Result(ResultCode.MISS)
            if time.monotonic() + _PAUSE_S >= deadline:
                return Result(ResultCode.TIMEOUT)
            self._idle.wait(_PAUSE_S)

    def _http(self, method: str, path: str, body: bytes, deadline: float) -> tuple[int, dict[str, Any]]:
        host, _, port = self._place
        connection = http.client.HTTPConnection(host, port, timeout=max(0.01, deadline - time.monotonic()))
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read(_MOST_ANSWER)
            answer: object = json.loads(text) if response.status == http.HTTPStatus.OK and method == "DELETE" else {}
            if not isinstance(answer, dict):
                raise ValueError("the answer is no object")
            return response.status, cast("dict[str, Any]", answer)
        finally:
            connection.close()

    def release(self) -> None:
        """Lets go of everything; no worker runs any more."""
        self._session.close(time.monotonic() + 1.0)

    # ---- one window of keys

    def _ask(self, keys: Sequence[str], work: LeaseWork, deadline: float) -> Results:
        """Have `work` ask the server for some keys, with a visit for each, and end the visits whatever happens."""
        results: Results = [Result(ResultCode.TIMEOUT)] * len(keys)
        now = time.monotonic()
        if now >= deadline:
            return results
        until = max(deadline, now + _GRACE_S)
        visits: list[ValueLease] = []
        try:
            link, pool = self._session.ready(until)
            for key in self._session.pop_spoiled_keys():
                self._delete(key, until)
            visits = [self._session.new_lease(key) for key in keys]
            work(link, pool, visits, results, until)
            self._session.end(link, visits, until)
        except NoReplyError:
            self._session.mark_unanswered(visits)
            if time.monotonic() < deadline:
                return [Result(ResultCode.UNAVAILABLE) if one.code is ResultCode.TIMEOUT else one for one in results]
        except StoreError as error:
            _LOGGER.warning("%s", error)
            return [Result(ResultCode.UNAVAILABLE)] * len(keys)
        except BaseException:
            self._session.mark_unanswered(visits)
            raise
        return results


def _windows(items: list[Item]) -> Iterator[list[Item]]:
    return (items[at : at + _WINDOW] for at in range(0, len(items), _WINDOW))


def open_url(url: StoreURL) -> KVStore:
    """`lmcache-mp://host:5555?http=8080&max_value=4MiB&prefix=...`, the server of this machine.

    `LMCacheMPSettings` has the settings. A session with that server takes one request after the other.
    """
    settings = LMCacheMPSettings.read(url)
    place = _PLACE.fullmatch(url.location)
    if place is None or url.path not in ("", "/") or not 0 < int(place[2]) < 65536:
        raise StoreError(
            f"lmcache-mp store: {url.redacted!r} has no server; write lmcache-mp://127.0.0.1:5555?http=8080"
        )
    return LMCacheMPStore(
        place[1],
        int(place[2]),
        http_port=settings.http,
        value_bytes=settings.max_value,
        prefix=settings.prefix or "",
        connect_s=_CONNECT_S,
    )
