"""Tests a deadline that passes while a load writes blocks: reported blocks are written, and no other is."""

import queue
import threading
from collections.abc import Sequence

import pytest
import torch

from kvparams_connectors.conformance.faults import FaultyStore
from kvparams_connectors.conformance.toy_engine import SPACE, WAIT_S, block_table, save_sequence, toy_engine
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import ResultCode
from kvparams_connectors.stores.memory.store import MemoryStore
from kvparams_connectors.transfer.block_copier import HostBlockCopier, PageCopy
from kvparams_connectors.transfer.connector import ConnectorSettings, KVStoreConnector
from kvparams_connectors.transfer.devices import DeviceEvent
from kvparams_connectors.transfer.layout import PagedKVLayout
from kvparams_connectors.transfer.reports import LoadReport


class OvertakenMover(HostBlockCopier):
    """While it writes the second page, the deadline of the load passes."""

    def __init__(self, layout: PagedKVLayout) -> None:
        super().__init__(layout, payload_bytes=8 << 20)  # one page at a time
        self.loads: queue.Queue[Job[LoadReport]] = queue.Queue()
        self.writes = 0

    def scatter(self, block_ids: Sequence[int], copies: Sequence[PageCopy], fence: DeviceEvent | None) -> None:
        super().scatter(block_ids, copies, fence)
        self._written()

    def scatter_verified(
        self, block_ids: Sequence[int], copies: Sequence[PageCopy], checksums: Sequence[int | None]
    ) -> int:
        written = super().scatter_verified(block_ids, copies, checksums)
        self._written()
        return written

    def _written(self) -> None:
        self.writes += 1
        if self.writes == 2:
            load = self.loads.get(timeout=WAIT_S)
            threading.Event().wait(load.remaining_s() + 0.01)


@pytest.mark.parametrize("in_place", [True, False])
def test_the_pages_behind_the_one_that_was_written_at_the_deadline_are_not_written(in_place: bool) -> None:
    """All eight pages are there, whole and verified, when the deadline passes; six of them are too late."""
    memory = MemoryStore(4 << 20, unit_bytes=4096)
    store = memory if in_place else FaultyStore(memory, lambda _operation, _key: None)
    plan, wanted = save_sequence(store, 64)
    with toy_engine(store) as engine:
        layout = PagedKVLayout.from_stacked(engine.tensor)
        mover = OvertakenMover(layout)
        connector = KVStoreConnector(store, SPACE, layout, ConnectorSettings(deadline_s=1.0), mover=mover)
        load = connector.load(plan, block_table(2), 0, 64)
        mover.loads.put(load)
        report = load.result()
        assert report.failure is ResultCode.TIMEOUT
        assert load.wait_settled(WAIT_S)
        assert (report.end_token, report.pages, mover.writes) == (16, 2, 2)
        assert torch.equal(engine.sequence(block_table(2))[:, :, :16], wanted[:, :, :16])
        assert int((engine.tensor != 0).sum()) == wanted[:, :, :16].numel()
        connector.close()
    store.close()
    memory.close()
