"""Tests that values go to a server and come back byte for byte, whatever the pieces that a socket gives and takes."""

import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvparams.keys import KVShard
from kvparams.native import NATIVE
from kvparams.pages import HEADER_BYTES, PageIdentity, unsealed_header, verify

if NATIVE is None:
    pytest.skip("asked to do without native code, or there is no compiler", allow_module_level=True)

ORDINARY, OTHER_REPLY, LATE, CLOSED, BROKEN, FAILED = range(6)
WINDOW: Final = (640 << 10, 5 << 19)
WAIT_S: Final = 30.0
SMALL: Final = 4096
"""Of the sockets' buffers, so that a value needs many calls."""


@contextmanager
def server(serve: Callable[[socket.socket], object], *, small: bool = True) -> Generator[int]:
    """Yields a socket's file descriptor; `serve` has the other end, and has returned when this is left."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if small:
            for one in (ours, theirs):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
        thread = threading.Thread(target=serve, args=(theirs,))
        thread.start()
        yield ours.fileno()
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_S)
        assert not thread.is_alive()


def soon() -> float:
    return time.monotonic() + WAIT_S


def exactly(sock: socket.socket, nbytes: int) -> bytes:
    found = bytearray()
    while len(found) < nbytes and (more := sock.recv(nbytes - len(found))):
        found += more
    return bytes(found)


def page(nbytes: int, seed: int) -> tuple[bytearray, PageIdentity]:
    """Returns a page without its header, and what it is."""
    value = bytearray(HEADER_BYTES) + Random(seed).randbytes(nbytes)
    return value, PageIdentity(b"n" * 32, seed.to_bytes(32, "little"), 1, KVShard(0, 1, 0, 1), nbytes)


SIZES: Final = st.lists(st.one_of(st.integers(0, 700), st.integers(60_000, 200_000)), max_size=6)


@given(SIZES, st.lists(st.booleans(), min_size=6, max_size=6), st.integers(0, 99), st.booleans())
@settings(deadline=None, max_examples=40)
def test_values_are_sent_in_order_and_pages_are_sealed(
    sizes: list[int], stored: list[bool], seed: int, small: bool
) -> None:
    assert NATIVE is not None
    pages = [page(size, seed + number) for number, size in enumerate(sizes)]
    sent: list[bytes] = []

    def serve(sock: socket.socket) -> None:
        for size, is_stored in zip(sizes, stored, strict=False):
            sent.append(exactly(sock, 4 + HEADER_BYTES + size + 4))
            sock.sendall(b"+OK\r\n" if is_stored else b"$-1\r\n")

    with server(serve, small=small) as fd:
        values: list[tuple[list[bytes | memoryview], bytes | None]] = []
        for number, (value, identity) in enumerate(pages):
            cut = HEADER_BYTES + len(value) // 3  # the value in two pieces
            pieces = [memoryview(value)[:cut], memoryview(value)[cut:]]
            values.append(([b"SET ", *pieces, b"END "], unsealed_header(identity) if number % 2 == 0 else None))
        found = NATIVE.put_values(fd, soon(), values, *WINDOW)
    assert found == (ORDINARY, 0, stored[: len(sizes)], len(sizes), b"")
    for number, (raw, (value, identity)) in enumerate(zip(sent, pages, strict=True)):
        assert raw == b"SET " + value + b"END "
        assert (verify(memoryview(value), identity) is None) == (number % 2 == 0)


def test_a_page_that_changes_behind_its_checksum_is_refused_by_its_reader() -> None:
    """The control: the checksum is of what was there, and a reader sees every other byte."""
    assert NATIVE is not None
    value, identity = page(100_000, 1)

    def serve(sock: socket.socket) -> None:
        exactly(sock, len(value) + 2)
        sock.sendall(b"+OK\r\n")

    with server(serve) as fd:
        values: list[tuple[list[bytes | memoryview], bytes | None]]
        values = [([b"S", memoryview(value), b"E"], unsealed_header(identity))]
        assert NATIVE.put_values(fd, soon(), values, *WINDOW)[0] == ORDINARY
    assert verify(memoryview(value), identity) is None
    for at in (HEADER_BYTES, len(value) - 1, 60, 250):
        value[at] ^= 1
        assert verify(memoryview(value), identity) is not None, at
        value[at] ^= 1


@pytest.mark.parametrize("reply", [b"-OOM command not allowed\r\n", b":1\r\n", b"+QUEUED\r\n", b"$5\r\nhello\r\n"])
@pytest.mark.parametrize("good", [0, 1, 2])
def test_puts_stop_before_another_reply_with_whole_commands_sent(reply: bytes, good: int) -> None:
    assert NATIVE is not None
    sizes = [50_000] * 4
    read: list[int] = []

    def serve(sock: socket.socket) -> None:
        for number in range(good + 1):
            read.append(len(exactly(sock, sizes[number] + 2)))
            sock.sendall(reply if number == good else b"+OK\r\n")
        sock.settimeout(WAIT_S)
        while more := sock.recv(1 << 16):
            read.append(len(more))

    with server(serve) as fd:
        values: list[tuple[list[bytes | memoryview], bytes | None]]
        values = [([b"S", memoryview(bytes(size)), b"E"], None) for size in sizes]
        status, _, answers, sent, rest = NATIVE.put_values(fd, soon(), values, *WINDOW)
    assert (status, answers, rest) == (OTHER_REPLY, [True] * good, reply)
    assert sent > good
    assert sum(read) == sent * (sizes[0] + 2), "a command was cut"


@given(
    st.lists(st.one_of(st.none(), st.integers(0, 700), st.integers(60_000, 200_000)), max_size=6),
    st.integers(0, 300),
    st.lists(st.integers(1, 90_000), min_size=1, max_size=8),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=40)
def test_values_arrive_and_are_hashed_however_the_stream_is_cut(
    sizes: list[int | None], room: int, cuts: list[int], seed: int
) -> None:
    assert NATIVE is not None
    values = [None if size is None else Random(seed + number).randbytes(size) for number, size in enumerate(sizes)]
    stream = b"".join(b"$-1\r\n" if one is None else b"$%d\r\n%b\r\n" % (len(one), one) for one in values)

    def serve(sock: socket.socket) -> None:
        exactly(sock, 1)  # the rest of the questions is read when it must
        at = number = 0
        while at < len(stream):
            sock.sendall(stream[at : at + cuts[number % len(cuts)]])
            at += cuts[number % len(cuts)]
            number += 1
        exactly(sock, 4 * len(sizes) - 1)

    targets = [bytearray(b"\xa5" * ((size or 0) + room)) for size in sizes]
    with server(serve if sizes else exactly_nothing) as fd:
        asked = [(b"GET ", memoryview(target)) for target in targets]
        found = NATIVE.get_values(fd, soon(), asked, True, *WINDOW)
    assert found[:2] == (ORDINARY, 0)
    assert found[3:] == (len(sizes), b"")
    for value, target, (nbytes, checksum) in zip(values, targets, found[2], strict=True):
        if value is None:
            assert nbytes == -1
            continue
        assert (nbytes, bytes(target[:nbytes])) == (len(value), value)
        assert set(target[nbytes:]) <= {0xA5}, "written behind the value"
        assert checksum == xxh3_64_intdigest(value[HEADER_BYTES:])


def exactly_nothing(_sock: socket.socket) -> None:
    """Serves a batch of no values."""


def gets(replies: Sequence[bytes], targets: list[bytearray]) -> tuple[int, int, list[tuple[int, int]], int, bytes]:
    """Returns what comes of asking for values, to which a server says this and then nothing."""
    assert NATIVE is not None

    def serve(sock: socket.socket) -> None:
        exactly(sock, 1)
        for reply in replies:
            sock.sendall(reply)
        sock.settimeout(WAIT_S)
        while sock.recv(1 << 16):
            pass

    with server(serve) as fd:
        asked = [(b"G", memoryview(target)) for target in targets]
        return NATIVE.get_values(fd, time.monotonic() + 0.3, asked, True, *WINDOW)


@pytest.mark.parametrize(
    "reply",
    [
        *(
            b"-MOVED 1 127.0.0.1:1\r\n",
            b"+OK\r\n",
            b":12\r\n",
            b"*1\r\n",
            b"$11\r\n01234567890\r\n",
            b"$-2\r\n",
            b"$\r\n",
        ),
        *(
            b"$+5\r\nhello\r\n",
            b"$ 5\r\nhello\r\n",
            b"$5x\r\nhello\r\n",
            b"$5\rxhello\r\n",
            b"$99999999999999999999\r\n",
        ),
        b"$" + b"0" * 30 + b"\r\n",
    ],
)
def test_gets_stop_before_another_reply(reply: bytes) -> None:
    """The value before it has arrived; nothing was written to the memory of the one behind it."""
    targets = [bytearray(10), bytearray(10), bytearray(10)]
    status, _, answers, sent, rest = gets([b"$5\r\nabcde\r\n", reply], targets)
    assert (status, [nbytes for nbytes, _ in answers], sent) == (OTHER_REPLY, [5], 3)
    assert rest
    assert reply.startswith(rest)
    assert (bytes(targets[0][:5]), targets[1], targets[2]) == (b"abcde", bytearray(10), bytearray(10))


def test_a_value_that_does_not_end_where_it_should_ends_the_connection() -> None:
    assert gets([b"$5\r\nabcdefg\r\n"], [bytearray(10)])[0] == BROKEN


def test_what_was_answered_before_the_deadline_is_said() -> None:
    for replies in ([b"$2\r\nab\r\n"], [b"$2\r\nab\r\n", b"$5\r\nab"], [b"$2\r\nab\r\n", b"$5"]):
        status, _, answers, *_ = gets(replies, [bytearray(10), bytearray(10)])
        assert (status, [nbytes for nbytes, _ in answers]) == (LATE, [2])


def test_a_server_that_goes_away_or_takes_nothing_ends_the_exchange() -> None:
    assert NATIVE is not None
    ours, theirs = socket.socketpair()
    value: list[tuple[list[bytes | memoryview], bytes | None]] = [([b"S", bytes(1 << 20), b"E"], None)]
    with ours:
        with theirs:
            start = time.monotonic()
            assert NATIVE.put_values(ours.fileno(), start + 0.1, value, *WINDOW)[0] == LATE
            assert 0.1 <= time.monotonic() - start < WAIT_S
        assert NATIVE.put_values(ours.fileno(), soon(), value, *WINDOW)[0] == FAILED
        asked = [(b"G", memoryview(bytearray(10)))]
        assert NATIVE.get_values(ours.fileno(), soon(), asked, True, *WINDOW)[0] in (CLOSED, FAILED)
    assert NATIVE.get_values(ours.fileno(), soon(), asked, True, *WINDOW)[0] == FAILED, "a closed file descriptor"


def test_so_many_values_are_under_way_as_the_window_allows() -> None:
    """What the server has been asked when it has said nothing yet."""
    assert NATIVE is not None
    asked: list[int] = []

    def serve(sock: socket.socket) -> None:
        asked.append(len(exactly(sock, 100)))  # until the end of the stream

    for nbytes, window, expected in ((10, (100, 0), 9), (60, (100, 150), 2), (60, (100, 100), 1), (500, (100, 100), 1)):
        with server(serve) as fd:
            values = [(b"G", memoryview(bytearray(nbytes)))] * 9
            assert NATIVE.get_values(fd, time.monotonic() + 0.2, values, False, *window)[0] in (LATE, CLOSED)
        assert asked.pop() == expected, (nbytes, window)


def test_memory_that_cannot_be_used_is_refused_before_anything_is_sent() -> None:
    assert NATIVE is not None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        released = memoryview(bytearray(300))
        released.release()
        header = bytes(HEADER_BYTES)
        good: list[bytes | memoryview] = [b"S", memoryview(bytearray(300)), b"E"]
        puts: list[tuple[object, type[Exception]]] = [
            (([b"S", released, b"E"], None), ValueError),
            (([b"S", bytes(300), b"E"], header), BufferError),
            (([b"S", memoryview(bytearray(255)), b"E"], header), ValueError),
            ((good, header[1:]), ValueError),
            (([], header), ValueError),
            ((good,), TypeError),
            ([good, None], TypeError),
            ((tuple(good), None), TypeError),
        ]
        for value, error in puts:
            with pytest.raises(error):
                NATIVE.put_values(ours.fileno(), soon(), [(good, None), value], *WINDOW)  # pyright: ignore[reportArgumentType]
        for target, error in ((released, ValueError), (memoryview(bytes(8)), BufferError), (8, TypeError)):
            with pytest.raises(error):
                NATIVE.get_values(ours.fileno(), soon(), [(b"G", target)], True, *WINDOW)  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError):
            NATIVE.put_values(ours.fileno(), soon(), (), *WINDOW)  # pyright: ignore[reportArgumentType]
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
