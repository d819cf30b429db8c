"""Tests how entries for single models are read from the fleet file, refused, and printed again."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvparams.cli import main
from kvparams.instances import Role
from kvparams.routing.admission import RoleLimits
from kvparams.routing.managers.mode_selector import ManagerMode, ModeCondition
from kvparams.routing.model_settings import ModelSettings
from kvparams_proxy.checks.model_check import check_models
from kvparams_proxy.config.fleet_document import parse_fleet_document
from kvparams_proxy.config.model_parsing import mark_of_models
from kvparams_proxy.config.settings import Settings, default_spec_rules
from kvparams_proxy.config_errors import ConfigError
from kvparams_proxy.execution.active_modes import needed_roles

RULES = default_spec_rules()
TEXT = """\
models:
  org/model-8b:
    policy: least_load
    modes: [{use: aggregated, when: {max_tokens: 256}, priority: 1}, {use: prefill_then_decode}]
    prefill-requests: 8
  "model:70b": {decode-requests: 2, aggregated-requests: 3}
  idle: {}
instances:
  - {id: p0, url: "http://p:1", role: prefill}
  - {id: d0, url: "http://d:1", role: decode}
"""


def models(text: str) -> dict[str, ModelSettings]:
    return dict(parse_fleet_document(text, RULES).models)


def test_entries_are_read() -> None:
    assert models("models:\n") == models("instances: []") == {}
    assert models(TEXT) == {
        "org/model-8b": ModelSettings(
            "least_load",
            (ManagerMode("aggregated", ModeCondition(max_tokens=256), 1), ManagerMode("prefill_then_decode")),
            {Role.PREFILL: RoleLimits(8)},
        ),
        "model:70b": ModelSettings(limits={Role.DECODE: RoleLimits(2), Role.AGGREGATED: RoleLimits(3)}),
        "idle": ModelSettings(),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: [a]", "line 1: models: must be an object with an entry for each model"),
        ("models: {a: }", "line 1: models.a: must be an object with policy, modes, prefill-requests"),
        ("models:\n  a: {policy: least_laod}", "line 2: models.a.policy: must be one of"),
        ("models:\n  a: {policy: least_laod}", "did you mean least_load?"),
        ("models:\n  a: {polcy: random}", "models.a.polcy: is not known here; did you mean policy?"),
        ("models:\n  a:\n    modes: [{use: agregated}]", "line 3: models.a.modes[0].use: must be one of"),
        ("models:\n  a:\n    modes: [{use: agregated}]", "did you mean aggregated?"),
        ("models: {a: {modes: [{use: aggregated, when: {stream: true}}]}}", "one mode must be for all requests"),
        ("models: {a: {prefill-requests: 0}}", "models.a.prefill-requests: must be a whole number, at least 1"),
        ("models: {a: {prefill-requests: }}", "models.a.prefill-requests: must be a whole number, at least 1"),
        ("models: {a: {prefill-tokens: 5}}", "models.a.prefill-tokens: is not known here"),
        ('models: {"": {policy: random}}', "a model's name must be printable text of 1 to 1024 characters"),
        (
            "proxy: {model-alias: small=a}\nmodels:\n  small: {policy: random}",
            "line 3: models.small: is an alias of 'a'",
        ),
    ],
)
def test_what_cannot_be_used_is_said_with_its_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        models(text)
    assert said in str(refused.value)


def test_there_is_a_bound_for_entries() -> None:
    entries = "\n".join(f"  m{number}: {{policy: random}}" for number in range(1025))
    with pytest.raises(ConfigError, match="at most 1024"):
        models(f"models:\n{entries}")


def test_aliases_of_a_flag_take_the_place_of_those_in_the_file() -> None:
    text = "proxy: {model-alias: small=a}\nmodels:\n  small: {policy: random}"
    assert parse_fleet_document(text, replace(RULES, model_aliases={"tiny": "a"})).models
    with pytest.raises(ConfigError, match=r"models\.small: is an alias of 'b'"):
        parse_fleet_document(text, replace(RULES, model_aliases={"small": "b"}))


def test_an_alias_of_a_flag_is_refused_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fleet.yaml").write_text(TEXT)
    command = ["proxy", "--config", str(tmp_path / "fleet.yaml"), "--print-config"]
    assert main(command) == 0
    capsys.readouterr()
    assert main([*command, "--model-alias", "idle=org/model-8b"]) == 2
    assert "models.idle: is an alias of 'org/model-8b'; name the model that engines serve" in capsys.readouterr().err


def test_the_printed_configuration_has_the_entries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fleet.yaml").write_text(TEXT)
    assert main(["proxy", "--config", str(tmp_path / "fleet.yaml"), "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert models(printed) == models(TEXT)
    (line,) = [line for line in printed.splitlines() if "model:70b" in line]
    assert line.endswith("fleet.yaml")


def test_roles_that_only_one_model_needs_are_needed() -> None:
    settings = Settings(())
    assert needed_roles(settings) == {Role.PREFILL, Role.DECODE}
    entry = ModelSettings(modes=(ManagerMode("aggregated"),))
    assert needed_roles(replace(settings, models={"a": entry})) == set(Role) - {Role.ENCODE}


def test_the_check_says_what_holds_and_warns_of_models_that_nobody_serves() -> None:
    settings = Settings((), limits={Role.PREFILL: RoleLimits(4)}, models=models(TEXT))
    found = list(check_models(settings, {"p0": ("org/model-8b", "idle"), "d0": ("org/model-8b", "model-70b")}))
    assert [(each.grade, each.who) for each in found] == [
        ("ok", "models.org/model-8b"),
        ("warning", "models.model:70b"),
        ("ok", "models.idle"),
    ]
    served, missing, usual = (each.message for each in found)
    assert served == (
        "is served by p0, d0; policy least_load, modes aggregated and prefill_then_decode, prefill-requests 8"
    )
    assert missing.startswith("no engine that answers serves this model; did you mean model-70b? served: ")
    assert usual.endswith("policy round_robin, modes prefill_then_decode, prefill-requests 4")
    assert not list(check_models(Settings(()), {"p0": ("a",)}))


def test_marks_tell_apart_what_differs() -> None:
    marks = [mark_of_models(models(text)) for text in (TEXT, TEXT, TEXT.replace("8\n", "9\n"), "models:\n")]
    assert marks[0] == marks[1] != marks[2]
    assert marks[3] == ""
