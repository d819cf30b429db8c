"""Checks of proxies, by group. A check sends a request as a client, scripts the engines, and judges what crossed."""

from kvparams_conformance.checks import Check
from kvparams_conformance.proxy_checks import (
    bodies,
    documents,
    errors,
    leaving,
    native,
    responses,
    results,
    signing,
    stripping,
    tries,
)

__all__ = ["proxy_checks"]


def proxy_checks() -> list[Check]:
    """Returns every check of proxies."""
    groups = (stripping, documents, results, bodies, responses, errors, tries, leaving, signing, native)
    return [check for group in groups for check in group.CHECKS]
