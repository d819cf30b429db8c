"""Tests that an attacker who writes to a store without the key gets no byte into an engine's blocks."""

from collections.abc import Callable, Iterator

import pytest
import torch
from xxhash import xxh3_64_intdigest

from kvparams.page_auth import PageAuthKeys, PageAuthMethod
from kvparams.pages import HEADER_BYTES, PageRefusalReason, seal
from kvparams.params import Isolation, KVTransferParams, Transfer
from kvparams_connectors.conformance.toy_engine import PAGE_BYTES, SPACE, block_table, make_tokens, toy_engine
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode
from kvparams_connectors.transfer.connector import KVStoreConnector, SequencePlan
from kvparams_connectors.transfer.layout import PagedKVLayout
from kvparams_connectors.transfer.reports import LoadReport
from tests.support.connectors.copying_store import in_place_and_copied

KEYS = PageAuthKeys([bytes(range(32))])
OTHERS = PageAuthKeys([bytes(range(1, 33))])
POISON = b"\x3f\x80\x00\x00"


@pytest.fixture(params=["in place", "copied"])
def store(request: pytest.FixtureRequest) -> Iterator[KVStore]:
    yield from in_place_and_copied(request.param, 8 << 20)


def params(tenant: str) -> KVTransferParams:
    return KVTransferParams(
        version="1.0",
        request_id="r",
        transfer=Transfer(id="t", attempt=1),
        phase="decode",
        mode="store",
        isolation=Isolation(cache_salt=tenant, lora=None),
    )


def save(store: KVStore, seals: PageAuthKeys | None, tenant: str = "acme") -> SequencePlan:
    with toy_engine(store, seed=1) as engine:
        connector = KVStoreConnector(store, SPACE, PagedKVLayout.from_stacked(engine.tensor), seals=seals)
        plan = connector.plan(make_tokens(24), params(tenant))
        assert connector.save(plan, block_table(1), 0, 24).result().saved == 3
        connector.close()
        return plan


def load(store: KVStore, seals: PageAuthKeys | None, tenant: str = "acme") -> tuple[LoadReport, torch.Tensor]:
    with toy_engine(store) as engine:
        connector = KVStoreConnector(store, SPACE, PagedKVLayout.from_stacked(engine.tensor), seals=seals)
        report = connector.load(connector.plan(make_tokens(24), params(tenant)), block_table(2), 0, 24).result()
        connector.close()
        return report, engine.sequence(block_table(2)).clone()


def replaced(store: KVStore, key: str, change: Callable[[bytearray], None]) -> None:
    """What whoever can write to the store can do: any bytes, under checksums that fit."""
    page = bytearray(PAGE_BYTES)
    assert store.get([GetOp(key, (memoryview(page),))]).result()[0].code is ResultCode.OK
    change(page)
    page[40:48] = xxh3_64_intdigest(bytes(page[HEADER_BYTES:])).to_bytes(8, "little")
    page[248:256] = xxh3_64_intdigest(bytes(page[:248])).to_bytes(8, "little")
    store.delete([key]).result()
    assert store.put([PutOp(key, (memoryview(page),))]).result()[0].code is ResultCode.OK


def poison(page: bytearray) -> None:
    page[HEADER_BYTES:] = POISON * ((PAGE_BYTES - HEADER_BYTES) // 4)


def poison_and_take_the_tag_off(page: bytearray) -> None:
    poison(page)
    page[8:12] = bytes(4)
    page[112:168] = bytes(56)


def poison_under_a_key_of_his_own(page: bytearray) -> None:
    poison(page)
    page[112:120] = bytes.fromhex(OTHERS.key_ids[0])


@pytest.mark.parametrize("method", ["hmac-sha256", "aes-256-gmac"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [(poison, "forged"), (poison_and_take_the_tag_off, "unsealed"), (poison_under_a_key_of_his_own, "locked")],
)
def test_a_forged_page_with_good_checksums_reaches_no_block(
    store: KVStore, change: Callable[[bytearray], None], reason: PageRefusalReason, method: PageAuthMethod
) -> None:
    keys = PageAuthKeys([bytes(range(32))], method)
    plan = save(store, keys)
    replaced(store, plan.keys[1], change)
    report, sequence = load(store, keys)
    assert (report.end_token, [page.reason for page in report.refused]) == (8, [reason])
    assert bool(sequence[:, :, :8].all())
    assert not bool(sequence[:, :, 8:].any())


def test_without_keys_the_same_forgery_is_believed(store: KVStore) -> None:
    """The control."""
    plan = save(store, None)
    replaced(store, plan.keys[1], poison)
    report, sequence = load(store, None)
    assert report.end_token == 24
    assert int(sequence[:, :, 8:16].contiguous().view(torch.uint8)[0, 0, 0, 0, 0]) == POISON[0]


@pytest.mark.parametrize(("source", "target"), [(0, 1), (2, 0)])
def test_a_page_that_is_put_in_the_place_of_another_reaches_no_block(store: KVStore, source: int, target: int) -> None:
    """The whole of a good page, with the header that the other place asks for."""
    plan = save(store, KEYS)
    stolen = bytearray(PAGE_BYTES)
    store.get([GetOp(plan.keys[source], (memoryview(stolen),))]).result()

    def move(page: bytearray) -> None:
        page[HEADER_BYTES:] = stolen[HEADER_BYTES:]
        seal(memoryview(page), plan.identity(target))
        page[8:12] = stolen[8:12]
        page[112:168] = stolen[112:168]

    replaced(store, plan.keys[target], move)
    report, _ = load(store, KEYS)
    assert (report.end_token, [page.reason for page in report.refused]) == (8 * target, ["forged"])


def test_the_page_of_another_tenant_reaches_no_block(store: KVStore) -> None:
    theirs, ours = save(store, KEYS, "other"), save(store, KEYS, "acme")
    stolen = bytearray(PAGE_BYTES)
    store.get([GetOp(theirs.keys[0], (memoryview(stolen),))]).result()

    def move(page: bytearray) -> None:
        page[HEADER_BYTES:] = stolen[HEADER_BYTES:]
        page[112:168] = stolen[112:168]

    replaced(store, ours.keys[0], move)
    assert [page.reason for page in load(store, KEYS, "acme")[0].refused] == ["forged"]
    assert load(store, KEYS, "other")[0].end_token == 24  # the control: where it belongs it is good
