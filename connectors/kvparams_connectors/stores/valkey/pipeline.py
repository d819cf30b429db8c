"""A batch of requests, done: sent to the servers that hold the keys, answered, and sent on where a server says so.

Each server gets its requests over one connection, so many at a time that neither side waits for the other and no more
than a bounded amount of values is under way; all servers work at the same time. A failure on a connection ends that
connection and its unanswered requests, and nothing else.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvparams_connectors.store import Result, ResultCode, Results
from kvparams_connectors.stores.valkey.connection import ValkeyConnection
from kvparams_connectors.stores.valkey.connection_pool import ValkeyConnectionPool, ValkeyRefusedError
from kvparams_connectors.stores.valkey.native_exchange import do_natively
from kvparams_connectors.stores.valkey.requests import BulkSizeRequest, SizeRequest, ValkeyRequest, result_of_error
from kvparams_connectors.stores.valkey.resp import RESPProtocolError
from kvparams_connectors.stores.valkey.topology import ClusterRedirect, ClusterTopology, ValkeyNode, parse_redirect

__all__ = ["BatchOutcome", "run_batch", "run_sizes"]

_LOGGER: Final = logging.getLogger(__name__)

_FEW_BYTES: Final = 640 << 10
_PAIR_BYTES: Final = 5 << 19
"""So much weight may be under way on a connection: a few small requests, two values (so that the server need not wait
for us between them), or one. More leaves the caches of both sides: the server copies an answer into a buffer first,
which counts against its `maxmemory` as well, and what is sent waits in the sockets. On a loopback a byte that is got
costs the server a half more with ten values of 256 KiB under way than with two, or with eight of 1 MiB."""
_WINDOW: Final = (_FEW_BYTES, _PAIR_BYTES)
_TOGETHER_BYTES: Final = 64 << 10
"""Sent at once at least, where there is so much. What is more goes at once, and what follows is made meanwhile."""
_QUESTIONS: Final = 4096
"""Keys that are asked about in one round trip."""
_REDIRECTS: Final = 5


@dataclass(slots=True)
class BatchOutcome:
    """Describes what came of a batch."""

    results: Results
    stale: bool = False
    """Whether what is known of who has what seems to be out of date."""
    late: bool = False
    """Whether a server did not answer in time."""
    read_only: list[int] = field(default_factory=list[int])
    """What a replica refused, by index: nothing of it was done."""


def run_batch(
    pool: ValkeyConnectionPool, topology: ClusterTopology, requests: Sequence[ValkeyRequest], deadline: float
) -> BatchOutcome:
    """Do all requests.

    Args:
        deadline: on the clock of `time.monotonic`; a request that has no answer by then is TIMEOUT.
    """
    batch = BatchOutcome([Result(ResultCode.TIMEOUT)] * len(requests))
    groups: dict[tuple[ValkeyNode, bool], list[int]] = {}
    if topology.cluster:
        for index, request in enumerate(requests):
            groups.setdefault((topology.node(request.key), False), []).append(index)
    elif requests:
        groups[topology.node(b""), False] = list(range(len(requests)))
    for _ in range(1 + _REDIRECTS):
        exchanges = [
            _ServerPipeline(pool, node, requests, indexes, batch, asking=asking, deadline=deadline)
            for (node, asking), indexes in groups.items()
        ]
        for exchange in exchanges:
            exchange.start(alone=len(exchanges) == 1)
        groups = {}
        for exchange in exchanges:
            for index, redirect in exchange.finish():
                if redirect.kind == "MOVED":
                    topology.moved(redirect.slot, redirect.node)
                    batch.stale = True
                groups.setdefault((redirect.node, redirect.kind == "ASK"), []).append(index)
                batch.results[index] = Result(ResultCode.UNAVAILABLE)  # unless it is answered where it is sent on to
        if not groups:
            break
    return batch


def run_sizes(
    pool: ValkeyConnectionPool, topology: ClusterTopology, keys: Sequence[bytes], deadline: float
) -> BatchOutcome:
    """The sizes of values: what `run_batch` does with a `SizeRequest` for each key, at a fraction of the cost.

    All keys are asked about together, of every server one question. What that leaves open is asked one by one.
    """
    batch = BatchOutcome([Result(ResultCode.TIMEOUT)] * len(keys))
    for first in range(0, len(keys), _QUESTIONS):
        _ask_sizes(pool, topology, keys, range(first, min(first + _QUESTIONS, len(keys))), batch, deadline)
    return batch


def _ask_sizes(
    pool: ValkeyConnectionPool,
    topology: ClusterTopology,
    keys: Sequence[bytes],
    indexes: Sequence[int],
    batch: BatchOutcome,
    deadline: float,
) -> None:
    groups: dict[ValkeyNode, list[int]] = {}
    if topology.cluster:
        for index in indexes:
            groups.setdefault(topology.node(keys[index]), []).append(index)
    else:
        groups[topology.node(b"")] = list(indexes)
    questions = {
        node: BulkSizeRequest([keys[index] for index in group], one_slot=not topology.cluster)
        for node, group in groups.items()
    }
    connections: dict[ValkeyNode, ValkeyConnection] = {}
    unsure: list[int] = []
    for node, question in questions.items():  # all are sent before the first answer is waited for
        try:
            connections[node] = pool.acquire(node, deadline)
            connections[node].send([question.text], question.replies)
        except (OSError, ValkeyRefusedError) as error:
            _over(batch, groups[node], node, connections.pop(node, None), error)
    for node, connection in connections.items():
        group = groups[node]
        try:
            found = questions[node].read(connection)
        except OSError as error:
            _over(batch, group, node, connection, error)
            continue
        pool.release(node, connection)
        for index, result in zip(group, found, strict=True):
            if result is None:
                unsure.append(index)
            else:
                batch.results[index] = result
    if unsure:
        again = run_batch(pool, topology, [SizeRequest(keys[index]) for index in unsure], deadline)
        batch.stale |= again.stale
        for index, result in zip(unsure, again.results, strict=True):
            batch.results[index] = result


def _over(
    batch: BatchOutcome,
    indexes: Sequence[int],
    node: ValkeyNode,
    connection: ValkeyConnection | None,
    error: OSError | ValkeyRefusedError,
) -> None:
    """A connection is over, and with it all that was not answered."""
    if isinstance(error, TimeoutError):
        result = Result(ResultCode.TIMEOUT)
        batch.late = True
    elif isinstance(error, ValkeyRefusedError):
        result = result_of_error(error.error)
    else:
        result = Result(ResultCode.UNAVAILABLE)
        batch.stale = True
        if isinstance(error, RESPProtocolError):
            _LOGGER.error("valkey: %s does not speak as it should: %s", node, error)
    for index in indexes:
        batch.results[index] = result
    if connection is not None:
        connection.close()


def _fits(weight: int, under_way: int) -> bool:
    """Returns whether one more request may be under way, all of which have this weight then."""
    return not under_way or weight <= _FEW_BYTES or (under_way == 1 and weight <= _PAIR_BYTES)


class _ServerPipeline:
    """Requests of a batch to one server, over one connection."""

    def __init__(
        self,
        pool: ValkeyConnectionPool,
        node: ValkeyNode,
        requests: Sequence[ValkeyRequest],
        indexes: Sequence[int],
        batch: BatchOutcome,
        *,
        asking: bool,
        deadline: float,
    ) -> None:
        self._pool = pool
        self._node = node
        self._requests = requests
        self._indexes = indexes
        self._batch = batch
        self._asking = asking
        self._deadline = deadline
        self._connection: ValkeyConnection | None = None
        self._waiting: list[int] = []
        """Sent and not answered, in order; those before `_answered` are done."""
        self._answered = 0
        self._next = 0
        self._ahead: list[bytes | memoryview] | None = None
        """What is sent for the next one, if that was made already."""
        self._weight = 0
        self._redirects: list[tuple[int, ClusterRedirect]] = []

    def start(self, *, alone: bool) -> None:
        """Connects, and sends as much as may be under way; if no other server works meanwhile, does all it can."""
        try:
            self._connection = self._pool.acquire(self._node, self._deadline)
            if alone and not self._asking and self._pool.is_native:
                self._do_natively(self._connection)
            self._send(self._connection)
        except (OSError, ValkeyRefusedError) as error:
            self._fail(error)

    def _do_natively(self, connection: ValkeyConnection) -> None:
        """Does in native code what it is for: puts or gets up to the first reply that is out of the ordinary."""
        requests = [self._requests[index] for index in self._indexes]
        try:
            done = do_natively(connection, requests, _WINDOW)
        except (ValueError, BufferError):  # a buffer was released; which one is found out one by one
            return
        if done is None:
            return
        for index, result in zip(self._indexes, done.results, strict=False):
            self._batch.results[index] = result
        self._next, self._answered = done.sent, len(done.results)
        self._waiting = list(self._indexes[: done.sent])
        self._weight = sum(request.weight for request in requests[self._answered : done.sent])
        if done.error is not None:
            raise done.error

    def finish(self) -> list[tuple[int, ClusterRedirect]]:
        """Receive all answers and send the rest; the requests that are to be asked of another server."""
        if self._connection is None:
            return self._redirects
        try:
            while self._answered < len(self._waiting):
                index = self._receive(self._connection)
                self._send(self._connection)
                self._requests[index].on_result(self._batch.results[index])
        except (OSError, ValkeyRefusedError) as error:
            self._fail(error)
        else:
            self._pool.release(self._node, self._connection)
        return self._redirects

    def _send(self, connection: ValkeyConnection) -> None:
        parts: list[bytes | memoryview] = []
        replies = nbytes = 0
        while self._next < len(self._indexes):
            index = self._indexes[self._next]
            request = self._requests[index]
            if not _fits(self._weight + request.weight, len(self._waiting) - self._answered):
                break
            if nbytes > _TOGETHER_BYTES:
                connection.send(parts, replies, request.on_idle)
                parts, replies, nbytes = [], 0, 0
            made = self._made()
            self._next += 1
            if made is None:
                continue
            parts += made
            nbytes += sum(map(len, made))
            self._waiting.append(index)
            self._weight += request.weight
            replies += request.replies * (2 if self._asking else 1)
        if parts:
            connection.send(parts, replies, self._nearing)
        while self._ahead is None and self._next < len(self._indexes):  # while the server is busy with what it was sent
            self._ahead = self._made()
            self._next += self._ahead is None

    def _nearing(self) -> bool:
        """A little of the work that the next one needs before it is sent."""
        if self._ahead is not None or self._next == len(self._indexes):
            return False
        return self._requests[self._indexes[self._next]].on_idle()

    def _made(self) -> list[bytes | memoryview] | None:
        """Returns what is sent for the next one; None if that cannot be sent."""
        index = self._indexes[self._next]
        if self._ahead is not None:
            made, self._ahead = self._ahead, None
            return made
        try:
            return self._requests[index].parts(asking=self._asking)
        except ValueError:  # the caller released a buffer that it had leased to us
            self._batch.results[index] = Result(ResultCode.INVALID)
            return None

    def _receive(self, connection: ValkeyConnection) -> int:
        """Receive an answer; of which request."""
        index = self._waiting[self._answered]
        request = self._requests[index]
        answer = request.read(connection, asking=self._asking)
        self._answered += 1
        self._weight -= request.weight
        if isinstance(answer, Result):
            self._batch.results[index] = answer
            return index
        redirect = parse_redirect(answer.text, self._node)
        if redirect is not None:
            self._redirects.append((index, redirect))
            return index
        self._batch.stale |= answer.word in ("READONLY", "CLUSTERDOWN")
        if answer.word == "READONLY":
            self._batch.read_only.append(index)
        self._batch.results[index] = result_of_error(answer)
        return index

    def _fail(self, error: OSError | ValkeyRefusedError) -> None:
        unanswered = [*self._waiting[self._answered :], *self._indexes[self._next :]]
        _over(self._batch, unanswered, self._node, self._connection, error)
        self._connection = None
