"""Runs a few checks of the profile `store-proxy` on a program that is no proxy."""

import asyncio

from kvparams_conformance.checks import CheckResult, select_checks
from kvparams_conformance.proxy_checks import proxy_checks
from kvparams_conformance.runner import run_proxy_checks
from kvparams_conformance.site import Under

__all__ = ["judged"]


def judged(under: Under, only: tuple[str, ...]) -> list[CheckResult]:
    """Returns the verdicts of some checks."""
    return asyncio.run(run_proxy_checks(select_checks(proxy_checks(), ("store-proxy",), only), under, lanes=1))
