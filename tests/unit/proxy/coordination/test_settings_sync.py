"""Tests shared settings: all proxies end with the same values, in whatever order they hear of them."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvparams.replication.entries import Entry, SettingChanged
from kvparams.replication.entry_codec import encode_entry
from kvparams_proxy.coordination import settings_sync
from kvparams_proxy.coordination.settings_sync import SettingsSync

_WRITES = st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.integers(0, 5) | st.none()), max_size=12)


class Copy:
    """A proxy's map, and what it was told to use."""

    def __init__(self, number: int) -> None:
        self.sent: list[Entry] = []
        self.used: dict[str, object] = {}
        self.map = SettingsSync(number, self.sent.append)
        self.map.apply = self.used.__setitem__

    def write(self, name: str, value: object) -> None:
        """Makes a change here."""
        self.used[name] = value
        self.map.write(name, value)


@given(_WRITES, st.randoms(use_true_random=False), st.booleans())
def test_all_end_with_the_same(writes: Sequence[tuple[int, str, object]], die: Random, hears: bool) -> None:
    copies = [Copy(number) for number in (1, 2, 3)]
    for number, name, value in writes:
        copies[number].write(name, value)
        if hears and die.random() < 0.5:
            for entry in copies[number].sent:
                assert isinstance(entry, SettingChanged)
                copies[(number + 1) % 3].map.apply_entry(entry)
    said = [entry for copy in copies for entry in copy.sent]
    for copy in copies:
        die.shuffle(said)
        for entry in said:
            assert isinstance(entry, SettingChanged)
            copy.map.apply_entry(entry)
    assert len({copy.map.digest for copy in copies}) == 1
    assert copies[0].used == copies[1].used == copies[2].used


def test_a_value_that_was_removed_does_not_come_back() -> None:
    a, b = Copy(1), Copy(2)
    a.write("instance/x", {"id": "x"})
    a.write("instance/x", None)
    for entry in reversed(a.sent):
        assert isinstance(entry, SettingChanged)
        b.map.apply_entry(entry)
    assert b.used == {"instance/x": None}


def test_values_have_a_limit() -> None:
    one = Copy(1)
    with pytest.raises(ValueError, match="at most"):
        one.map.write("long", "x" * (49 << 10))
    with pytest.raises(ValueError, match="too long"):
        one.map.apply_entry(SettingChanged(1, 2, "long", b'"' + b"x" * (49 << 10) + b'"'))
    with pytest.raises(ValueError, match="Expecting"):
        one.map.apply_entry(SettingChanged(1, 2, "bad", b"{"))
    assert not one.used


@pytest.mark.parametrize("revision", [2**64 - 1, 2**63, 2**40])
def test_a_revision_that_cannot_be_does_not_end_the_changes_of_the_others(revision: int) -> None:
    """No higher one would fit into a message."""
    one = Copy(1)
    with pytest.raises(ValueError, match="revision"):
        one.map.apply_entry(SettingChanged(revision, 2, "drain/x", b"true"))
    assert not one.used
    one.map.apply_entry(SettingChanged(1_000_000, 2, "drain/x", b"true"))  # the control
    one.write("drain/x", False)
    assert one.used == {"drain/x": False}
    assert all(len(encode_entry(entry)) < 100 for entry in one.sent)


def test_a_value_that_is_nested_without_end_is_not_used() -> None:
    one = Copy(1)
    with pytest.raises(ValueError, match="nested"):
        one.map.apply_entry(SettingChanged(1, 2, "x", b"[" * 40_000))
    assert not one.used


def test_names_that_come_and_go_for_ever_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_sync, "_MOST_NAMES", 10)
    one = Copy(1)
    for number in range(100):
        one.map.write(f"instance/{number}", {})
        one.map.write(f"instance/{number}", None)
    for number in range(10):
        one.map.write(f"kept/{number}", 1)
    with pytest.raises(ValueError, match="remove instances first"):
        one.map.write("more", 1)
    with pytest.raises(ValueError, match="remove instances first"):
        one.map.apply_entry(SettingChanged(1, 2, "more", b"1"))
    one.map.write("kept/0", 2)
