"""Checks that the number of settings does not grow, and that every setting of an engine or a store is described."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from runpy import run_path
from typing import Final, cast

import pytest

from kvparams.settings_model import SettingsModel
from kvparams_connectors.engines.engine_settings import EngineSettings
from kvparams_connectors.store_settings import StoreSettings
from kvparams_connectors.store_url import redact_url
from kvparams_proxy.config.mode_parsing import ConditionEntry, ModeEntry
from kvparams_proxy.config.options import ProxyOptions
from kvparams_proxy.config.spec_fields import EngineTLSFiles
from kvparams_proxy.config.spec_parsing import InstanceEntry

_FOUND: Final = run_path(str(Path(__file__).parents[2] / "docs" / "_generate.py"))
ENGINES: Final = cast("Mapping[str, type[EngineSettings]]", _FOUND["ENGINES"])
STORES: Final = cast("Mapping[str, type[StoreSettings]]", _FOUND["STORES"])
"""The models that the reference documentation is made from."""
MOST: Final = 137
"""Whoever adds a setting takes another one away, or says here why not.

The last seven: `log-level` and `log-format`, which every log has; `takeover`, the place that two processes have in
common; `startup-check`, for engines whose time is too precious for a request that nobody has asked for; the token of
viewers, which is not that of admins; `model-alias`, since nothing else names models; `ranks`, which no engine tells.
"""
FLEET: Final = (ProxyOptions, InstanceEntry, EngineTLSFiles, ModeEntry, ConditionEntry)
SECRET: Final = {"user", "password_file", "secret_file", "ca", "cert", "key", "local", "devices", "metadata", "peers"}
"""Settings of stores whose values no message shows: names of people, files and machines."""


def models() -> list[type[SettingsModel]]:
    """Every model. `valkeys` has all settings of `valkey`."""
    return [*FLEET, *ENGINES.values(), *(model for scheme, model in STORES.items() if scheme != "valkey")]


def test_the_number_of_settings_does_not_grow() -> None:
    counts = {model.__name__: len(model.setting_names()) for model in models()}
    assert sum(counts.values()) <= MOST, counts


def test_every_store_has_a_model() -> None:
    assert set(STORES) == {found.name for found in entry_points(group="kvparams.stores")}


@pytest.mark.parametrize(
    "model", [model for model in models() if model not in FLEET[2:]], ids=lambda model: model.__name__
)
def test_every_setting_of_an_engine_and_a_store_is_described(model: type[SettingsModel]) -> None:
    """Of modes and the files of TLS, docs/modes.md and docs/security.md say more than a line."""
    assert [name for name, field in model.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("scheme", STORES)
def test_messages_show_the_value_of_a_setting_unless_it_is_a_secret(scheme: str) -> None:
    model = STORES[scheme]
    tiers = {"l1", "l2", "l3", "l4"}
    for name in set(model.setting_names()) - tiers:
        assert redact_url(f"{scheme}:?{name}=v") == f"{scheme}:?{name}={'...' if name in SECRET else 'v'}"
