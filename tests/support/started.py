"""Provides fixtures for tests that start servers as processes; a conftest.py imports them by name."""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from demo.client import new_client
from demo.processes import Processes

__all__ = ["client", "processes", "store_url"]


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Starts servers; stops them at the end of the session."""
    with Processes(tmp_path_factory.mktemp("logs")) as group:
        yield group


@pytest.fixture(scope="session")
def store_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file store that all engines of the session may share."""
    return f"file://{tmp_path_factory.mktemp('store')}/kv?size=256MiB"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client."""
    async with new_client() as found:
        yield found
