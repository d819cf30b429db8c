"""Checks of readers: a program is asked about vectors, one at a time, and its answers are judged."""

from kvparams_conformance.checks import Check
from kvparams_conformance.reader_checks import events, streams, translation

__all__ = ["reader_checks"]


def reader_checks() -> list[Check]:
    """Returns every check of readers."""
    return [check for group in (translation, events, streams) for check in group.CHECKS]
