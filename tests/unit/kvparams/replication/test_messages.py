"""Tests the envelope of messages: only who has the site's key is believed, and only for a while."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.replication.messages import (
    MAX_AGE_S,
    MAX_MESSAGE_BYTES,
    AuthenticationError,
    MessageAuthenticator,
    MessageError,
    MessageKind,
    sender_of,
)

_NOW = 1_800_000_000.0
_OLD, _NEW = b"o" * 32, b"n" * 32


def _sealed(payload: bytes = b"payload", site: str = "a", secret: bytes = _OLD, now: float = _NOW) -> bytes:
    return MessageAuthenticator(site, [secret]).seal(MessageKind.ENTRIES, 7, 0, 3, now, payload)


@given(st.binary(max_size=200), st.integers(1, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_message_is_read_back(payload: bytes, sender: int, receiver: int, sequence: int) -> None:
    both = MessageAuthenticator("a", [_OLD])
    sealed = both.seal(MessageKind.SNAPSHOT, sender, receiver, sequence, _NOW, payload)
    message = both.open(sealed, _NOW)
    assert (message.kind, message.sender, message.receiver, message.sequence) == (4, sender, receiver, sequence)
    assert (bytes(message.payload), message.sent_s) == (payload, _NOW)
    assert sender_of(sealed) == sender


def test_every_changed_bit_is_noticed() -> None:
    sealed = _sealed()
    reader = MessageAuthenticator("a", [_OLD])
    assert reader.open(sealed, _NOW).sender == 7
    for bit in range(8 * len(sealed)):
        damaged = bytearray(sealed)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MessageError):
            reader.open(bytes(damaged), _NOW)


@given(st.binary(max_size=400))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        MessageAuthenticator("a", [_OLD]).open(data, _NOW)


def test_another_key_or_site_is_not_believed() -> None:
    with pytest.raises(AuthenticationError):
        MessageAuthenticator("a", [_NEW]).open(_sealed(), _NOW)
    with pytest.raises(AuthenticationError):
        MessageAuthenticator("b", [_OLD]).open(_sealed(), _NOW)


def test_a_key_is_changed_without_losing_a_message() -> None:
    before, between, after = (MessageAuthenticator("a", keys) for keys in ([_OLD], [_NEW, _OLD], [_NEW]))
    assert between.open(_sealed(), _NOW).sender == 7
    newer = between.seal(MessageKind.ENTRIES, 7, 0, 3, _NOW, b"")
    assert after.open(newer, _NOW).sender == 7
    with pytest.raises(AuthenticationError):
        before.open(newer, _NOW)
    before.use_secrets([_NEW, _OLD])
    assert before.open(newer, _NOW).sender == 7
    before.use_secrets([])  # a file that is being written: the keys stay
    assert before.open(newer, _NOW).sender == 7


@pytest.mark.parametrize("late_s", [MAX_AGE_S + 1, -MAX_AGE_S - 1])
def test_a_message_of_another_time_is_refused(late_s: float) -> None:
    reader = MessageAuthenticator("a", [_OLD])
    assert reader.open(_sealed(), _NOW + 0.9 * late_s).sender == 7
    with pytest.raises(MessageError, match="ago"):
        reader.open(_sealed(), _NOW + late_s)


def test_a_message_has_a_limit() -> None:
    _sealed(bytes(MAX_MESSAGE_BYTES - 54))
    with pytest.raises(MessageError, match="at most"):
        _sealed(bytes(MAX_MESSAGE_BYTES - 53))
    with pytest.raises(MessageError, match="no message"):
        MessageAuthenticator("a", [_OLD]).open(bytes(MAX_MESSAGE_BYTES + 1), _NOW)


def test_there_is_a_key() -> None:
    with pytest.raises(ValueError, match="at least one key"):
        MessageAuthenticator("a", [])
    assert sender_of(b"short") is None
