"""Provides the steps that tests of the peer store share; each compares what it reads with what was put."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Self
from urllib.parse import quote

from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode
from kvparams_connectors.store_url import StoreURL
from kvparams_connectors.stores.peer.channel import PeerChannel
from kvparams_connectors.stores.peer.handshake import accept_handshake
from kvparams_connectors.stores.peer.settings import PeerSettings
from kvparams_connectors.stores.peer.store import PeerStore
from kvparams_connectors.stores.peer.wire import (
    REPLY_HEAD,
    REQUEST_HEAD,
    PeerOperation,
    PeerStatus,
    encode_keys,
    parse_keys,
    parse_request,
)
from tests.support.connectors.peer_process import PeerProcess, page

WAIT_S: Final = 20.0
SIZE: Final = 100_000


INNER: Final = ("threads", "connect_s", "buffer_bytes")
"""What no URL says."""


def peer(opened: list[KVStore], place: str = "127.0.0.1", **settings: str | float) -> PeerStore:
    """A store of this process; small, and nothing is leased unless it is said."""
    given = {"size": "4MiB", "lease": 0} | settings
    inner: dict[str, Any] = {name: given.pop(name) for name in INNER if name in given}
    url = f"peer://{place}?" + "&".join(f"{name}={quote(str(value))}" for name, value in given.items())
    store = PeerStore(replace(PeerSettings.of(StoreURL.parse(url)), unit_bytes=4096, **inner))
    opened.append(store)
    return store


def put(store: KVStore, seeds: Sequence[int], size: int = SIZE) -> list[ResultCode]:
    ops = [PutOp(f"key-{seed}", (page(seed, size),)) for seed in seeds]
    return [result.code for result in store.put(ops, WAIT_S).result()]


def get(store: KVStore, seeds: Sequence[int], size: int = SIZE, deadline_s: float = WAIT_S) -> list[ResultCode]:
    """The codes; what was read is right, or this fails."""
    targets = [memoryview(bytearray(size)) for _ in seeds]
    ops = [GetOp(f"key-{seed}", (target,)) for seed, target in zip(seeds, targets, strict=True)]
    job = store.get(ops, deadline_s)
    results = job.result()
    assert job.wait_settled(WAIT_S)
    for seed, target, result in zip(seeds, targets, results, strict=True):
        if result.code is ResultCode.OK:
            assert (result.nbytes, target) == (size, page(seed, size)), f"key-{seed}"
    return [result.code for result in results]


def names(seeds: Sequence[int]) -> list[str]:
    return [f"key-{seed}" for seed in seeds]


def a_listener() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.3)
    return listener


def contacted(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except TimeoutError:
        return False
    return True


class Liar:
    """Something that begins as a peer does; what it answers is the test's."""

    def __init__(self, answer: Callable[[PeerChannel, list[str]], None]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(WAIT_S)

    def _serve(self) -> None:
        while True:
            try:
                channel = PeerChannel(self._listener.accept()[0])
            except OSError:
                return
            with suppress(OSError):
                channel.set_deadline(time.monotonic() + 1)
                accept_handshake(channel, b"", b"r" * 16)
                while True:
                    request = parse_request(channel.read(REQUEST_HEAD.size))
                    keys, _ = parse_keys(channel.read(request.nbytes), request.count)
                    self._answer(channel, keys)
            channel.close()


def lies(
    table: bytes, *values: bytes, count: int = 2, status: int = PeerStatus.FINE
) -> Callable[[PeerChannel, list[str]], None]:
    return lambda channel, keys: channel.send_parts([REPLY_HEAD.pack(status, count, len(table)), table, *values])


def reader_of(owner: PeerProcess) -> PeerChannel:
    host, _, port = owner.address.rpartition(":")
    channel = PeerChannel(socket.create_connection((host, int(port))))
    channel.set_deadline(time.monotonic() + WAIT_S)
    return channel


def request(operation: PeerOperation, seeds: Sequence[int], give_up_ms: int) -> bytes:
    body = encode_keys(names(seeds), [1 << 30] * len(seeds))
    return REQUEST_HEAD.pack(operation, len(seeds), len(body), give_up_ms) + body
