"""Tests Valkey replies from cut streams and lying peers, slots of keys, and redirects, without a server."""

import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvparams_connectors.store import Result, ResultCode
from kvparams_connectors.stores.progress import progress_step_bytes
from kvparams_connectors.stores.valkey.requests import result_of_error
from kvparams_connectors.stores.valkey.resp import (
    ErrorReply,
    OversizedValue,
    ReceiveInto,
    ReplyReader,
    RESPProtocolError,
    encode_command,
    flatten_buffers,
)
from kvparams_connectors.stores.valkey.topology import (
    SLOTS,
    ClusterRedirect,
    ClusterTopology,
    ValkeyNode,
    hash_slot,
    parse_redirect,
)

CANARY = 0xA5
STEP = 256 << 10


def cut(stream: bytes, seed: int) -> ReceiveInto:
    """Gives out the stream in pieces of any size, then says that it has ended; now and then it is waited for."""
    random = Random(seed)
    at = 0

    def receive(target: memoryview, _whole: bool, meanwhile: Callable[[], bool] | None) -> int:
        nonlocal at
        if meanwhile is not None:
            for _ in range(random.choice([0, 0, 1, 3, 100])):
                if not meanwhile():
                    break
        most = random.choice([1, 2, 7, 100, 5_000, 1 << 20])
        piece = stream[at : at + min(most, target.nbytes)]
        target[: len(piece)] = piece
        at += len(piece)
        return len(piece)

    return receive


LINES = st.one_of(
    st.integers(-(2**63), 2**63 - 1).map(lambda number: (b":%d\r\n" % number, number)),
    st.binary(max_size=50).filter(lambda text: b"\r" not in text).map(lambda text: (b"+%b\r\n" % text, text)),
    st.text(st.characters(codec="ascii", exclude_characters="\r\n"), max_size=50).map(
        lambda text: (f"-{text}\r\n".encode(), ErrorReply(text))
    ),
    st.just((b"$-1\r\n", None)),
)


@given(st.lists(LINES, max_size=30), st.integers(0, 2**32), st.booleans())
def test_lines_are_read_the_same_however_the_stream_is_cut(
    lines: list[tuple[bytes, object]], seed: int, together: bool
) -> None:
    reader = ReplyReader(cut(b"".join(line for line, _ in lines), seed), step=STEP)
    found = reader.replies(len(lines)) if together else [reader.reply() for _ in lines]
    assert found == [meaning for _, meaning in lines]
    assert reader.empty
    with pytest.raises(ConnectionError):
        reader.reply()


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 500, 16_383, 16_384, 16_385, 70_000, 200_000]), st.booleans(), LINES),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 2**32),
)
def test_values_go_to_their_buffers_however_the_stream_is_cut(
    values: list[tuple[int, bool, tuple[bytes, object]]], seed: int
) -> None:
    """Values into several buffers or one that is too small, with other replies between them."""
    random = Random(seed)
    contents = [random.randbytes(size) for size, _, _ in values]
    stream = b"".join(
        b"$%d\r\n%b\r\n%b" % (len(content), content, line)
        for content, (_, _, (line, _)) in zip(contents, values, strict=True)
    )
    reader = ReplyReader(cut(stream, seed), step=STEP)
    for content, (size, fits, (_, meaning)) in zip(contents, values, strict=True):
        room = size + random.choice([0, 1, 20_000]) if fits else max(0, size - random.choice([1, 20_000]))
        memory = memoryview(bytearray([CANARY]) * (room + 2))
        whole = memory[1:-1]
        middle = random.randint(0, room)
        found = reader.value(flatten_buffers([whole[:middle], whole[middle:]]))
        if room >= size:
            assert found == size
            assert whole[:size] == content
            assert set(memory[1 + size :]) <= {CANARY}
        else:
            assert found == OversizedValue(size)
            assert set(memory) == {CANARY}
        assert memory[0] == memory[-1] == CANARY
        assert reader.reply() == meaning
    assert reader.empty


@given(
    st.sampled_from([0, 1, 10_000, 20_000, (1 << 20) + 256, (3 << 20) + 5]),
    st.integers(0, 2**32),
    st.integers(0, 1 << 20),
    st.sampled_from([STEP, None]),
)
@settings(max_examples=60)
def test_what_is_said_to_have_come_is_there(size: int, seed: int, middle: int, step: int | None) -> None:
    """Whoever looks at a value while it comes is told when it begins, and never of bytes that are not there yet."""
    content = Random(seed).randbytes(size)
    reader = ReplyReader(cut(b"$%d\r\n%b\r\n:1\r\n" % (size, content), seed), step=step)
    whole = memoryview(bytearray(size + 100))
    seen: list[tuple[int, bool]] = []
    buffers = flatten_buffers([whole[: min(middle, size)], whole[min(middle, size) :]])
    assert reader.value(buffers, lambda nbytes: seen.append((nbytes, whole[:nbytes] == content[:nbytes]))) == size
    sizes = [nbytes for nbytes, _ in seen]
    assert sizes[:1] == ([0] if size >= (512 << 10 if step else 16 << 10) else [])
    if step and sizes:
        assert 0 < size - sizes[-1] <= progress_step_bytes(size, step), "the last part is looked at when it has arrived"
    assert max((after - before for before, after in pairwise(sizes)), default=0) <= (
        progress_step_bytes(size, step) if step else 64 << 10
    )
    assert sizes == sorted(sizes)
    assert all(there for _, there in seen)
    assert reader.reply() == 1


@given(st.binary(max_size=300), st.integers(0, 2**32), st.sampled_from(["reply", "value", "replies"]))
def test_any_bytes_at_all_end_in_a_reply_or_a_connection_error(stream: bytes, seed: int, way: str) -> None:
    memory = memoryview(bytearray([CANARY]) * 102)
    reader = ReplyReader(cut(stream, seed), step=STEP)
    try:
        for _ in range(20):
            if way == "reply":
                reader.reply()
            elif way == "value":
                reader.value([memory[1:-1]])
            else:
                reader.replies(3)
    except ConnectionError:
        pass
    assert memory[0] == memory[-1] == CANARY


KINDS = st.sampled_from(
    [b"$", b"+", b"-", b":", b"*", b"%", b"_", b"\r\n", b"$-1\r\n", b"$3\r\nabc\r\n", b"$0\r\n\r\n"]
)
NUMBERS = st.sampled_from(
    [b"0", b"-1", b"-2", b"1", b"99999999999999999999", b"1_0", b" 1", b"+1", b"0x1", b"--1", b""]
)


@given(st.lists(st.one_of(KINDS, NUMBERS, st.just(b"\r\n"), st.binary(max_size=5)), max_size=12), st.integers(0, 99))
def test_almost_replies_end_in_a_reply_or_a_connection_error(pieces: list[bytes], seed: int) -> None:
    test_any_bytes_at_all_end_in_a_reply_or_a_connection_error.hypothesis.inner_test(b"".join(pieces), seed, "value")  # pyright: ignore[reportFunctionMemberAccess]


@pytest.mark.parametrize(
    "stream",
    [
        b"$9223372036854775807\r\n",
        b"$999999999999999999\r\nabc",
        b"$-2\r\n",
        b"$99999999999999999999999\r\n",
        b"$1_000\r\n",
        b"$+5\r\nabcde\r\n",
        b"$3\r\nabcd\r\n",
        b"*1000000000\r\n",
        b"%1000000000\r\n",
        b":1\r\n",
        b"+OK\r\n",
        b"hello\r\n",
        b"\r\n",
        b"-" + b"x" * 20_000,
        b"$" + b"1" * 20_000,
        b"+" + b"x" * 20_000 + b"\r\n",
    ],
)
def test_a_hostile_value_is_refused_and_nothing_is_allocated_for_it(stream: bytes) -> None:
    target = memoryview(bytearray(100))
    reader = ReplyReader(cut(stream, 1), step=STEP)
    tracemalloc.start()
    try:
        with pytest.raises(ConnectionError):
            reader.value([target])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_a_value_where_a_line_was_asked_for_is_refused() -> None:
    for ask in (lambda reader: reader.reply(), lambda reader: reader.replies(2)):  # type: ignore[var-annotated]
        with pytest.raises(RESPProtocolError):
            ask(ReplyReader(cut(b":1\r\n$3\r\n:1\r\n\r\n"[4:], 1), step=STEP))


def test_commands_count_bytes() -> None:
    assert encode_command(b"GET", b"a") == b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", ResultCode.FULL),
        ("NOAUTH Authentication required.", ResultCode.DENIED),
        ("WRONGPASS invalid username-password pair or user is disabled.", ResultCode.DENIED),
        ("NOPERM User x has no permissions to run the 'set' command", ResultCode.DENIED),
        ("READONLY You can't write against a read only replica.", ResultCode.UNAVAILABLE),
        ("LOADING Valkey is loading the dataset in memory", ResultCode.UNAVAILABLE),
        ("CLUSTERDOWN The cluster is down", ResultCode.UNAVAILABLE),
        ("ERR max number of clients reached", ResultCode.UNAVAILABLE),
        ("ERR Protocol error: invalid bulk length", ResultCode.TOO_LARGE),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", ResultCode.CORRUPT),
        ("ERR who knows", ResultCode.INTERNAL),
        ("", ResultCode.INTERNAL),
    ],
)
def test_error_replies_have_codes(text: str, code: ResultCode) -> None:
    assert result_of_error(ErrorReply(text)) == Result(code)


def test_slots_are_the_specifications() -> None:
    assert hash_slot(b"123456789") == 0x31C3
    assert hash_slot(b"foo") == 12182
    assert hash_slot(b"") == 0


@given(st.text(max_size=60))
def test_redirects_are_read_or_refused(text: str) -> None:
    parse_redirect(text, ValkeyNode("h", 1))
    parse_redirect(f"MOVED {text}", ValkeyNode("h", 1))


def test_redirects_say_where_to_go() -> None:
    here = ValkeyNode("here", 7)
    assert parse_redirect("MOVED 3999 127.0.0.1:6381", here) == ClusterRedirect(
        "MOVED", 3999, ValkeyNode("127.0.0.1", 6381)
    )
    assert parse_redirect("ASK 0 [::1]:6381", here) == ClusterRedirect("ASK", 0, ValkeyNode("::1", 6381))
    assert parse_redirect("ASK 0 ::1:6381", here) == ClusterRedirect("ASK", 0, ValkeyNode("::1", 6381))
    assert parse_redirect("MOVED 1 :6381", here) == ClusterRedirect("MOVED", 1, ValkeyNode("here", 6381))
    for text in ("MOVED 16384 h:1", "MOVED 1 h", "MOVED 1 h:0", "MOVED 1 h:65536", "MOVED x h:1", "ERR 1 h:1", "MOVED"):
        assert parse_redirect(text, here) is None


def test_a_map_changes_slot_by_slot_or_whole() -> None:
    seed, one, other = ValkeyNode("seed", 1), ValkeyNode("one", 1), ValkeyNode("other", 1)
    topology = ClusterTopology(seed)
    assert (topology.cluster, topology.node(b"foo"), topology.known()) == (False, seed, [seed])
    topology.replace([(0, 12181, one), (12182, SLOTS + 5, other)])
    assert (topology.cluster, topology.node(b"foo"), topology.node(b"")) == (True, other, one)
    topology.moved(12182, one)
    assert topology.node(b"foo") == one
    topology.replace([(0, 10, one)])
    assert topology.node(b"foo") == seed
    assert topology.known() == [one, seed]
