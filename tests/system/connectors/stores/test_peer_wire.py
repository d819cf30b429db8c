"""Tests the peer protocol byte by byte: every message round-trips, and nonsense is an error."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams_connectors.store import Result, ResultCode
from kvparams_connectors.stores.peer.channel import PeerChannel
from kvparams_connectors.stores.peer.handshake import HandshakeRefused, accept_handshake, connect_handshake
from kvparams_connectors.stores.peer.wire import (
    MOST_KEYS,
    REPLY_HEAD,
    REQUEST_HEAD,
    PeerOperation,
    PeerProtocolError,
    PeerStatus,
    PlacedValue,
    PlacementTable,
    encode_found,
    encode_keys,
    encode_placement,
    encode_sizes,
    parse_found,
    parse_keys,
    parse_placement,
    parse_reply,
    parse_request,
)

KEYS = st.text("abcXYZ019._-", min_size=1, max_size=128)
SIZES = st.integers(0, 1 << 40)
RESULTS = st.one_of(
    st.just(Result(ResultCode.MISS)),
    SIZES.map(lambda n: Result(ResultCode.OK, n)),
    SIZES.map(lambda n: Result(ResultCode.TOO_LARGE, n + 1)),
)


def room_for(result: Result) -> int:
    return result.nbytes - (result.code is ResultCode.TOO_LARGE)


@given(st.lists(st.tuples(KEYS, SIZES), max_size=50))
def test_keys_come_back(wanted: list[tuple[str, int]]) -> None:
    body = encode_keys([key for key, _ in wanted], [room for _, room in wanted])
    keys, rooms = parse_keys(body, len(wanted))
    assert list(zip(keys, rooms, strict=True)) == wanted


@given(st.lists(RESULTS, max_size=50))
def test_tables_come_back(results: list[Result]) -> None:
    assert parse_found(encode_found(results), [room_for(result) for result in results]) == results


@given(st.lists(st.tuples(st.integers(0, 1 << 62), st.lists(st.tuples(st.integers(0, 1 << 62), SIZES), max_size=5))))
def test_placements_come_back(values: list[tuple[int, list[tuple[int, int]]]]) -> None:
    placed = [
        PlacedValue(Result(ResultCode.OK, sum(length for _, length in runs)), generation, tuple(runs))
        for generation, runs in values
    ]
    placement = PlacementTable("10.0.0.1:15000", placed)
    assert parse_placement(encode_placement(placement), [one.result.nbytes for one in placed]) == placement


@given(st.lists(st.one_of(st.none(), SIZES), max_size=50))
def test_sizes_come_back(sizes: list[int | None]) -> None:
    results = [Result(ResultCode.MISS) if size is None else Result(ResultCode.OK, size) for size in sizes]
    assert parse_found(encode_sizes(sizes), [1 << 48] * len(sizes)) == results


def test_a_value_in_too_many_pieces_is_there_without_them() -> None:
    scattered = PlacedValue(Result(ResultCode.OK, 65), 1, tuple((number, 1) for number in range(65)))
    [found] = parse_placement(encode_placement(PlacementTable("s:1", [scattered])), [65]).values
    assert found == PlacedValue(Result(ResultCode.OK, 65), 1)


@given(st.binary(max_size=300), st.integers(0, 20))
def test_nonsense_is_an_error_of_the_protocol(data: bytes, count: int) -> None:
    parsers: list[Callable[[], object]] = [
        lambda: parse_keys(data, count),
        lambda: parse_found(data, [100] * count),
        lambda: parse_placement(data, [100] * count),
        lambda: parse_request(data.ljust(REQUEST_HEAD.size, b"\0")[: REQUEST_HEAD.size]),
        lambda: parse_reply(data.ljust(REPLY_HEAD.size, b"\0")[: REPLY_HEAD.size], count),
    ]
    for parse in parsers:
        try:
            parse()
        except PeerProtocolError:
            continue


@pytest.mark.parametrize(
    "parse",
    [
        lambda: parse_request(REQUEST_HEAD.pack(9, 1, 20, 100)),
        lambda: parse_request(REQUEST_HEAD.pack(PeerOperation.GET, MOST_KEYS + 1, 20, 100)),
        lambda: parse_request(REQUEST_HEAD.pack(PeerOperation.GET, 1, 1 << 31, 100)),
        lambda: parse_reply(REPLY_HEAD.pack(9, 1, 9), 1),
        lambda: parse_reply(REPLY_HEAD.pack(PeerStatus.FINE, 2, 9), 1),
        lambda: parse_reply(REPLY_HEAD.pack(PeerStatus.FINE, 1, 1 << 31), 1),
        lambda: parse_found(encode_found([Result(ResultCode.OK, 101)]), [100]),
        lambda: parse_found(encode_found([Result(ResultCode.TOO_LARGE, 100)]), [100]),
        lambda: parse_found(encode_found([Result(ResultCode.MISS, 1)]), [100]),
        lambda: parse_found(b"\7" + bytes(8), [100]),
        lambda: parse_placement(
            encode_placement(PlacementTable("s", [PlacedValue(Result(ResultCode.OK, 9), 1, ((5, 8),))])), [100]
        ),
        lambda: parse_placement(
            encode_placement(PlacementTable("s", [PlacedValue(Result(ResultCode.MISS), 1, ((5, 0),))])), [100]
        ),
        lambda: parse_keys(encode_keys(["a"], [0]) + b"x", 1),
        lambda: parse_keys(encode_keys(["a" * 129], [0]), 1),
    ],
)
def test_a_number_that_is_out_of_bounds_is_refused(parse: Callable[[], object]) -> None:
    with pytest.raises(PeerProtocolError):
        parse()


# ---- the handshake


def two_channels(within_s: float = 10.0) -> tuple[PeerChannel, PeerChannel]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = PeerChannel(socket.create_connection(listener.getsockname()[:2]))
        theirs = PeerChannel(listener.accept()[0])
    for channel in (ours, theirs):
        channel.set_deadline(time.monotonic() + within_s)
    return ours, theirs


@pytest.mark.parametrize(("reader", "owner", "good"), [(b"", b"", True), (b"a", b"a", True), (b"a", b"b", False)])
def test_both_sides_know_whether_they_trust_each_other(reader: bytes, owner: bytes, good: bool) -> None:
    ours, theirs = two_channels()
    with closing(ours), closing(theirs):
        said: list[bool] = []

        def welcoming() -> None:
            try:
                said.append(accept_handshake(theirs, owner, b"r" * 16))
            except OSError:
                said.append(False)

        thread = threading.Thread(target=welcoming)
        thread.start()
        if good:
            assert connect_handshake(ours, reader) == b"r" * 16
        else:
            with pytest.raises(HandshakeRefused):
                connect_handshake(ours, reader)
            ours.hang_up()
        thread.join(10)
        assert said == [good]


def test_a_reader_cannot_send_the_owners_proof_back() -> None:
    """Without a role in the proof, what the owner has said would be the answer that it waits for."""
    ours, theirs = two_channels()
    with closing(ours), closing(theirs):
        said: list[bool] = []
        thread = threading.Thread(target=lambda: said.append(accept_handshake(theirs, b"secret", b"r" * 16)))
        thread.start()
        ours.send_parts([b"KVPR\1\1" + bytes(16)])
        ours.send_parts([bytes(ours.read(70)[-32:])])
        thread.join(10)
        assert said == [False]


def test_another_version_is_refused_on_both_sides() -> None:
    ours, theirs = two_channels()
    with closing(ours), closing(theirs):
        ours.send_parts([b"KVPR\2\0" + bytes(16) + bytes(32)])
        assert not accept_handshake(theirs, b"", b"r" * 16)
    ours, theirs = two_channels()
    with closing(ours), closing(theirs):
        theirs.send_parts([b"KVPR\2\0" + bytes(64)])
        with pytest.raises(PeerProtocolError, match="version 2"):
            connect_handshake(ours, b"")


# ---- deadlines of a connection


def test_every_wait_ends_at_the_deadline() -> None:
    ours, theirs = two_channels(0.2)
    with closing(ours), closing(theirs):
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            ours.read(1)
        theirs.set_deadline(time.monotonic() + 0.2)
        with pytest.raises(TimeoutError):
            theirs.send_parts([bytes(64 << 20)])
        assert 0.35 < time.monotonic() - start < 2


def test_a_trickle_does_not_stretch_a_deadline() -> None:
    ours, theirs = two_channels(0.3)
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(0.01):
            try:
                theirs.set_deadline(time.monotonic() + 1)
                theirs.send_parts([b"x"])
            except OSError:
                return

    thread = threading.Thread(target=trickle)
    thread.start()
    start = time.monotonic()
    with closing(ours), closing(theirs):
        with pytest.raises(TimeoutError):
            ours.read(100_000)
        assert time.monotonic() - start < 1.5
        over.set()
        thread.join(10)
