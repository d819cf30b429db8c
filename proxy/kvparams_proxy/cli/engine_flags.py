"""Reads the flags that name engines, such as `--prefill` and `--encode`, and what belongs to one of them."""

import argparse
from collections.abc import Sequence
from typing import Final, cast

from kvparams.dialects.ec import EC_NAME
from kvparams.instances import Role
from kvparams.settings_model import did_you_mean
from kvparams_proxy.cli.production_stack_flags import StaticFleet
from kvparams_proxy.config.spec_fields import check_id, check_ranks, check_url
from kvparams_proxy.config.spec_parsing import check_bootstrap_allowed, default_store, parse_specs
from kvparams_proxy.config_errors import ConfigProblems
from kvparams_proxy.fleet.registry.instance_spec import InstanceSpec, RankRange, SpecRules, specs_by_rank

__all__ = ["engine_specs"]

_RANKS: Final = "?ranks="


def engine_specs(
    arguments: argparse.Namespace, static: StaticFleet, rules: SpecRules, problems: ConfigProblems
) -> tuple[InstanceSpec, ...]:
    """Returns the instances for the engines that flags name. What is wrong is added to `problems`."""
    entries: list[InstanceSpec] = []
    prefill: list[str] = []
    bootstraps = _bootstraps(arguments, rules, problems)
    for role in Role:
        connector = EC_NAME if role is Role.ENCODE else rules.connector
        for number, text in enumerate(cast("Sequence[str]", getattr(arguments, role.value))):
            name, equals, url = text.partition("=")
            if not equals or "://" in name:
                name, url = f"{role}-{number}", text
            bootstrap = None
            if role is Role.PREFILL:
                prefill.append(name)
                bootstrap = bootstraps.pop(name, None)
            try:
                url, mark, ranks = url.partition(_RANKS)
                entry = InstanceSpec(
                    check_id(name),
                    check_url(url),
                    role,
                    connector,
                    bootstrap=bootstrap,
                    addresses=rules.addresses,
                    store=default_store(connector, rules),
                )
                entries += specs_by_rank(entry, _parse_ranks(ranks) if mark else None)
            except ValueError as error:
                problems.add(f"--{role} number {number + 1}", f"[NAME=]URL {error}")
    for name in bootstraps:
        nearest = did_you_mean(name, prefill).rstrip()
        hint = f"; {nearest}" if nearest else ""
        problems.add("--bootstrap", f"there is no --prefill engine with the name {name[:64]!r}{hint}")
    for document in static.documents:
        entries += parse_specs(document, "--static-backends", rules, problems)
    return tuple(entries)


def _bootstraps(arguments: argparse.Namespace, rules: SpecRules, problems: ConfigProblems) -> dict[str, str]:
    """Parses the bootstrap server URLs given by flags, keyed by engine name."""
    found: dict[str, str] = {}
    for text in cast("Sequence[str]", arguments.bootstrap):
        name, _, url = text.partition("=")
        try:
            found[check_id(name)] = check_url(url)
        except ValueError:
            problems.add("--bootstrap", "must be NAME=http://host:port, where NAME is the name of a --prefill engine")
    if found:
        try:
            check_bootstrap_allowed(Role.PREFILL, rules.connector, rules)
        except ValueError as error:
            problems.add("--bootstrap", str(error))
    return found


def _parse_ranks(text: str) -> RankRange:
    """Parses what stands behind `?ranks=`.

    Raises:
        ValueError: with the reason in words.
    """
    try:
        return check_ranks(text)
    except ValueError as error:
        raise ValueError(f"?ranks= {error}") from None
