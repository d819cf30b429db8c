"""Defines the behavior of every store, as tests that any store's author can run.

They need `pip install 'kvparams[conformance]'`.

    $ pytest -p kvparams_connectors.conformance --kvstore=my_package.my_module:factory

    def factory(folder: Path) -> KVStore:  # see `Factory`; a few MiB are enough, the store is filled many times over
        return MyStore(folder, size_bytes=8 << 20)

    factory.floors = Floors(put=0.01, get=0.01)  # if the store says how fast it is at least

The levels are classes: `-k TestBytes`, TestIntegrity, TestConcurrencyAndFaults, TestEngineOrder, TestPerformance.
connectors/STORES.md writes a store from nothing. Who has fixtures of their own subclasses instead, test_my_store.py:

    from collections.abc import Iterator
    from pathlib import Path

    import pytest

    from kvparams_connectors import KVStore
    from kvparams_connectors.conformance import Opener, StoreConformance
    from my_package import MyStore

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def opener(self, tmp_path: Path) -> Iterator[Opener]:
            opened: list[KVStore] = []

            def open_one() -> KVStore:  # empty in every test; a second one in a test is the same store, if it is shared
                opened.append(MyStore(tmp_path, size_bytes=8 << 20))
                return opened[-1]

            yield open_one
            for store in opened:
                store.close()

    $ pytest test_my_store.py

`kvparams_connectors.conformance.model` has more, for stores that promise exact eviction. The suite knows nothing but
`KVStore`; what a store can do it reads from its capabilities.
"""

try:
    import pytest
except ModuleNotFoundError as error:
    raise ImportError("the conformance suite needs pytest: pip install 'kvparams[conformance]'") from error

# A failed assertion shows what was expected and what came, as in a test's own file; said before they are imported.
for _module in ("levels", "concurrency", "integrity", "faults_level", "engine_order", "performance", "steps"):
    pytest.register_assert_rewrite(f"{__name__}.{_module}")

from kvparams_connectors.conformance.faults import Fault, FaultyStore, Operation  # noqa: E402
from kvparams_connectors.conformance.helpers import Floors, Opener  # noqa: E402
from kvparams_connectors.conformance.levels import StoreConformance  # noqa: E402
from kvparams_connectors.conformance.plugin import (  # noqa: E402
    Factory,
    pytest_addoption,
    pytest_configure,
    pytest_terminal_summary,
)

__all__ = [
    "Factory",
    "Fault",
    "FaultyStore",
    "Floors",
    "Opener",
    "Operation",
    "StoreConformance",
    "pytest_addoption",
    "pytest_configure",
    "pytest_terminal_summary",
]
