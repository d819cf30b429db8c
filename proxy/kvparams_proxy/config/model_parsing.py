"""Models of what is set for single models: the section `models` of the fleet file.

models:
  org/model-8b: {policy: least_load, prefill-requests: 8}
  org/model-70b: {modes: [{use: aggregated}]}
"""

import json
from collections.abc import Mapping
from typing import Annotated, Final, cast

from pydantic import ConfigDict, Field, ValidationError
from pydantic_core import InitErrorDetails
from xxhash import xxh3_64_hexdigest

from kvparams.instances import Role
from kvparams.routing.admission import RoleLimits
from kvparams.routing.model_settings import ModelSettings
from kvparams.settings_model import SettingsModel, error_at, placed_errors
from kvparams_proxy.config.mode_parsing import Modes, mode_document
from kvparams_proxy.config.option_types import Count, Policy

__all__ = ["ModelEntry", "mark_of_models", "model_document", "parse_models"]

_MOST: Final = 1024
_MOST_CHARS: Final = 1024
_NAME: Final = f"a model's name must be printable text of 1 to {_MOST_CHARS} characters"


def _requests(role: Role) -> str:
    return f"the largest number of requests that run on one {role} engine of this model; others wait in the proxy"


class ModelEntry(SettingsModel):
    """Holds what is set for one model. Its members have the names of the options for all models."""

    model_config = ConfigDict(alias_generator=lambda name: name.replace("_", "-"))

    policy: Annotated[
        Policy | None, Field(description="how the proxy chooses an engine for a request; read only at the start")
    ] = None
    modes: Annotated[
        Modes | None, Field(description="how requests are coordinated, as in the section `modes`; sidecars ignore it")
    ] = None
    prefill_requests: Annotated[Count | None, Field(description=_requests(Role.PREFILL))] = None
    decode_requests: Annotated[Count | None, Field(description=_requests(Role.DECODE))] = None
    aggregated_requests: Annotated[Count | None, Field(description=_requests(Role.AGGREGATED))] = None

    def to_settings(self) -> ModelSettings:
        """Returns the settings."""
        limits = {
            Role.PREFILL: self.prefill_requests,
            Role.DECODE: self.decode_requests,
            Role.AGGREGATED: self.aggregated_requests,
        }
        given = {role: RoleLimits(requests) for role, requests in limits.items() if requests is not None}
        return ModelSettings(self.policy, self.modes or (), given)


def parse_models(value: object, aliases: Mapping[str, str]) -> dict[str, ModelSettings]:
    """Parses the section.

    Args:
        value: the section, as it was read.
        aliases: further names of models, which have no entries.

    Raises:
        ValueError: it cannot be used; a `ValidationError` with everything that is wrong with entries.
    """
    if not isinstance(value, dict):
        raise ValueError("must be an object with an entry for each model: NAME: {policy: ...}")
    entries = cast("dict[str, object]", value)
    if len(entries) > _MOST:
        raise ValueError(f"has {len(entries)} entries; at most {_MOST} are accepted")
    found: dict[str, ModelSettings] = {}
    errors: list[InitErrorDetails] = []
    for name, entry in entries.items():
        if not (0 < len(name) <= _MOST_CHARS and name.isprintable()):
            errors.append(error_at((name,), _NAME))
        elif name in aliases:
            words = f"is an alias of {aliases[name][:128]!r}; name the model that engines serve"
            errors.append(error_at((name,), words))
        else:
            try:
                found[name] = ModelEntry.model_validate(entry).to_settings()
            except ValidationError as error:
                errors += placed_errors(error, name)
    if errors:
        raise ValidationError.from_exception_data("models", errors)
    return found


def model_document(settings: ModelSettings) -> dict[str, object]:
    """Returns an entry as it would be written. Limits in tokens are left out: a file has none."""
    said: dict[str, object] = {} if settings.policy is None else {"policy": settings.policy}
    if settings.modes:
        said["modes"] = [mode_document(mode) for mode in settings.modes]
    for role, limits in settings.limits.items():
        if limits.requests is not None:
            said[f"{role}-requests"] = limits.requests
    return said


def mark_of_models(models: Mapping[str, ModelSettings]) -> str:
    """Returns a text that tells proxies apart for which other things hold; empty if nothing is set for any model."""
    written = {name: model_document(each) for name, each in models.items()}
    return xxh3_64_hexdigest(json.dumps(written, sort_keys=True, default=repr).encode()) if written else ""
