"""Runs the conformance suite on the store of LMCache's multi-process server.

LMCache's interpreter runs it, from test_lmcache_mp.py. Where the store promises less than the suite asks, the test here
states what it promises instead.
"""

from collections.abc import Iterator
from itertools import count
from typing import Final

import pytest

from kvparams_connectors.conformance import Opener, StoreConformance
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode, open_store
from tests.support.connectors.lmcache_mp_server import MPServer

DEADLINE_S: Final = 20.0
NAMES: Final = count()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MPServer]:
    """One for all: each test has a prefix of its own and finds it empty. Room for 36 values."""
    with MPServer(tmp_path_factory.mktemp("server"), pool_bytes=36 * ((1 << 20) + 4096) + 8192) as started:
        yield started


class TestMPStore(StoreConformance):
    @pytest.fixture
    def opener(self, server: MPServer) -> Iterator[Opener]:  # pyright: ignore[reportIncompatibleMethodOverride]
        server.clear()
        url = server.url(prefix=f"t{next(NAMES)}")
        opened: list[KVStore] = []

        def open_one() -> KVStore:
            opened.append(open_store(url))
            return opened[-1]

        yield open_one
        for store in opened:
            store.close()

    @pytest.mark.parametrize("use", ["exists", "get"])
    def test_of_a_sequence_of_pages_the_tail_is_evicted_before_the_head(self, store: KVStore, use: str) -> None:
        """Each value takes a whole chunk, so it takes many to fill the server; it evicts in the order in which its
        threads happened to end sessions. What was used last stays, and what stays is whole."""
        content = [memoryview(bytearray([number]) * 1000) for number in range(45)]
        keys = [f"page-{number}" for number in range(45)]
        for key, one in zip(keys, content, strict=True):
            assert store.put([PutOp(key, (one,))], DEADLINE_S).result()[0].code is ResultCode.OK
            if use == "exists":
                store.exists(keys[:2], DEADLINE_S).result()
            else:
                store.get([GetOp(used, (memoryview(bytearray(1000)),)) for used in keys[:2]], DEADLINE_S).result()
        targets = [memoryview(bytearray(1000)) for _ in keys]
        ops = [GetOp(key, (target,)) for key, target in zip(keys, targets, strict=True)]
        results = store.get(ops, DEADLINE_S).result()
        for one, target, result in zip(content, targets, results, strict=True):
            assert result.code is ResultCode.MISS or (result.code is ResultCode.OK and target == one)
        assert [result.code for result in (*results[:2], *results[-5:])] == [ResultCode.OK] * 7
        assert ResultCode.MISS in {result.code for result in results}
