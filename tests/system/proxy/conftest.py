"""Provides the fixtures of the tests of the proxy."""

from tests.support.proxy.fixtures import (
    direct,
    proxy,
    pytest_asyncio_loop_factories,
    scripted,
    stack,
    stage,
    stub,
    stubbed,
)
from tests.system.proxy.encode_site import site

__all__ = ["direct", "proxy", "pytest_asyncio_loop_factories", "scripted", "site", "stack", "stage", "stub", "stubbed"]
