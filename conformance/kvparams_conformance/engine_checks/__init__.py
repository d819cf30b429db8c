"""Checks of engines: documents are sent to them, and their answers are judged."""

from kvparams_conformance.checks import Check
from kvparams_conformance.engine_checks import legs, refusals, signatures

__all__ = ["engine_checks"]


def engine_checks() -> list[Check]:
    """Returns every check of engines."""
    return [check for group in (legs, refusals, signatures) for check in group.CHECKS]
