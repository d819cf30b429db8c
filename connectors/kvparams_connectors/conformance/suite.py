"""Defines what `pytest -p kvparams_connectors.conformance --kvstore=pkg.mod:factory` runs: one class for each level.

It says only which tests there are; `plugin.py` opens the store that was named.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvparams_connectors.conformance.engine_order import EngineOrderLevel
from kvparams_connectors.conformance.faults_level import FaultsLevel
from kvparams_connectors.conformance.helpers import ConformanceLevel, Floors, Opener
from kvparams_connectors.conformance.integrity import IntegrityLevel
from kvparams_connectors.conformance.levels import BytesLevel, ConcurrencyLevel, LimitsLevel
from kvparams_connectors.conformance.performance import PerformanceLevel
from kvparams_connectors.conformance.plugin import NamedStore, load_named_store
from kvparams_connectors.store import KVStore

__all__ = ["TestBytes", "TestConcurrencyAndFaults", "TestEngineOrder", "TestIntegrity", "TestPerformance"]


class _NamedStoreLevel(ConformanceLevel):
    """The store that the command line names."""

    @pytest.fixture
    def named(self, pytestconfig: pytest.Config) -> NamedStore:
        return load_named_store(pytestconfig)

    @pytest.fixture
    def opener(self, named: NamedStore, tmp_path: Path) -> Iterator[Opener]:  # pyright: ignore[reportIncompatibleMethodOverride]
        opened: list[KVStore] = []

        def open_one() -> KVStore:
            opened.append(named.factory(tmp_path))
            return opened[-1]

        yield open_one
        for store in opened:
            store.close()

    @pytest.fixture
    def floors(self, named: NamedStore) -> Floors:  # pyright: ignore[reportIncompatibleMethodOverride]
        return named.floors


class TestBytes(_NamedStoreLevel, BytesLevel, LimitsLevel):
    """Level 1."""


class TestIntegrity(_NamedStoreLevel, IntegrityLevel):
    """Level 2."""


class TestConcurrencyAndFaults(_NamedStoreLevel, ConcurrencyLevel, FaultsLevel):
    """Level 3."""


class TestEngineOrder(_NamedStoreLevel, EngineOrderLevel):
    """Level 4."""


class TestPerformance(_NamedStoreLevel, PerformanceLevel):
    """Level 5."""
