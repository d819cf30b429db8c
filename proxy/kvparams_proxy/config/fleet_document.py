"""The fleet file, from its text to a set of instances: what stands in it, checked.

    proxy: {port: 8100, ...}                   # settings, as the flags of the same names; read at the start only
    roles: {prefill: {model: [p1, p2]}, ...}   # labels by which an instance without a role finds it
    defaults: {connector: nixl, ...}           # what holds for instances that do not say otherwise
    modes: [{use: prefill_then_decode}, ...]   # how requests are coordinated, and which of them how
    instances: [{id: p0, url: "http://10.0.0.1:8000", role: prefill}, ...]

Reading blocks, see `kvparams_proxy.config.yaml_reader`: a running proxy does it in a thread.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, cast

from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams_proxy.config.mode_parsing import parse_modes
from kvparams_proxy.config.spec_parsing import (
    MAX_INSTANCES,
    parse_defaults,
    parse_selectors,
    parse_spec,
    report_unknown_names,
)
from kvparams_proxy.config.yaml_reader import read_yaml
from kvparams_proxy.config_errors import ConfigProblems
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec, SpecRules

__all__ = ["CheckSettings", "FleetDocument", "parse_fleet_document"]

_SECTIONS: Final = ("proxy", "roles", "defaults", "modes", "instances")

CheckSettings = Callable[[Mapping[str, object], str, ConfigProblems], Mapping[str, object]]
"""Checks the members of `proxy`; the second argument is put before what is wrong."""


@dataclass(frozen=True, slots=True)
class FleetDocument:
    """What the file says."""

    settings: Mapping[str, object]
    rules: SpecRules
    """By which its entries were read, and others will be."""
    entries: tuple[InstanceSpec, ...]
    modes: tuple[ManagerMode, ...] = ()
    """Empty where it says nothing of them."""


def parse_fleet_document(text: str, rules: SpecRules, check_settings: CheckSettings) -> FleetDocument:
    """Reads the text of a fleet file.

    Args:
        text: all of it.
        rules: what was said outside of it; selectors there go before those in the file.
        check_settings: see the type.

    Raises:
        ConfigError: with everything that is wrong.
    """
    raw = read_yaml(text).value
    problems = ConfigProblems()
    document: Mapping[str, object] = {}
    if isinstance(raw, dict):
        document = cast("dict[str, object]", raw)
    else:
        problems.add("", f"the file must be an object with {', '.join(_SECTIONS)}")
    report_unknown_names(document, _SECTIONS, "", problems)
    settings: Mapping[str, object] = {}
    if (given := _section(document, "proxy", problems)) is not None:
        settings = check_settings(given, "proxy", problems)
    if (given := _section(document, "roles", problems)) is not None:
        rules = replace(rules, selectors={**parse_selectors(given, "roles", problems), **rules.selectors})
    if (given := _section(document, "defaults", problems)) is not None:
        rules = parse_defaults(given, "defaults", rules, problems)
    modes: tuple[ManagerMode, ...] = ()
    if (given := document.get("modes")) is not None:
        modes = parse_modes(given, "modes", problems)
        if "mode" in settings:
            problems.add("modes", "proxy.mode is given too; name one of them")
    entries = _entries(document.get("instances"), rules, problems)
    problems.raise_if_any()
    return FleetDocument(settings, rules, entries, modes)


def _section(document: Mapping[str, object], name: str, problems: ConfigProblems) -> Mapping[str, object] | None:
    """An object that may be left out, or left empty."""
    given = document.get(name)
    if given is None or isinstance(given, dict):
        return cast("dict[str, object] | None", given)
    problems.add(name, "must be an object")
    return None


def _entries(document: object, rules: SpecRules, problems: ConfigProblems) -> tuple[InstanceSpec, ...]:
    """The instances; ids, and URLs within a role, must be unique."""
    if document is None:
        return ()
    if not isinstance(document, list):
        problems.add("instances", "must be a list, each an object with id, url and role")
        return ()
    items = cast("list[object]", document)
    if len(items) > MAX_INSTANCES:
        problems.add("instances", f"{len(items)} of them; at most {MAX_INSTANCES} are accepted")
        return ()
    entries: list[InstanceSpec] = []
    seen: dict[object, int] = {}
    for number, item in enumerate(items):
        where = f"instances[{number}]"
        entry = parse_spec(item, where, rules, problems)
        if entry is None:
            continue
        entries.append(entry)
        if (first := seen.setdefault(entry.id, number)) != number:
            problems.add(f"{where}.id", f"{entry.id!r} is the id of instances[{first}] already")
        if (first := seen.setdefault((entry.role, entry.url), number)) != number:
            problems.add(f"{where}.url", f"instances[{first}] is the same {entry.role} engine already")
    return tuple(entries)
