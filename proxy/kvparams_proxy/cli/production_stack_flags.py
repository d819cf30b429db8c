"""Accepts the flags of vLLM production-stack's router: its command line for static disaggregated prefill works here.

Flags that are accepted have the same meaning here. Flags without meaning here are reported, and flags that cannot be
honored are refused. Source: production-stack 0.1.13, `src/vllm_router/parsers/parser.py`.
"""

import argparse
from collections.abc import Mapping
from typing import Final, NamedTuple

from kvparams.instances import Role
from kvparams_proxy.config_errors import ConfigProblems
from kvparams_proxy.fleet.registry.instance_spec import LabelSelector

__all__ = ["DEFAULT_HOST", "DEFAULT_PORT", "StaticFleet", "add_production_stack_flags", "read_production_stack_flags"]

DEFAULT_HOST: Final = "0.0.0.0"
"""Where that router listens when it is not told."""
DEFAULT_PORT: Final = 8001
MODEL_LABEL: Final = "model"
"""What its model labels are called here; its Kubernetes discovery reads the pods' label of this name."""

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
    "log-level": True,
}
"""Taken and not used, and whether a value follows: engines are always probed, and /metrics is always there."""


class StaticFleet(NamedTuple):
    """The static fleet described by production-stack's flags."""

    documents: tuple[Mapping[str, object], ...] = ()
    """An entry for each backend: id, url, labels."""
    selectors: Mapping[Role, LabelSelector] = {}
    notes: tuple[str, ...] = ()
    """What the operator should know."""


def add_production_stack_flags(parser: argparse.ArgumentParser) -> None:
    """Adds production-stack's flags to the parser."""
    group = parser.add_argument_group(
        "options of vLLM production-stack's router",
        "The router's command line for disaggregated prefill with static discovery works here unchanged. The "
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
    group.add_argument("--service-discovery", metavar="KIND", help="only static")
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
    kind = given.get("service-discovery", "static")
    if kind != "static":
        problems.add(
            "--service-discovery", f"{kind!r} is not supported; give the engines with --static-backends or --config"
        )
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
        return StaticFleet((), selectors, tuple(notes))
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
    return StaticFleet(tuple(documents), selectors, tuple(notes))


def _list(name: str, given: Mapping[str, str | bool], problems: ConfigProblems) -> list[str]:
    text = given.get(name)
    if not isinstance(text, str):
        return []
    values = [value.strip() for value in text.split(",")]
    if not all(values):
        problems.add(f"--{name}", "has an empty value between two commas")
    return values
