"""The proxy's own fixtures: the edge is fed where it runs."""

from tests.support.proxy.fixtures import proxy, pytest_asyncio_loop_factories, scripted, stack

__all__ = ["direct", "proxy", "pytest_asyncio_loop_factories", "scripted", "stack"]

import pytest


@pytest.fixture
def direct() -> bool:
    """The way that is used in production."""
    return True
