"""Tests what the picker says of its engines when it starts."""

import pytest

from kvparams.instances import Role
from kvparams_proxy.cli.picker_command import engine_notes
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec, RankRange, specs_by_rank

_BOTH = (Role.DECODE, Role.PREFILL)


def entries(role: Role, ranks: int | None) -> tuple[InstanceSpec, ...]:
    spec = InstanceSpec(f"{role}-0", "http://h:1", role, "nixl")
    return specs_by_rank(spec, None if ranks is None else RankRange(ranks))


@pytest.mark.parametrize(("prefill", "decode", "is_said"), [(None, 2, True), (2, None, False), (None, None, False)])
def test_ranks_behind_a_sidecar_are_not_supported(prefill: int | None, decode: int | None, is_said: bool) -> None:
    notes = engine_notes(_BOTH, [*entries(Role.PREFILL, prefill), *entries(Role.DECODE, decode)])
    assert any("sidecars pass on no rank" in note for note in notes) is is_said


def test_ranks_without_sidecars_are_supported() -> None:
    assert engine_notes((Role.AGGREGATED,), entries(Role.AGGREGATED, 2)) == []


def test_a_missing_role_is_named() -> None:
    (note,) = engine_notes(_BOTH, entries(Role.DECODE, None))
    assert note.startswith("no prefill engine is given")
