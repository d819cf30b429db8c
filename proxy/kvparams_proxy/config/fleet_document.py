"""The fleet file, from its text to a set of instances: what stands in it, checked.

    proxy: {port: 8100, ...}                   # settings, as the flags of the same names; read at the start only
    roles: {prefill: {model: [p1, p2]}, ...}   # labels by which an instance without a role finds it
    defaults: {connector: nixl, ...}           # what holds for instances that do not say otherwise
    modes: [{use: prefill_then_decode}, ...]   # how requests are coordinated, and which of them how
    models: {llama: {policy: least_load}, ...} # what holds for single models
    instances: [{id: p0, url: "http://10.0.0.1:8000", role: prefill}, ...]

Reading blocks, see `kvparams_proxy.config.yaml_reader`: a running proxy does it in a thread.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final, cast

from pydantic import Field, PlainValidator, ValidationError, ValidationInfo, field_validator
from pydantic_core import InitErrorDetails

from kvparams.routing.managers.mode_selector import ManagerMode
from kvparams.routing.model_settings import ModelSettings
from kvparams.settings_model import SettingsModel, error_at, placed_errors
from kvparams_proxy.config.mode_parsing import Modes
from kvparams_proxy.config.model_parsing import parse_models
from kvparams_proxy.config.options import ProxyOptions
from kvparams_proxy.config.spec_fields import rules_of
from kvparams_proxy.config.spec_parsing import DefaultsSection, InstanceEntry, RolesSection
from kvparams_proxy.config.yaml_reader import read_yaml
from kvparams_proxy.config_errors import ConfigProblems
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec, SpecRules

__all__ = ["MAX_INSTANCES", "FleetDocument", "FleetFile", "parse_fleet_document"]

MAX_INSTANCES: Final = 4096
"""Of one source."""
_MAX_ERRORS: Final = 1000
"""With more of them, further instances are not looked at."""


def _check_instances(value: object, info: ValidationInfo) -> tuple[InstanceSpec, ...]:
    """Returns the instances; ids, and URLs within a role, must be unique."""
    if not isinstance(value, list):
        raise ValueError("must be a list of objects with id, url and role")
    items = cast("list[object]", value)
    if len(items) > MAX_INSTANCES:
        raise ValueError(f"has {len(items)} entries; at most {MAX_INSTANCES} are accepted")
    rules = _rules_with(info.data, rules_of(info))
    roles_are_known = {"roles", "defaults"} <= info.data.keys()  # one that is wrong is not there
    specs: list[InstanceSpec] = []
    errors: list[InitErrorDetails] = []
    seen: dict[object, int] = {}
    for number, item in enumerate(items):
        if len(errors) > _MAX_ERRORS:
            break
        id = cast("dict[str, object]", item).get("id") if isinstance(item, dict) else None
        if isinstance(id, str) and (first := seen.setdefault(id, number)) != number:
            errors.append(error_at((number, "id"), f"{id[:128]!r} is already the id of instances[{first}]"))
        try:
            ranks = InstanceEntry.model_validate(item, context=rules).to_specs(rules)
        except ValidationError as error:
            found = placed_errors(error, number)
            # Labels find no role where `roles` or `defaults` is wrong; that is said already.
            guessed = not roles_are_known and isinstance(item, dict) and "role" not in item
            errors += [one for one in found if not (guessed and one.get("loc") == (number, "role"))]
            continue
        specs += ranks
        if len(specs) > MAX_INSTANCES:
            errors.append(error_at((number, "ranks"), f"there are more than {MAX_INSTANCES} instances with all ranks"))
            break
        spec = ranks[0]
        if spec.rank is not None:
            errors += _collisions(ranks, number, seen)
        if (first := seen.setdefault((spec.role, spec.url), number)) != number:
            errors.append(
                error_at((number, "url"), f"instances[{first}] is the same {spec.role} engine; remove one of them")
            )
    if errors:
        raise ValidationError.from_exception_data("instances", errors)
    return tuple(specs)


def _collisions(ranks: tuple[InstanceSpec, ...], number: int, seen: dict[object, int]) -> list[InitErrorDetails]:
    """Returns an error for each rank whose id is another instance's. `seen` has the entries by id; ranks are added."""
    found = ((spec.id, seen.setdefault(spec.id, number)) for spec in ranks)
    return [
        error_at((number, "ranks"), f"a rank would be called {id[:128]!r}, which is already the id of instances[{at}]")
        for id, at in found
        if at != number
    ]


def _rules_with(sections: Mapping[str, Any], rules: SpecRules) -> SpecRules:
    """Returns the rules with what `roles` and `defaults` say. Selectors that flags give take precedence."""
    roles, defaults = sections.get("roles"), sections.get("defaults")
    if isinstance(roles, RolesSection):
        rules = replace(rules, selectors={**roles.selectors(), **rules.selectors})
    return defaults.apply_to(rules) if isinstance(defaults, DefaultsSection) else rules


def _check_models(value: object, info: ValidationInfo) -> dict[str, ModelSettings]:
    """Returns what is set for single models. Aliases that a flag gives take precedence over those in the file."""
    proxy, given = info.data.get("proxy"), rules_of(info).model_aliases
    aliases = proxy.model_alias if given is None and isinstance(proxy, ProxyOptions) else given
    return parse_models(value, aliases or {})


class FleetFile(SettingsModel):
    """The sections of the file. Each may be left out, or left empty."""

    null_is_absent: ClassVar[bool] = True

    proxy: Annotated[
        ProxyOptions,
        Field(description="the options of the groups below, by their names without dashes; read only at the start"),
    ] = ProxyOptions()
    roles: Annotated[
        RolesSection,
        Field(description="for each role, the labels that give the role to an instance without `role`"),
    ] = RolesSection()
    defaults: Annotated[
        DefaultsSection, Field(description="members for every instance that does not set them itself")
    ] = DefaultsSection()
    modes: Annotated[
        Modes | None,
        Field(
            description="a list of `{use, when, priority, options}`: how requests are coordinated; "
            "see [modes](modes.md)"
        ),
    ] = None
    models: Annotated[dict[str, ModelSettings], PlainValidator(_check_models)] = Field(
        default_factory=dict[str, ModelSettings],
        description="an object with an entry for each model for which something else holds; see the table below",
    )
    instances: Annotated[
        tuple[InstanceSpec, ...],
        PlainValidator(_check_instances),
        Field(description="a list of engines; see the next table"),
    ] = ()

    @field_validator("modes")
    @classmethod
    def _check_one_mode(cls, modes: object, info: ValidationInfo) -> object:
        proxy = info.data.get("proxy")
        if proxy is not None and proxy.mode is not None:
            raise ValueError("excludes proxy.mode; give only one of them")
        return modes


@dataclass(frozen=True, slots=True)
class FleetDocument:
    """The parsed content of the fleet file."""

    settings: ProxyOptions
    rules: SpecRules
    """By which its entries were read, and others will be."""
    entries: tuple[InstanceSpec, ...]
    modes: tuple[ManagerMode, ...] = ()
    """Empty where it says nothing of them."""
    models: Mapping[str, ModelSettings] = field(default_factory=dict[str, ModelSettings])
    """What holds for single models."""


def parse_fleet_document(text: str, rules: SpecRules) -> FleetDocument:
    """Reads the text of a fleet file.

    Args:
        text: all of it.
        rules: what was said outside of it; selectors there go before those in the file.

    Raises:
        ConfigError: with everything that is wrong, each with its line.
    """
    value, lines = read_yaml(text)
    problems = ConfigProblems()
    try:
        file = FleetFile.model_validate(value, context=rules)
    except ValidationError as error:
        problems.add_errors(error, lines=lines)
        problems.raise_if_any()
        raise  # never: there was a problem
    sections = {"roles": file.roles, "defaults": file.defaults}
    return FleetDocument(file.proxy, _rules_with(sections, rules), file.instances, file.modes or (), file.models)
