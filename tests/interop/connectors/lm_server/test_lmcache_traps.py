"""Tests how the store avoids the traps of LMCache's `lm://` server.

A bare client shows each trap first. If a later LMCache removes a trap, its test fails.
"""

import struct

import pytest

from kvparams_connectors.store import ResultCode
from kvparams_connectors.stores.lmcache.store import LMCacheStore
from kvparams_connectors.stores.lmcache.wire import LMCacheEntryKind, LMCacheNames
from tests.support.connectors.lmcache_server import BINARY, PUT, BareClient, LMCacheServer
from tests.support.connectors.lmcache_steps import break_off, delete, exists
from tests.support.connectors.steps import SIZE, get, put


def test_a_put_has_no_answer_and_exist_confirms_it(server: LMCacheServer, prefix: str) -> None:
    name = LMCacheNames(prefix).value("key")
    with BareClient(server.port) as client:
        assert client.exist(name) == 400
        client.put(name, b"bytes")
        assert client.says_nothing()
        assert client.exist(name) == 200
        client.put(name, b"others")  # and it spares nothing that is there
        assert client.get(name)[2] == b"others"


def test_list_has_no_answer(server: LMCacheServer, prefix: str) -> None:
    with BareClient(server.port) as client:
        client.send(4, LMCacheNames(prefix).value("key"))
        assert client.says_nothing()
        assert client.health() == 200


def test_a_put_that_is_closed_in_the_middle_leaves_remains_and_a_reset_one_does_not(
    server: LMCacheServer, prefix: str
) -> None:
    names = LMCacheNames(prefix)
    break_off(server, names.value("closed"), bytes(1000), 5000, reset=False)
    break_off(server, names.value("reset"), bytes(1000), 5000, reset=True)
    with BareClient(server.port) as client:
        assert client.exist(names.value("closed")) == 200
        assert client.exist(names.value("reset")) == 400
        with pytest.raises(ConnectionError):
            client.get(names.value("closed"))


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 186, b"\0" * 186, b"x" * 186, struct.pack("=9i150s", PUT, 5, BINARY, 6, *[0] * 5, b"a@b@0@0@0@uint8")],
)
def test_a_request_that_it_does_not_understand_closes_the_connection(server: LMCacheServer, garbage: bytes) -> None:
    with BareClient(server.port) as client:
        client.socket.sendall(garbage)
        assert client.socket.recv(100) == b""
    with BareClient(server.port) as client:
        assert client.health() == 200


def test_remains_of_a_put_are_a_miss_and_the_rest_of_the_batch_arrives(
    server: LMCacheServer, prefix: str, store: LMCacheStore
) -> None:
    assert put(store, range(6)) == [ResultCode.OK] * 6
    for number in (1, 4):  # over whole values, as a second writer that dies would
        break_off(server, LMCacheNames(prefix).value(f"key-{number}"), bytes(1000), SIZE, reset=False)
    assert exists(store, range(6)) == [ResultCode.OK] * 6  # nobody knows yet
    wanted = [ResultCode.OK, ResultCode.MISS, ResultCode.OK, ResultCode.OK, ResultCode.MISS, ResultCode.OK]
    assert get(store, range(6)) == wanted
    assert exists(store, range(6)) == wanted
    assert get(store, range(6)) == wanted
    assert put(store, range(6)) == [ResultCode.OK if code is ResultCode.MISS else ResultCode.EXISTS for code in wanted]
    assert get(store, range(6)) == [ResultCode.OK] * 6


def test_remains_without_a_record_are_overwritten(server: LMCacheServer, prefix: str, store: LMCacheStore) -> None:
    break_off(server, LMCacheNames(prefix).value("key-0"), bytes(1000), SIZE, reset=False)
    assert exists(store, range(1)) == [ResultCode.MISS]
    assert put(store, range(1)) == [ResultCode.OK]
    assert get(store, range(1)) == [ResultCode.OK]


def test_a_record_that_has_outlived_its_value_is_put_right(
    server: LMCacheServer, prefix: str, store: LMCacheStore
) -> None:
    """As it is when one client deletes while another puts: value, both burials, record."""
    assert put(store, range(3)) == [ResultCode.OK] * 3
    with BareClient(server.port) as client:
        client.put(LMCacheNames(prefix).value("key-1"), b"", (LMCacheEntryKind.GONE, 0, 0, 0))
        client.health()
    assert exists(store, range(3)) == [ResultCode.OK] * 3
    assert get(store, range(3)) == [ResultCode.OK, ResultCode.MISS, ResultCode.OK]
    assert exists(store, range(3)) == [ResultCode.OK, ResultCode.MISS, ResultCode.OK]
    assert put(store, range(1, 2)) == [ResultCode.OK]
    assert get(store, range(3)) == [ResultCode.OK] * 3


def test_something_else_under_a_name_of_ours_is_corrupt_and_may_be_deleted_or_overwritten(
    server: LMCacheServer, prefix: str, store: LMCacheStore
) -> None:
    names = LMCacheNames(prefix)
    assert put(store, range(3)) == [ResultCode.OK] * 3
    with BareClient(server.port) as client:
        client.put(names.value("key-0"), b"not ours")
        client.put(names.record("key-1"), b"", (1, 2, 3, 4))
        client.health()
    assert get(store, range(3)) == [ResultCode.CORRUPT, ResultCode.OK, ResultCode.OK]
    assert exists(store, range(3)) == [ResultCode.OK, ResultCode.CORRUPT, ResultCode.OK]
    assert delete(store, range(2)) == [ResultCode.OK, ResultCode.OK]
    assert get(store, range(3)) == [ResultCode.MISS, ResultCode.MISS, ResultCode.OK]
    with BareClient(server.port) as client:
        client.put(names.record("key-1"), b"", (1, 2, 3, 4))
        client.health()
    assert put(store, range(2)) == [ResultCode.OK, ResultCode.OK]
    assert get(store, range(3)) == [ResultCode.OK] * 3


def test_a_record_with_bytes_ends_the_connection_and_nothing_else(
    server: LMCacheServer, prefix: str, store: LMCacheStore
) -> None:
    with BareClient(server.port) as client:
        client.put(LMCacheNames(prefix).record("key-0"), bytes(5000))
        client.health()
    assert exists(store, range(2)) == [ResultCode.UNAVAILABLE] * 2
    assert put(store, range(1, 3)) == [ResultCode.OK] * 2
    assert get(store, range(1, 3)) == [ResultCode.OK] * 2
