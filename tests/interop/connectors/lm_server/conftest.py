"""Starts a real `lm://` server for these tests, and opens stores on it."""

from collections.abc import Iterator
from itertools import count

import pytest

from kvparams_connectors.store import KVStore, open_store
from kvparams_connectors.stores.lmcache.store import LMCacheStore
from tests.support.connectors.lmcache_server import LMCacheServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheServer]:
    """One for all: it takes seconds to start."""
    with LMCacheServer(tmp_path_factory.mktemp("lmcache")) as started:
        yield started


@pytest.fixture(scope="session")
def numbers() -> Iterator[int]:
    return count()


@pytest.fixture
def prefix(numbers: Iterator[int]) -> str:
    """Nothing can be flushed, so that every test has a place of its own."""
    return f"test-{next(numbers)}"


@pytest.fixture
def store(server: LMCacheServer, prefix: str, opened: list[KVStore]) -> LMCacheStore:
    made = open_store(f"{server.url}?prefix={prefix}")
    opened.append(made)
    assert isinstance(made, LMCacheStore)
    return made
