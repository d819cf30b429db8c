"""Tests every store whose server is killed in the middle of batches, or stopped for long, and its recovery.

Every value that was read is compared, and no call takes longer than its deadline and a moment.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from kvparams_connectors.store import KVStore, ResultCode, open_store
from tests.support.connectors.lmcache_server import LMCacheServer
from tests.support.connectors.mooncake_cluster import Cluster
from tests.support.connectors.peer_process import PeerProcess
from tests.support.connectors.steps import SIZE, get, in_thread, put
from tests.support.connectors.stopping import LOST, Case, stopped_for_long
from tests.support.connectors.valkey_server import ValkeyServer
from tests.support.waiting import wait_until

BACK_S: Final = 60.0


def opened(kind: str, folder: Path, stack: ExitStack) -> Case:
    """Start it; it ends with `stack`."""

    def use(url: str) -> KVStore:
        return stack.enter_context(_Closing(url)).store

    if kind == "valkey":
        valkey = stack.enter_context(ValkeyServer(folder / "server"))
        return Case(use(f"{valkey.url}?threads=2"), valkey.stop, valkey.go_on)
    if kind == "lmcache":
        lm = stack.enter_context(LMCacheServer(folder / "server"))
        return Case(use(lm.url), lm.stop, lm.go_on)
    if kind == "peer":
        owner = stack.enter_context(PeerProcess("peer://127.0.0.1?size=16MiB&lease=0"))
        store = use("peer://127.0.0.1:0?size=16MiB")
        assert owner.put(range(3), SIZE) == ["OK"] * 3
        store.hint_location([f"key-{number}" for number in range(3)], owner.address)
        return Case(store, owner.stop, owner.go_on, frozenset({ResultCode.MISS}), writes=False)
    cluster = stack.enter_context(Cluster(folder, "64MiB"))
    process = cluster.master if kind == "mooncake-master" else cluster.owners[0]
    return Case(use(cluster.url()), process.stop, lambda: process.send(signal.SIGCONT))


class _Closing:
    def __init__(self, url: str) -> None:
        self.store = open_store(url)

    def __enter__(self) -> "_Closing":
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["valkey", "lmcache", "peer", "mooncake-master", "mooncake-owner"])
def test_a_server_that_is_stopped_for_long_costs_no_more_than_deadlines(
    kind: str,
    tmp_path: Path,
    stack: ExitStack,
    effort: Callable[[int, int], int],
    record: Callable[[dict[str, object]], None],
) -> None:
    case = opened(kind, tmp_path, stack)
    stopped_for_long(case, effort(5, 40), record)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["valkey", "valkey-unix", "lmcache"])
def test_a_server_may_be_killed_in_the_middle_of_batches(
    kind: str,
    tmp_path: Path,
    stack: ExitStack,
    effort: Callable[[int, int], int],
    record: Callable[[dict[str, object]], None],
) -> None:
    server = LMCacheServer(tmp_path / "server") if kind == "lmcache" else ValkeyServer(tmp_path / "server")
    stack.enter_context(server)
    url = server.unix_url if kind == "valkey-unix" and isinstance(server, ValkeyServer) else server.url
    store = stack.enter_context(_Closing(url)).store
    seen: set[ResultCode] = set()
    batches = [0]
    over = threading.Event()
    failures: list[AssertionError] = []

    def work() -> None:
        try:
            while not over.is_set():
                seen.update(put(store, range(30)))
                seen.update(get(store, range(30)))
                batches[0] += 2
        except AssertionError as error:
            failures.append(error)

    kills = effort(2, 10) if kind == "lmcache" else effort(4, 100)
    threads = [in_thread(work) for _ in range(2)]
    try:
        for _ in range(kills):
            wait_until(lambda: ResultCode.OK in seen)
            server.kill()
            wait_until(lambda: bool(seen & LOST))
            server.start()
            seen.clear()
        wait_until(lambda: ResultCode.OK in seen)
    finally:
        over.set()
        for thread in threads:
            thread.join(BACK_S)
    record({"kills": kills, "batches": batches[0], "wrong": len(failures)})
    assert failures == []
    assert seen <= {ResultCode.OK, ResultCode.EXISTS, ResultCode.MISS, *LOST}
    assert put(store, range(3, 4)) in ([ResultCode.OK], [ResultCode.EXISTS])
