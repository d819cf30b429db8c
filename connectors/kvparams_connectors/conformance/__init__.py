"""What every store must do, as tests that any store's author can run. They need `pip install 'kvparams[conformance]'`.

test_my_store.py:

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

A few MiB are enough: the store is filled many times over. `kvparams_connectors.conformance.model` has more, for stores
that promise exact eviction. The one rule: the suite knows nothing but `KVStore`; what a store can do it reads from its
capabilities.
"""

try:
    import pytest
except ModuleNotFoundError as error:
    raise ImportError("the conformance suite needs pytest: pip install 'kvparams[conformance]'") from error

# A failed assertion shows what was expected and what came, as in a test's own file; said before it is imported.
pytest.register_assert_rewrite(f"{__name__}.levels")

from kvparams_connectors.conformance.faults import Fault, FaultyStore  # noqa: E402
from kvparams_connectors.conformance.levels import Opener, StoreConformance  # noqa: E402

__all__ = ["Fault", "FaultyStore", "Opener", "StoreConformance"]
