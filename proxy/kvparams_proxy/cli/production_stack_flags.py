"""Accepts the flags of vLLM production-stack's router: its command lines for disaggregated prefill work here.

Flags that are accepted have the same meaning here. Flags without meaning here are reported, and flags that cannot be
honored are refused. Source: production-stack 0.1.13, `src/vllm_router/parsers/parser.py`.
"""

import argparse
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import urlencode

from kvparams.instances import Role
from kvparams_proxy.config.discovery_url import DiscoverySource, parse_discovery_url
from kvparams_proxy.config_errors import ConfigProblems
from kvparams_proxy.fleet.registry.instance_spec import LabelSelector

__all__ = ["DEFAULT_HOST", "DEFAULT_PORT", "StaticFleet", "add_production_stack_flags", "read_production_stack_flags"]

DEFAULT_HOST: Final = "0.0.0.0"
"""Where that router listens when it is not told."""
DEFAULT_PORT: Final = 8001
MODEL_LABEL: Final = "model"
"""What its model labels are called here; its Kubernetes discovery reads the pods' label of this name."""

_K8S_NAMESPACE: Final = "default"
_K8S_PORT: Final = 8000
_ROLES: Final = (Role.PREFILL, Role.DECODE)
_DISAGGREGATED: Final = ("disaggregated_prefill", "disaggregated_prefill_orchestrated")
_MEANINGLESS: Final[Mapping[str, bool]] = {
    "static-model-types": True,
    "static-backend-health-checks": False,
    "static-backend-health-check-interval": True,
    "static-backend-health-check-timeout-seconds": True,
    "backend-health-check-timeout-seconds": True,
    "engine-stats-interval": True,
    "request-stats-window": True,
    "log-stats": False,
    "log-stats-interval": True,
}
"""Taken and not used, and whether a value follows: engines are always probed, and /metrics is always there."""


class StaticFleet(NamedTuple):
    """The static fleet described by production-stack's flags."""

    documents: tuple[Mapping[str, object], ...] = ()
    """An entry for each backend: id, url, labels."""
    selectors: Mapping[Role, LabelSelector] = {}
    kubernetes: DiscoverySource | None = None
    """Where engines are found with `--service-discovery k8s`."""
    notes: tuple[str, ...] = ()
    """What the operator should know."""


def add_production_stack_flags(parser: argparse.ArgumentParser) -> None:
    """Adds production-stack's flags to the parser."""
    group = parser.add_argument_group(
        "options of vLLM production-stack's router",
        "The router's command lines for disaggregated prefill work here unchanged. The "
        f"default address is then the router's, {DEFAULT_HOST}:{DEFAULT_PORT}.",
    )
    group.add_argument("--static-backends", metavar="URLS", help="the URLs of the engines, separated by commas")
    group.add_argument(
        "--static-models", metavar="NAMES", help="accepted and ignored, because engines are asked for their models"
    )
    group.add_argument(
        "--static-model-labels",
        metavar="LABELS",
        help=f"the label `{MODEL_LABEL}` of each engine, in the order of --static-backends",
    )
    for role in _ROLES:
        group.add_argument(
            f"--{role}-model-labels",
            metavar="LABELS",
            help=f"the values of the label `{MODEL_LABEL}` that make an engine a {role} engine",
        )
    group.add_argument("--service-discovery", metavar="KIND", help="static or k8s; k8s finds pods by their labels")
    group.add_argument(
        "--k8s-label-selector", metavar="LABELS", help="with k8s: the labels of the engines' pods, as for kubectl"
    )
    group.add_argument("--k8s-namespace", metavar="NAME", help="with k8s: the namespace of the pods (default: default)")
    group.add_argument("--k8s-port", metavar="PORT", help="with k8s: the port of the engines (default: 8000)")
    group.add_argument("--routing-logic", metavar="NAME", help=f"must be {' or '.join(_DISAGGREGATED)}")
    for name, valued in _MEANINGLESS.items():
        if valued:
            group.add_argument(f"--{name}", help=argparse.SUPPRESS)
        else:
            group.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)


def read_production_stack_flags(arguments: argparse.Namespace, problems: ConfigProblems) -> StaticFleet:
    """Converts production-stack's flags to fleet entries and selectors."""
    given: dict[str, str | bool] = {
        name.replace("_", "-"): value for name, value in vars(arguments).items() if value not in (None, False)
    }
    notes = [f"--{name} is ignored" for name in _MEANINGLESS if name in given]
    kubernetes = _kubernetes(given, problems)
    logic = given.get("routing-logic", _DISAGGREGATED[1])
    if logic not in _DISAGGREGATED:
        problems.add("--routing-logic", f"must be {' or '.join(_DISAGGREGATED)}; choose a routing policy with --policy")
    elif logic == _DISAGGREGATED[0]:
        notes.append("--routing-logic disaggregated_prefill: the engines' KV connector must be the one in --connector")
    selectors: dict[Role, LabelSelector] = {
        role: {MODEL_LABEL: frozenset(_list(f"{role}-model-labels", given, problems))}
        for role in _ROLES
        if f"{role}-model-labels" in given
    }
    urls = _list("static-backends", given, problems)
    if not urls:
        return StaticFleet((), selectors, kubernetes, tuple(notes))
    labels = _list("static-model-labels", given, problems)
    models = _list("static-models", given, problems)
    for name, values in (("static-model-labels", labels), ("static-models", models)):
        if values and len(values) != len(urls):
            problems.add(f"--{name}", f"has {len(values)} values for {len(urls)} backends in --static-backends")
    if not labels:
        problems.add(
            "--static-model-labels",
            "is missing; it says which backends are prefill engines and which are decode engines",
        )
    known = {label for selector in selectors.values() for label in selector[MODEL_LABEL]}
    documents: list[Mapping[str, object]] = []
    for number, (url, label) in enumerate(zip(urls, labels, strict=False)):
        if selectors and label not in known:
            notes.append(f"backend {number} is not used: its label {label!r} is neither prefill nor decode")
        else:
            documents.append({"id": f"static-{number}", "url": url, "labels": {MODEL_LABEL: label}})
    return StaticFleet(tuple(documents), selectors, kubernetes, tuple(notes))


def _kubernetes(given: Mapping[str, str | bool], problems: ConfigProblems) -> DiscoverySource | None:
    """Returns where pods are looked for; None with static discovery."""
    kind = given.get("service-discovery", "static")
    names = [f"k8s-{name}" for name in ("label-selector", "namespace", "port")]
    if kind not in ("static", "k8s"):
        hint = "; --discover dns://HOST:PORT?role=ROLE finds engines by name"
        problems.add("--service-discovery", f"must be static or k8s{hint}")
    if kind != "k8s":
        for name in names:
            if name in given:
                problems.add(f"--{name}", "is used with --service-discovery k8s")
        return None
    selector, namespace, port = (str(given.get(name, "")) for name in names)
    settings = {"selector": selector, "port": port or str(_K8S_PORT)}
    try:
        return parse_discovery_url(f"kubernetes://{namespace or _K8S_NAMESPACE}?{urlencode(settings)}")
    except ValueError as error:
        problems.add("--k8s-label-selector, --k8s-port", str(error))
        return None


def _list(name: str, given: Mapping[str, str | bool], problems: ConfigProblems) -> list[str]:
    text = given.get(name)
    if not isinstance(text, str):
        return []
    values = [value.strip() for value in text.split(",")]
    if not all(values):
        problems.add(f"--{name}", "has an empty value between two commas")
    return values
