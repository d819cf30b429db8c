"""Checks the entries for single models against what engines serve: a part of `--check`."""

from collections.abc import Iterator, Mapping

from kvparams.routing.model_settings import ModelSettings
from kvparams.settings_model import did_you_mean
from kvparams_proxy.checks.engine_check import CheckFinding
from kvparams_proxy.config.settings import Settings

__all__ = ["check_models"]


def check_models(settings: Settings, served: Mapping[str, tuple[str, ...]]) -> Iterator[CheckFinding]:
    """Yields what holds for each model with an entry, and a warning if no engine serves it.

    `served`: the models of each engine that answers, by its id.
    """
    known = sorted({model for models in served.values() for model in models})
    for name, entry in settings.models.items():
        engines = [id for id, models in served.items() if name in models]
        if engines:
            holds = _describe(entry.with_defaults(settings.for_all_models), settings)
            yield CheckFinding("ok", f"models.{name}", f"is served by {', '.join(engines)}; {holds}")
        else:
            said = f"no engine that answers serves this model; {did_you_mean(name, known)}served: {', '.join(known)}"
            yield CheckFinding("warning", f"models.{name}", said)


def _describe(found: ModelSettings, settings: Settings) -> str:
    modes = settings.modes if settings.local_id is not None else found.modes
    limits = [
        f"{role}-requests {limits.requests}" for role, limits in found.limits.items() if limits.requests is not None
    ]
    return ", ".join([f"policy {found.policy}", f"modes {' and '.join(mode.use for mode in modes)}", *limits])
