"""Tests that a page is verified when its store reports its arrival, and that the store answers for that report."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kvparams.pages import HEADER_BYTES
from kvparams_connectors.conformance import Fault, FaultyStore
from kvparams_connectors.conformance.faults import Operation
from kvparams_connectors.conformance.toy_engine import WAIT_S, block_table, save_sequence, toy_engine
from kvparams_connectors.hashed_copy import CopyPairs
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode
from kvparams_connectors.stores.file.store import FileStore
from kvparams_connectors.stores.memory.store import MemoryStore
from kvparams_connectors.stores.tiered.store import TieredStore
from kvparams_connectors.stores.value_copy import read_values

BIT = 8 * (HEADER_BYTES + 40)


def faulty(opened: list[KVStore], fault: Fault) -> FaultyStore:
    """Memory that reads wrongly."""
    memory = MemoryStore(4 << 20, unit_bytes=4096)

    def judge(operation: Operation, _: str) -> Fault | None:
        return fault if operation == "get" else None

    store = FaultyStore(memory, judge)
    opened += [store, memory]
    return store


@pytest.mark.parametrize("careless", [False, True], ids=["as-it-is", "control-passed-on"])
@pytest.mark.parametrize(
    "first", [Fault("fail", announced=True), Fault("flip", at=BIT, announced=True)], ids=["fails", "changes"]
)
def test_a_tier_that_announces_a_page_does_not_vouch_for_other_bytes(
    opened: list[KVStore], monkeypatch: pytest.MonkeyPatch, first: Fault, *, careless: bool
) -> None:
    """The first tier announces a good page; what lies in the slot in the end is damaged, by itself or by the next."""
    if careless:
        monkeypatch.setattr("kvparams_connectors.stores.tiered.reader._unannounced", list)
    tiers = [faulty(opened, first), faulty(opened, Fault("flip", at=BIT))]
    store = TieredStore(tiers, promote=False)
    opened.insert(0, store)
    plan, wanted = save_sequence(store, 20)
    with toy_engine(store) as engine:
        report = engine.connector.load(plan, block_table(2), 0, 20).result()
        got = engine.sequence(block_table(2))
        if careless:
            assert (report.end_token, report.refused) == (20, ())
            assert not torch.equal(got[:, :, :20], wanted)
        else:
            assert report.end_token == 0
            assert [page.reason for page in report.refused] == ["flipped_payload"]
            assert not got.any()


@pytest.mark.parametrize("announced", [True, False])
def test_a_page_that_came_whole_and_is_said_to_be_shorter_is_torn(opened: list[KVStore], announced: bool) -> None:
    """It was good when it arrived; the result is of another size, so it is looked at again."""
    store = faulty(opened, Fault("truncate", at=300, announced=announced))
    plan, _ = save_sequence(store, 20)
    with toy_engine(store) as engine:
        report = engine.connector.load(plan, block_table(2), 0, 20).result()
        assert report.end_token == 0
        assert [page.reason for page in report.refused] == ["torn"]
        assert not engine.tensor.any()


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("overtaken", [True, False])
def test_a_value_that_was_overwritten_while_it_was_read_from_a_file_has_not_arrived(
    opened: list[KVStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overtaken: bool, hashed: bool
) -> None:
    """Another process deletes it when the bytes have been copied, and they may be another value's by then."""
    store, other = (FileStore(tmp_path / "store", 1 << 20, unit_bytes=4096) for _ in range(2))
    opened += [store, other]
    content = bytes(range(100))
    assert store.put([PutOp("key", (memoryview(content),))], WAIT_S).result() == [Result(ResultCode.OK, 100)]

    def read(ops: Sequence[GetOp], places: Sequence[CopyPairs]) -> list[int | None]:
        checksums = read_values(ops, places)
        if overtaken:
            assert other.delete(["key"], WAIT_S).result() == [Result(ResultCode.OK)]
        return checksums

    monkeypatch.setattr("kvparams_connectors.stores.file.values.read_values", read)
    arrived: list[int] = []
    target = (memoryview(bytearray(100)),)
    if hashed:
        op = GetOp("key", target, on_checksum=lambda nbytes, _: arrived.append(nbytes))
    else:
        op = GetOp("key", target, arrived.append)
    results = store.get([op], WAIT_S).result()
    assert (results, arrived) == (
        ([Result(ResultCode.MISS)], []) if overtaken else ([Result(ResultCode.OK, 100)], [100])
    )
