"""Tests the objectives that flags name."""

import pytest

from kvparams_proxy.picker.objectives import StaticObjectives, parse_objectives


def test_flags_name_priorities() -> None:
    found = StaticObjectives(parse_objectives(["batch=-1", "chat=5"]))
    assert [found.priority(name) for name in ("batch", "chat", "other")] == [-1, 5, None]


@pytest.mark.parametrize("flag", ["", "x", "x=", "=1", "x=y", "x=1.5", "x=9999999999"])
def test_other_forms_are_refused(flag: str) -> None:
    with pytest.raises(ValueError, match="NAME=PRIORITY"):
        parse_objectives([flag])
