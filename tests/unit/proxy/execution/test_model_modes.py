"""Tests which mode coordinates the requests for a model that has modes of its own."""

from collections.abc import Collection
from dataclasses import replace

import pytest

from kvparams.errors import PluginError
from kvparams.instances import Instance, RequestFacts, Role
from kvparams.routing.managers.mode_selector import ManagerMode, ModeCondition
from kvparams.routing.model_settings import ModelSettings, SettingsByModel
from kvparams_proxy.config.settings import Settings
from kvparams_proxy.execution.active_modes import ActiveModes
from kvparams_proxy.server.app_plugins import load_app_plugins

AT = "/v1/completions"
SPLIT = ManagerMode("prefill_then_decode")
ALONE = ManagerMode("aggregated")
SHORT = ManagerMode("aggregated", ModeCondition(max_tokens=5), 1)


def facts(model: str | None, tokens: int = 10) -> RequestFacts:
    return RequestFacts("r", "t", model, 1, 1, None, None, prompt_tokens=tokens)


def name_of(modes: ActiveModes, model: str | None, tokens: int = 10) -> str | None:
    return modes.name_of(modes.select_manager(facts(model, tokens), AT, True), model)


def test_a_model_has_its_own_modes_and_others_those_for_all() -> None:
    models = SettingsByModel({"a": ModelSettings(modes=(SHORT, SPLIT)), "b": ModelSettings("random")})
    models.base_model_of = {"poems": "a"}.get
    modes = ActiveModes([ALONE], models=models)
    assert [name_of(modes, model) for model in ("a", "poems", "b", "c", None)] == [
        *["prefill_then_decode"] * 2,
        *["aggregated"] * 3,
    ]
    assert name_of(modes, "a", 5) == "aggregated"
    assert (modes.active, modes.active_for("poems")) == ((ALONE,), (SHORT, SPLIT))
    modes.replace([SPLIT], "test")  # the admin API changes what holds for all
    assert [name_of(modes, model) for model in ("b", None)] == ["prefill_then_decode"] * 2
    assert modes.active_for("a") == (SHORT, SPLIT)


def test_a_change_is_heard_and_keeps_managers_that_go_on() -> None:
    models, heard = SettingsByModel({"a": ModelSettings(modes=(SPLIT,))}), list[Collection[frozenset[Role]]]()
    modes = ActiveModes([SPLIT], models=models)
    modes.set_change_listener(heard.append)
    first = modes.select_manager(facts("a"), AT, True)
    modes.replace_models({"a": ModelSettings("random", (SPLIT,))}, "test")
    assert (len(heard), modes.switch_count) == (1, 0), "no mode has changed"
    modes.replace_models({"a": ModelSettings(modes=(SHORT, SPLIT)), "b": ModelSettings(modes=(ALONE,))}, "test")
    assert modes.select_manager(facts("a"), AT, True) is first
    modes.replace_models({}, "test")
    assert name_of(modes, "b") == "prefill_then_decode"
    split, alone = frozenset((Role.PREFILL, Role.DECODE)), frozenset((Role.AGGREGATED,))
    assert heard == [{split}, {split, alone, split | alone}, {split}]
    assert modes.switch_count == 2


def test_a_change_that_cannot_be_made_changes_nothing() -> None:
    models = SettingsByModel({"a": ModelSettings(modes=(ALONE,))})
    modes = ActiveModes([SPLIT], models=models)
    wrong = {"a": ModelSettings(modes=(SPLIT,)), "b": ModelSettings(modes=(ManagerMode("nobody"),))}
    with pytest.raises(PluginError, match="nobody"):
        modes.replace_models(wrong, "test")
    assert (name_of(modes, "a"), name_of(modes, "b")) == ("aggregated", "prefill_then_decode")
    assert set(models.entries) == {"a"}


@pytest.mark.parametrize("is_sidecar", [False, True])
def test_entries_go_before_a_flag_but_not_beside_an_engine(is_sidecar: bool) -> None:
    local = Instance("d", "1", Role.DECODE, "http://h:1", "nixl")
    settings = Settings((local,), modes=(SPLIT,), modes_are_fixed=True, models={"a": ModelSettings(modes=(ALONE,))})
    if is_sidecar:
        settings = replace(settings, local_id="d", modes=(ManagerMode("decode_local_prefill_remote"),))
    modes = load_app_plugins(settings).modes
    assert name_of(modes, "a") == ("decode_local_prefill_remote" if is_sidecar else "aggregated")
    assert name_of(modes, "b") == ("decode_local_prefill_remote" if is_sidecar else "prefill_then_decode")
