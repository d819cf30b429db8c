"""Loads what the settings name before the app starts: plugins, keys, modes, and libraries that are optional."""

from collections.abc import Callable, Iterable, Mapping
from secrets import randbits
from typing import TYPE_CHECKING, NamedTuple, cast

from kvparams import plugins
from kvparams.dialects.interface import Dialect
from kvparams.dialects.registry import load_tables_and_errors
from kvparams.errors import PluginError
from kvparams.instances import SchedulingPolicy
from kvparams.routing.handoff_verifier import HandoffVerifier
from kvparams.routing.model_settings import SettingsByModel
from kvparams.signing.signer import Signer
from kvparams_proxy.config.settings import Settings, known_dialects
from kvparams_proxy.config.sharing import SharingSettings
from kvparams_proxy.config.signing import ReloadingSigner
from kvparams_proxy.execution.active_modes import ActiveModes
from kvparams_proxy.requests.authentication import APIKeyAuthenticator

if TYPE_CHECKING:
    from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel
    from kvparams_proxy.telemetry.spans import RequestSpanExporter

__all__ = ["AppPlugins", "load_app_plugins"]


class AppPlugins(NamedTuple):
    """Plugins that an app loads once, however often it starts."""

    policy: type[SchedulingPolicy]
    model_policies: Mapping[str, type[SchedulingPolicy]]
    """Of models that have a policy of their own, by their names."""
    models: SettingsByModel
    """What is in force for single models; changed with the fleet file."""
    dialects: Mapping[str, Dialect]
    handoff_verifier: HandoffVerifier
    keys: APIKeyAuthenticator | None
    signing: ReloadingSigner | None
    signer: Signer | None
    """That of `signing`."""
    modes: ActiveModes
    make_span_exporter: Callable[[], "RequestSpanExporter | None"]
    make_prefix_cache: "Callable[[Callable[[], float]], PrefixCacheModel | None]"


def load_app_plugins(settings: Settings) -> AppPlugins:
    """Loads what `settings` name.

    Raises:
        PluginError, ValueError, APIKeysError, SigningKeyringError: see `create_app`.
    """
    policy = _load_policy(settings.policy)
    own = {name: _load_policy(each.policy) for name, each in settings.models.items() if each.policy is not None}
    models = SettingsByModel(settings.models)
    signing = None if settings.signing is None else ReloadingSigner(settings.signing)
    signer = None if signing is None else signing.signer
    return AppPlugins(
        policy=policy,
        model_policies=own,
        models=models,
        dialects=known_dialects(),
        handoff_verifier=HandoffVerifier(load_tables_and_errors()[0]),
        keys=None if settings.client_keys is None else APIKeyAuthenticator(settings.client_keys),
        signing=signing,
        signer=signer,
        modes=ActiveModes(settings.modes, signer, models if settings.local_id is None else None),
        make_span_exporter=_span_exporter_factory(settings.trace),
        make_prefix_cache=_prefix_cache_factory((policy, *own.values()), settings.sharing),
    )


def _load_policy(name: str) -> type[SchedulingPolicy]:
    return cast("type[SchedulingPolicy]", plugins.load_plugin("policies", name))


def _span_exporter_factory(ratio: float | None) -> Callable[[], "RequestSpanExporter | None"]:
    """Returns what makes the exporter of spans. OpenTelemetry is imported only where traces are wanted."""
    if ratio is None:
        return lambda: None
    try:
        from kvparams_proxy.telemetry.spans import RequestSpanExporter
    except ImportError as error:
        message = f"traces need OpenTelemetry ({error}): pip install 'kvparams[tracing]'"
        raise PluginError(message) from error
    return RequestSpanExporter


def _prefix_cache_factory(
    policies: Iterable[type[SchedulingPolicy]], sharing: SharingSettings | None
) -> "Callable[[Callable[[], float]], PrefixCacheModel | None]":
    """Returns what makes the model of caches. numpy is imported only where a policy looks at them."""
    if not any(getattr(policy, "uses_prefixes", False) for policy in policies):
        return lambda now: None
    try:
        from kvparams_proxy.fleet.prefix_cache_model import SHARED_BLOCK_TOKENS, PrefixCacheModel
    except ImportError as error:
        message = f"this policy needs packages that are not installed ({error}): pip install 'kvparams[proxy,index]'"
        raise PluginError(message) from error
    if sharing is not None:
        return lambda now: PrefixCacheModel(now, sharing.seed, SHARED_BLOCK_TOKENS)
    return lambda now: PrefixCacheModel(now, randbits(64))
