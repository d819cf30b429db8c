"""Finds LMCache in an environment of its own, which `make install-lmcache` creates.

A test fails where that environment is missing. It is never skipped.
"""

import pytest

from tests.support.lmcache_process import ROOT, LMCacheError, lmcache_environment, lmcache_python

__all__ = ["ROOT", "environment", "python"]


def python() -> str:
    """The interpreter that has LMCache 0.5.6 and this project."""
    try:
        return lmcache_python()
    except LMCacheError as error:
        pytest.fail(str(error), pytrace=False)


def environment() -> dict[str, str]:
    """The environment for its processes: no telemetry, no banner."""
    return lmcache_environment()
