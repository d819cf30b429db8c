"""Tests which of what is set for single models holds for a request, and for an engine."""

from kvparams.instances import Role
from kvparams.routing.admission import RoleLimits
from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams.routing.model_settings import ModelSettings, SettingsByModel, with_policies_of

ALONE = (ManagerMode("aggregated"),)
SPLIT = (ManagerMode("prefill_then_decode"),)


def limited(requests: int | None = None, tokens: int | None = None) -> ModelSettings:
    return ModelSettings(limits={Role.PREFILL: RoleLimits(requests, tokens)})


def test_a_model_has_its_own_entry_an_adapter_its_base_models_and_others_none() -> None:
    models = SettingsByModel({"a": ModelSettings("least_load"), "a-poems": ModelSettings("random")})
    models.base_model_of = {"a-poems": "a", "a-prose": "a", "b-prose": "b"}.get
    names = {model: models.entry_name(model) for model in ("a", "a-poems", "a-prose", "b", "b-prose", "", None)}
    assert names == {"a": "a", "a-poems": "a-poems", "a-prose": "a", "b": None, "b-prose": None, "": None, None: None}
    assert models.find("a-prose").policy == "least_load"
    assert models.find("b") == models.find(None) == ModelSettings()


def test_adapters_and_entries_may_change() -> None:
    models, bases = SettingsByModel({"a": ModelSettings("least_load")}), {"poems": "b"}
    models.base_model_of = bases.get
    assert models.entry_name("poems") is None
    bases["poems"] = "a"
    models.forget_adapters()
    assert models.entry_name("poems") == "a"
    models.replace({"b": ModelSettings("random")})
    assert models.entry_name("poems") is models.entry_name("a") is None
    assert models.entry_name("b") == "b"


def test_invented_models_do_not_fill_the_memory() -> None:
    asked: list[str] = []
    models = SettingsByModel({"a": ModelSettings("least_load")})
    models.base_model_of = asked.append
    for _ in range(2):
        models.entry_name("known")
    assert asked == ["known"]
    for number in range(1024):
        models.entry_name(f"invented-{number}")
    models.entry_name("known")
    assert asked.count("known") == 2, "it was forgotten"


def test_what_an_entry_leaves_out_is_as_for_all() -> None:
    usual = ModelSettings("round_robin", SPLIT, {Role.PREFILL: RoleLimits(4, 100), Role.DECODE: RoleLimits(9)})
    assert ModelSettings().with_defaults(usual) == usual
    entry = ModelSettings("least_load", ALONE, {Role.PREFILL: RoleLimits(8), Role.AGGREGATED: RoleLimits(1)})
    found = entry.with_defaults(usual)
    assert (found.policy, found.modes) == ("least_load", ALONE)
    assert found.limits == {
        Role.PREFILL: RoleLimits(8, 100),
        Role.DECODE: RoleLimits(9),
        Role.AGGREGATED: RoleLimits(1),
    }


def test_an_engine_has_the_lowest_limits_of_its_models() -> None:
    usual = RoleLimits(4, 1000)
    models = SettingsByModel({"a": limited(8), "b": limited(6, 500), "c": ModelSettings("random")})
    for served, wanted in (
        (None, None),
        ((), None),
        (("c", "d"), None),
        (("a",), RoleLimits(8, 1000)),
        (("a", "d"), RoleLimits(8, 1000)),
        (("a", "b"), RoleLimits(6, 500)),
        (("a", "c"), RoleLimits(8, 1000)),  # an entry without a limit sets none
    ):
        assert models.limits_of(Role.PREFILL, served, usual) == wanted
    assert models.limits_of(Role.DECODE, ("a", "b"), usual) is None
    assert models.limits_of(Role.PREFILL, ("b",), RoleLimits()) == RoleLimits(6, 500)


def test_policies_are_those_of_the_start() -> None:
    started = {"a": ModelSettings("least_load", ALONE), "b": ModelSettings("random"), "c": limited(1)}
    wanted = {"a": ModelSettings("random", SPLIT), "c": limited(2), "d": ModelSettings("random", ALONE)}
    assert with_policies_of(wanted, started) == {
        "a": ModelSettings("least_load", SPLIT),
        "b": ModelSettings("random"),
        "c": limited(2),
        "d": ModelSettings(None, ALONE),
    }
