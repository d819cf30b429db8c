"""Provides the fixtures that the tests of stores and connectors share."""

from collections.abc import Iterator

import pytest

from kvparams_connectors.store import KVStore


@pytest.fixture
def opened() -> Iterator[list[KVStore]]:
    """Stores that the test puts here are closed when it is over."""
    stores: list[KVStore] = []
    yield stores
    for store in stores:
        store.close()
