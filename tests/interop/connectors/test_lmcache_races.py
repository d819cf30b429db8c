"""Tests clients of one `lm://` server at the same time, in every order of their requests that Hypothesis finds.

The server here is a model of the real one, and `test_lmcache_traps.py` checks the model's assumptions. The requests of
a connection are done in order. A put overwrites. A put that is cut off is dropped (reset) or leaves remains (closed),
and the remains break the connection that asks for them. Requests that were sent may be done long after their sender has
gone. The model does one request at a time and draws which one is next.
"""

import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvparams_connectors.store import GetOp, PutOp, ResultCode
from kvparams_connectors.stores.lmcache.connection import LMCacheAddress, LMCacheConnection
from kvparams_connectors.stores.lmcache.store import LMCacheStore

PUT, GET, EXIST = 1, 2, 3
REQUEST: Final = struct.Struct("=9i150s")
LONG_S: Final = 10.0


class Killed(BaseException):
    """The client's process was ended."""


@dataclass
class Wire:
    """What is between one connection and the server."""

    place: tuple[int, int]
    """Whose, and which of his."""
    pending: deque[tuple[tuple[Any, ...], bytes]]
    replies: bytearray
    ended: bool = False


class World:
    """The server, and who waits for it."""

    def __init__(self) -> None:
        self.entries: dict[bytes, tuple[tuple[int, ...], bytes | None]] = {}
        self.changed: Final = threading.Condition()
        self.wires: list[Wire] = []
        self.running = 0
        """Clients that have not ended."""
        self.blocked = 0
        """Of these, who waits for a reply."""
        self.steps = 0
        self.free = False
        """Whether requests are done as they come."""

    def step(self, wire: Wire) -> None:
        """Do a connection's next request."""
        (command, _, _, _, _, *shape, name), body = wire.pending.popleft()
        found = self.entries.get(name)
        if command == PUT:
            self.entries[name] = tuple(shape), body
        elif command == EXIST or found is None:
            wire.replies += struct.pack("=9i", 200 if found else 400, 0, 1, 2, 0, 0, 0, 0, 0)
        else:
            kept, content = found
            size = kept[1] if content is None else len(content)
            wire.replies += struct.pack("=9i", 200, size, 4, 6, *kept, 0)
            if content is None:
                wire.ended = True
                wire.pending.clear()
            else:
                wire.replies += content

    def run(self, clients: Sequence[Callable[[], None]], order: Sequence[int]) -> None:
        """Let clients run until all have ended and every request is done."""
        self.running, self.blocked = len(clients), 0
        threads = [threading.Thread(target=self._run_one, args=(client,), daemon=True) for client in clients]
        for thread in threads:
            thread.start()
        turns = deque(order)
        with self.changed:
            while True:
                assert self.changed.wait_for(lambda: self.blocked == self.running, LONG_S)
                ready = sorted((wire for wire in self.wires if wire.pending), key=lambda wire: wire.place)
                if not ready:
                    assert not self.running, "a client waits for a reply that it has not asked for"
                    break
                turn = turns.popleft() if turns else 0
                self.step(ready[turn % len(ready)])
                self.steps += 1
                self.blocked = 0  # all look again
                self.changed.notify_all()
        for thread in threads:
            thread.join(LONG_S)

    def _run_one(self, client: Callable[[], None]) -> None:
        try:
            client()
        except Killed:
            pass
        finally:
            with self.changed:
                self.running -= 1
                self.changed.notify_all()


SILENT = os.pipe()
"""Nobody writes into it."""


class NoSocket:
    """What is left of one: nothing ever comes, and nobody hangs up."""

    def fileno(self) -> int:
        """Returns a descriptor for `poll`."""
        return SILENT[0]

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class ModelConnection(LMCacheConnection):
    """A connection to the model; everything above the socket is the real one."""

    def __init__(self, world: World, owner: int, kill_after: list[int], remains: bool) -> None:
        """Args:
        owner: whose it is.
        kill_after: so many bytes the client may still send, on all its connections.
        remains: what is cut off is closed, not reset.
        """
        super().__init__(cast("Any", NoSocket()))
        self._world, self._kill_after, self._remains = world, kill_after, remains
        with world.changed:
            earlier = sum(wire.place[0] == owner for wire in world.wires)
            self._wire = Wire((owner, earlier), deque(), bytearray())
            world.wires.append(self._wire)

    def send_parts(self, parts: Sequence[bytes | memoryview], meanwhile: Callable[[], bool] | None = None) -> None:
        assert meanwhile is None
        data = b"".join(parts)
        allowed = data[: max(0, self._kill_after[0])]
        self._kill_after[0] -= len(data)
        at = 0
        with self._world.changed:
            while len(allowed) - at >= REQUEST.size:
                numbers = REQUEST.unpack_from(allowed, at)
                size = numbers[1] if numbers[0] == PUT else 0
                at += REQUEST.size
                body = allowed[at : at + size]
                at += size
                if len(body) == size:
                    self._wire.pending.append((numbers, body))
                elif self._remains:
                    self._wire.pending.append((numbers, cast("Any", None)))
            while self._world.free and self._wire.pending:
                self._world.step(self._wire)
        if len(allowed) < len(data):
            raise Killed

    def receive(self, target: memoryview, whole: bool, meanwhile: Callable[[], bool] | None = None) -> int:
        assert meanwhile is None
        world, wire = self._world, self._wire
        with world.changed:
            while not wire.replies and not wire.ended:
                assert not world.free, "a reply is waited for that was not asked for"
                world.blocked += 1
                world.changed.notify_all()
                seen = world.steps
                assert world.changed.wait_for(lambda: world.steps > seen, LONG_S)  # noqa: B023 - called here
            count = min(len(wire.replies), target.nbytes)
            target[:count] = wire.replies[:count]
            del wire.replies[:count]
            return count

    @property
    def is_silent(self) -> bool:
        return not self._wire.replies and not self._wire.ended

    def close(self) -> None:
        """What was sent is done nevertheless."""


class ModelStore(LMCacheStore):
    """The real store, but for its connections."""

    def __init__(self, world: World, owner: int, kill_after: int = 1 << 30, *, remains: bool = False) -> None:
        self._world, self._owner, self._left, self._remains = world, owner, [kill_after], remains
        super().__init__(("model", 1))

    def _check(self) -> None:
        """It is there."""

    def _connect(self, server: LMCacheAddress, deadline: float) -> LMCacheConnection:
        return ModelConnection(self._world, self._owner, self._left, self._remains)


def deadline() -> float:
    return time.monotonic() + LONG_S


@dataclass
class Client:
    """What a client does with one key, and what came of it."""

    number: int
    steps: list[str]
    value: bytes
    kill_after: int
    remains: bool
    codes: list[ResultCode]
    read: list[bytes]

    def run(self, world: World) -> None:
        store = ModelStore(world, self.number, self.kill_after, remains=self.remains)
        try:
            for step in self.steps:
                self.codes.append(self.do(store, step))
        finally:
            store.close()

    def do(self, store: LMCacheStore, step: str) -> ResultCode:
        if step == "put":
            return store.put_blocking([PutOp("key", (memoryview(self.value),))], deadline())[0].code
        if step == "delete":
            return store.delete_blocking(["key"], deadline())[0].code
        if step == "exists":
            return store.exists_blocking(["key"], deadline())[0].code
        target = memoryview(bytearray(20))
        (result,) = store.get_blocking([GetOp("key", (target,))], deadline())
        if result.code is ResultCode.OK:
            self.read.append(bytes(target[: result.nbytes]))
        return result.code


STEPS = st.lists(st.sampled_from(["put", "put", "delete", "get", "exists"]), min_size=1, max_size=3)
DEATHS = st.one_of(st.just(1 << 30), st.integers(0, 2000))
CLIENTS = st.lists(st.tuples(STEPS, DEATHS, st.booleans()), min_size=2, max_size=3)


@settings(max_examples=3 * settings().max_examples)
@given(CLIENTS, st.lists(st.integers(0, 5), max_size=60))
def test_whatever_clients_do_at_the_same_time_values_are_whole_and_one_read_puts_the_rest_right(
    drawn: list[tuple[list[str], int, bool]], order: list[int]
) -> None:
    world = World()
    clients = [
        Client(number, steps, bytes([number + 1]) * (10 + number), kill_after, remains, [], [])
        for number, (steps, kill_after, remains) in enumerate(drawn)
    ]
    world.run([lambda client=client: client.run(world) for client in clients], order)
    values = {client.value for client in clients} | {b"last" * 4}
    for client in clients:
        assert set(client.read) <= values
        assert set(client.codes) <= {ResultCode.OK, ResultCode.EXISTS, ResultCode.MISS, ResultCode.UNAVAILABLE}
    everything = [step for client in clients for step in client.steps]
    calm = all(client.kill_after == 1 << 30 for client in clients) and "delete" not in everything
    world.free = True
    last = Client(len(clients), [], b"last" * 4, 0, False, [], [])
    store = ModelStore(world, last.number)
    try:
        before = last.do(store, "exists")
        if calm and "put" in everything:
            puts = [code for one in clients for step, code in zip(one.steps, one.codes, strict=True) if step == "put"]
            assert ResultCode.OK in puts
            assert set(puts) <= {ResultCode.OK, ResultCode.EXISTS}
            assert before is ResultCode.OK
        found = last.do(store, "get")
        after = last.do(store, "exists")
        event(f"{before.name} {found.name} {after.name}")
        assert found in (ResultCode.OK, ResultCode.MISS)
        assert found is ResultCode.OK or after is ResultCode.MISS  # what cannot be read is not found any more
        assert last.do(store, "put") is (ResultCode.EXISTS if after is ResultCode.OK else ResultCode.OK)
        assert last.do(store, "get") is ResultCode.OK  # so a key is never lost for good
        assert last.do(store, "exists") is ResultCode.OK
        assert last.do(store, "delete") is ResultCode.OK
        assert [last.do(store, "get"), last.do(store, "exists")] == [ResultCode.MISS, ResultCode.MISS]
        assert set(last.read) <= values
    finally:
        store.close()


def test_two_who_put_at_the_same_time_may_both_be_told_ok() -> None:
    """What `Capabilities.one_winner` says of this store; both have asked before either has put."""
    world = World()
    clients = [Client(number, ["put", "get"], bytes([number]) * 10, 1 << 30, False, [], []) for number in range(2)]
    world.run([lambda client=client: client.run(world) for client in clients], [0, 1, 0, 0, 0, 0, 0, 0])
    assert [client.codes for client in clients] == [[ResultCode.OK, ResultCode.OK]] * 2
    store = ModelStore(world, 2)
    assert not store.capabilities.one_winner
    store.close()
    assert [client.read for client in clients] == [[bytes(10)], [b"\1" * 10]]
