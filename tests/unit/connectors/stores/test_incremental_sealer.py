"""Tests that a page sealed during a transfer has the bytes of one sealed at once, and delays no other page."""

import socket
import threading
import time
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvparams.keys import KVShard
from kvparams.pages import HEADER_BYTES, PageIdentity, seal, verify
from kvparams_connectors.conformance.toy_engine import WAIT_S
from kvparams_connectors.stores.deadline_socket import DeadlineSocket
from kvparams_connectors.transfer.incremental_sealer import IncrementalSealer
from tests.support.waiting import wait_until

STEP = 128 << 10


def page_of(payload_bytes: int) -> tuple[memoryview, PageIdentity]:
    page = memoryview(bytearray(HEADER_BYTES + payload_bytes))
    page[HEADER_BYTES:] = Random(payload_bytes).randbytes(payload_bytes)
    return page, PageIdentity(b"n" * 32, b"c" * 32, 8, KVShard(0, 1, 0, 1), payload_bytes)


@given(st.sampled_from([1, STEP - HEADER_BYTES, STEP - 1, STEP, STEP + 1, 3 * STEP, 1_000_000]), st.integers(0, 12))
def test_a_page_is_sealed_the_same_in_however_many_steps(payload_bytes: int, steps: int) -> None:
    page, identity = page_of(payload_bytes)
    wanted = memoryview(bytearray(page))
    seal(wanted, identity)
    departure = IncrementalSealer(page, lambda checksum: seal(page, identity, payload_checksum=checksum))
    more = [departure.advance() for _ in range(steps)]
    needed = -(-payload_bytes // STEP)
    assert more == [step + 1 < needed for step in range(steps)]
    assert page[:HEADER_BYTES] == bytes(HEADER_BYTES), "the header is written in the end"
    departure.finish()
    assert page == wanted
    assert verify(page, identity) is None


def test_a_payload_that_changes_after_it_was_looked_at_is_refused_by_who_reads_it() -> None:
    """The control: what was hashed before is not looked at again, so that a change is seen, not covered up."""
    page, identity = page_of(2 * STEP)
    departure = IncrementalSealer(page, lambda checksum: seal(page, identity, payload_checksum=checksum))
    assert departure.advance()
    page[HEADER_BYTES] ^= 1
    departure.finish()
    refusal = verify(page, identity)
    assert refusal is not None
    assert refusal.reason == "flipped_payload"


@pytest.mark.parametrize("steps", [0, 1])
def test_a_page_that_was_released_is_not_sealed(steps: int) -> None:
    page, identity = page_of(2 * STEP)
    departure = IncrementalSealer(page, lambda checksum: seal(page, identity, payload_checksum=checksum))
    for _ in range(steps):
        departure.advance()
    page.release()
    for act in (departure.finish, departure.advance):
        with pytest.raises(ValueError, match="released"):
            act()


@given(
    st.lists(st.integers(0, 300_000), min_size=1, max_size=8),
    st.integers(0, 20),
    st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_what_is_sent_arrives_whatever_is_done_meanwhile(sizes: list[int], work: int, seed: int) -> None:
    """Through a socket that takes little at a time, to somebody who takes as much as he likes."""
    random = Random(seed)
    parts = [random.randbytes(size) for size in sizes]
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    stream, left = DeadlineSocket(ours), [work]
    received = bytearray()

    def receive() -> None:
        while data := theirs.recv(random.choice([1, 100, 5_000, 1 << 20])):
            received.extend(data)

    def meanwhile() -> bool:
        left[0] -= 1
        return left[0] > 0

    with theirs:
        receiver = threading.Thread(target=receive)
        receiver.start()
        stream.set_deadline(time.monotonic() + WAIT_S)
        stream.send_parts(parts, meanwhile)
        stream.close()
        receiver.join(WAIT_S)
    assert bytes(received) == b"".join(parts)


def test_what_is_done_while_nobody_receives_does_not_move_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    stream, called = DeadlineSocket(ours), 0

    def meanwhile() -> bool:
        nonlocal called
        called += 1
        return True

    with theirs:
        begun = time.monotonic()
        stream.set_deadline(begun + 0.2)
        with pytest.raises(TimeoutError):
            stream.send_parts([bytes(16 << 20)], meanwhile)
        assert 0.15 < time.monotonic() - begun < WAIT_S
        assert called > 1
        stream.close()


def test_a_stream_that_has_nothing_left_to_do_waits_and_sends_all() -> None:
    ours, theirs = socket.socketpair()
    stream, calls, sent = DeadlineSocket(ours), list[bool](), Random(1).randbytes(4 << 20)
    received = bytearray()

    def meanwhile() -> bool:
        calls.append(len(calls) < 2)
        return calls[-1]

    def receive() -> None:
        while len(received) < len(sent):
            received.extend(theirs.recv(1 << 20))

    with theirs:
        stream.set_deadline(time.monotonic() + WAIT_S)
        stream.send_parts([sent[:100]], meanwhile)
        assert calls == [], "nothing was waited for"
        theirs.settimeout(WAIT_S)
        sender = threading.Thread(target=stream.send_parts, args=([sent[100:]], meanwhile))
        sender.start()
        wait_until(lambda: len(calls) == 3)
        receive()
        sender.join(WAIT_S)
        assert received == sent
        assert calls == [True, True, False]
        stream.close()
