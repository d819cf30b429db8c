"""Provides the proxy's own fixtures, so that the fuzz tests reach the edge of a running proxy."""

from tests.support.proxy.fixtures import proxy, pytest_asyncio_loop_factories, scripted, stack

__all__ = ["direct", "proxy", "pytest_asyncio_loop_factories", "scripted", "stack"]

import pytest


@pytest.fixture
def direct() -> bool:
    """The way that is used in production."""
    return True
