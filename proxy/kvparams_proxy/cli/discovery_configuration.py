"""Makes the providers of engines that `--discover` and production-stack's flags name."""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import cast

from kvparams_proxy.cli.production_stack_flags import StaticFleet
from kvparams_proxy.config.discovery_url import DiscoverySource, DNSSource, KubernetesSource, parse_discovery_url
from kvparams_proxy.config_errors import ConfigError, ConfigProblems
from kvparams_proxy.discovery.dns_provider import DNSProvider
from kvparams_proxy.discovery.inference_pool import InferencePoolProvider
from kvparams_proxy.discovery.kubernetes_api import KubernetesAPI
from kvparams_proxy.discovery.kubernetes_provider import KubernetesProvider
from kvparams_proxy.fleet.registry.instance_spec import SpecRules
from kvparams_proxy.fleet.registry.providers import InstanceProvider

__all__ = ["discovery_providers"]


def discovery_providers(
    arguments: argparse.Namespace, static: StaticFleet, rules: SpecRules, problems: ConfigProblems
) -> tuple[InstanceProvider, ...]:
    """Returns the providers. Blocks: credentials are read."""
    sources: list[tuple[str, DiscoverySource]] = []
    for text in cast("Sequence[str]", arguments.discover):
        try:
            sources.append((f"--discover {text}", parse_discovery_url(text)))
        except ValueError as error:
            problems.add("--discover", str(error))
    if static.kubernetes is not None:
        sources.append(("--service-discovery k8s", static.kubernetes))
    providers: list[InstanceProvider] = []
    for where, source in sources:
        try:
            providers.append(_provider(source, rules))
        except ConfigError as error:
            for problem in error.problems:
                problems.add(where, problem)
    return tuple(providers)


def _provider(source: DiscoverySource, rules: SpecRules) -> InstanceProvider:
    if isinstance(source, DNSSource):
        return DNSProvider(source, rules)
    if source.pool is not None:
        pools = KubernetesAPI("inferencepools", "", source.namespace)
        return InferencePoolProvider(source.pool, pools, partial(_pods, source.namespace, rules))
    return KubernetesProvider(source, KubernetesAPI(source.resource, source.selector, source.namespace), rules)


def _pods(namespace: str | None, rules: SpecRules, pods: KubernetesSource, name: str) -> KubernetesProvider:
    """Returns a provider of the pods of a pool."""
    return KubernetesProvider(pods, KubernetesAPI(pods.resource, pods.selector, namespace), rules, name)
