"""Tests entries: what is encoded is read back, and nothing else is believed."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.replication.entries import (
    AdapterUsed,
    BlocksChanged,
    BlocksHeld,
    BlocksRouted,
    EngineFailed,
    EngineLoad,
    EngineRestarted,
    Entry,
    LegDequeued,
    LegQueued,
    PrefillBegan,
    PrefillEnded,
    PrefillLoadsAdapter,
    PromptComputed,
    RoomOffered,
    SettingChanged,
    engine_key,
)
from kvparams.replication.entry_codec import MAX_ENTRY_BYTES, decode_entries, encode_entry

_U64 = st.integers(0, 2**64 - 1)
_U32 = st.integers(0, 2**32 - 2)
_FLOAT = st.floats(width=32, allow_nan=False)
_HASHES = st.lists(st.binary(min_size=8, max_size=8), max_size=20).map(b"".join)
_TEXT = st.text(max_size=40).filter(lambda text: text.isprintable() or not text)


def _pairs(count: int) -> st.SearchStrategy[tuple[bytes, bytes]]:
    return st.tuples(
        st.binary(min_size=8 * count, max_size=8 * count), st.binary(min_size=8 * count, max_size=8 * count)
    )


_ENTRIES: st.SearchStrategy[Any] = st.one_of(
    st.builds(EngineLoad, _U64, _U32, _U64),
    st.builds(PrefillBegan, _U64, _U64, _U32, _FLOAT, _FLOAT, _U32, _U32, _U32, _U64, _HASHES),
    st.builds(PromptComputed, _U64, _U32, _U32),
    st.builds(PrefillLoadsAdapter, _U64, _FLOAT),
    st.builds(AdapterUsed, _U64, _TEXT),
    st.builds(PrefillEnded, _U64, st.booleans(), st.none() | _U32, st.none() | _U32),
    st.builds(BlocksRouted, _U64, _U32, _U64, _HASHES),
    st.integers(0, 9)
    .flatmap(_pairs)
    .flatmap(lambda two: st.builds(BlocksHeld, _U64, _U32, st.integers(0, 3), st.just(two[0]), st.just(two[1]))),
    st.builds(
        BlocksChanged,
        _U64,
        st.sampled_from(["stored", "removed", "cleared"]),
        st.integers(0, 3),
        _U64,
        st.none() | _TEXT,
        _HASHES,
    ),
    st.builds(EngineFailed, _U64, st.booleans(), _TEXT),
    st.builds(EngineRestarted, _U64),
    st.builds(LegQueued, _U64, st.just("decode"), st.integers(-(2**63), 2**63 - 1), _U32, _TEXT, _TEXT),
    st.builds(LegDequeued, _U64, st.booleans()),
    st.builds(RoomOffered, _U64, _U64, _U64),
    st.builds(SettingChanged, _U64, _U64, _TEXT, st.binary(max_size=100)),
)


@given(st.lists(_ENTRIES, max_size=8))
def test_entries_are_read_back(entries: list[Entry]) -> None:
    assert list(decode_entries(b"".join(map(encode_entry, entries)))) == entries


@given(_ENTRIES, st.data())
def test_an_entry_that_is_cut_off_is_refused(entry: Entry, data: st.DataObject) -> None:
    encoded = encode_entry(entry)
    length = data.draw(st.integers(1, len(encoded) - 1))
    with pytest.raises(ValueError, match="cut off"):
        decode_entries(encoded[:length])


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        found = list(decode_entries(data))
    except ValueError:
        return
    for entry in found:
        assert encode_entry(entry)


def test_entries_of_a_later_version_are_skipped_and_longer_ones_are_read() -> None:
    unknown = bytes([200, 5, 0]) + b"later"
    load = EngineLoad(1, 2, 3)
    encoded = encode_entry(load)
    longer = encoded[:1] + (len(encoded) - 3 + 4).to_bytes(2, "little") + encoded[3:] + b"more"
    assert list(decode_entries(unknown + longer + unknown)) == [load]


def test_a_body_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="damaged"):
        decode_entries(bytes([1, 2, 0]) + b"ab")
    with pytest.raises(ValueError, match="damaged"):
        decode_entries(encode_entry(BlocksRouted(1, 0, 0, b""))[:1] + (21).to_bytes(2, "little") + bytes(21))
    with pytest.raises(ValueError, match="damaged"):
        decode_entries(bytes([8, 18, 0]) + bytes(16) + b"\xff\xff")


def test_an_entry_has_a_limit() -> None:
    encode_entry(SettingChanged(1, 1, "", bytes(MAX_ENTRY_BYTES - 18)))
    with pytest.raises(ValueError, match="at most"):
        encode_entry(SettingChanged(1, 1, "", bytes(MAX_ENTRY_BYTES - 17)))


def test_numbers_that_are_not_reported_are_not_zero() -> None:
    (found,) = decode_entries(encode_entry(PrefillEnded(1, True, None, 0)))
    assert found == PrefillEnded(1, True, None, 0)


def test_seconds_may_be_infinite_and_are_bounded_by_whoever_uses_them() -> None:
    (found,) = decode_entries(encode_entry(PrefillBegan(1, 1, 1, math.inf, 0.0, 0, 0, 0, 0, b"")))
    assert isinstance(found, PrefillBegan)
    assert found.compute_s == math.inf


def test_an_engine_is_named_by_all_that_identifies_it() -> None:
    keys = {engine_key(*parts) for parts in (("a", "b", "c"), ("a", "b", "d"), ("a", "x", "c"), ("x", "b", "c"))}
    assert len(keys) == 4
    assert engine_key("prefill-0", "http://10.0.0.1:8000", "prefill") == engine_key(
        "prefill-0", "http://10.0.0.1:8000", "prefill"
    )
