"""Tests models of settings: an error names the path and the fault, and suggests the name that was probably meant."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from kvparams.settings_model import (
    Allowed,
    SettingsModel,
    check_setting,
    describe_setting_error,
    error_at,
    find_setting_errors,
    join_path,
    must_be_one_of,
    placed_errors,
)

Port = Annotated[int, Field(ge=1, le=9), Allowed("a port from 1 to 9")]


class Inner(SettingsModel):
    names_elsewhere: ClassVar[Mapping[str, str]] = {"name": "is not known here: it belongs outside"}

    port: Port = 3
    ports: Annotated[list[Port], Allowed("a list of ports")] | None = None


class Outer(SettingsModel):
    entries: list[Inner] = Field(default_factory=list[Inner])
    max_size: int = Field(default=1, alias="max-size")
    name: str


def problems(given: object, model: type[SettingsModel] = Outer) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(given)
    return [f"{join_path(one['loc'])}: {describe_setting_error(one)}" for one in find_setting_errors(caught.value)]


def test_everything_wrong_is_said_at_once_with_its_path() -> None:
    assert problems({"entries": [{"port": 10}, {"prot": 1, "ports": [2, "x"]}, 5, {"name": "x"}], "max_size": 2}) == [
        "entries[0].port: must be a port from 1 to 9",
        "entries[1].ports[1]: must be a port from 1 to 9",
        "entries[1].prot: is not known here; did you mean port? known: port, ports",
        "entries[2]: must be an object with port, ports",
        "entries[3].name: is not known here: it belongs outside",
        "name: is missing",
        "max_size: is not known here; did you mean max-size? known: entries, max-size, name",
    ]


@pytest.mark.parametrize("value", [True, "3", 3.0, None, [3]])
def test_nothing_is_converted_and_a_null_is_no_value(value: object) -> None:
    assert problems({"port": value}, Inner) == ["port: must be a port from 1 to 9"]


def test_a_model_may_take_a_null_for_a_member_that_is_left_out() -> None:
    class Lenient(Inner):
        null_is_absent: ClassVar[bool] = True

    assert Lenient.model_validate({"port": None}) == Lenient()
    assert not Lenient.model_validate({"port": None}).model_fields_set
    assert problems({"prot": None}, Lenient) == ["prot: is not known here; did you mean port? known: port, ports"]


def test_very_many_members_are_refused_before_one_is_looked_at() -> None:
    assert problems({str(number): 1 for number in range(257)}) == [": must have at most 256 members"]


def test_no_message_repeats_a_value() -> None:
    given = {"entries": [{"port": "hunter2", "ports": "hunter2"}], "name": ["hunter2"], "max-size": "hunter2"}
    assert len(problems(given)) == 4
    assert "hunter2" not in str(problems(given))


def test_a_name_that_is_not_one_is_answered_with_the_nearest() -> None:
    assert must_be_one_of("nixl", ["nixl", "store"]) == "nixl"
    with pytest.raises(ValueError, match=r"^must be one of nixl, store; did you mean nixl\?$"):
        must_be_one_of("NIXL", ["nixl", "store"])
    with pytest.raises(ValueError, match=r"^must be one of nixl, store$"):
        must_be_one_of(["nixl"], ["nixl", "store"])


def test_single_values_are_checked_by_the_same_types() -> None:
    adapter = TypeAdapter[int](Port)
    assert check_setting(adapter, 9) == 9
    with pytest.raises(ValueError, match=r"^must be a port from 1 to 9$"):
        check_setting(adapter, 10)


def test_errors_may_be_put_into_a_larger_value() -> None:
    with pytest.raises(ValidationError) as caught:
        Inner.model_validate({"prot": 1})
    errors = [*placed_errors(caught.value, 4), error_at((5, "port"), "is the same")]
    found = find_setting_errors(ValidationError.from_exception_data("list", errors))
    assert [join_path(one["loc"]) for one in found] == ["[4].prot", "[5].port"]
    assert [describe_setting_error(one).split(";")[0] for one in found] == ["is not known here", "is the same"]
