"""What every store must do, as tests that any store's author can run.

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def opener(self, tmp_path: Path) -> Iterator[Opener]: ...

The one rule: the suite knows nothing but `KVStore`; what a store can do it reads from its capabilities.
"""

from kvparams_connectors.conformance.faults import Fault, FaultyStore
from kvparams_connectors.conformance.levels import Opener, StoreConformance

__all__ = ["Fault", "FaultyStore", "Opener", "StoreConformance"]
