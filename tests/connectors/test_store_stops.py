"""Every store whose server is killed in the middle of batches, or stopped for long: what it costs, and afterwards.

The one rule: whatever was read is compared, and no call takes longer than its deadline and a moment.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from kvparams_connectors.store import Code, GetOp, KVStore, open_store
from tests.connectors.lmcache_server import LMCacheServer
from tests.connectors.mooncake_cluster import Cluster
from tests.connectors.peer_process import PeerProcess
from tests.connectors.steps import SIZE, get, in_thread, put
from tests.connectors.valkey_server import ValkeyServer, wait_until

DEADLINE_S: Final = 0.5
MOST_S: Final = 1.5
LOST: Final = {Code.UNAVAILABLE, Code.TIMEOUT}
BACK_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """A store, and what of it can be stopped."""

    store: KVStore
    stop: Callable[[], None]
    go_on: Callable[[], None]
    lost: frozenset[Code] = frozenset(LOST)
    """What a call says meanwhile."""
    writes: bool = True
    """Whether puts go to what is stopped."""


def opened(kind: str, folder: Path, stack: ExitStack) -> Case:
    """Start it; it ends with `stack`."""

    def use(url: str) -> KVStore:
        return stack.enter_context(_Closing(url)).store

    if kind == "valkey":
        valkey = stack.enter_context(ValkeyServer(folder / "server"))
        return Case(use(f"{valkey.url}?threads=2"), valkey.stop, valkey.go_on)
    if kind == "lmcache":
        lm = stack.enter_context(LMCacheServer(folder / "server"))
        return Case(use(f"{lm.url}?threads=2"), lm.stop, lm.go_on)
    if kind == "peer":
        owner = stack.enter_context(PeerProcess("peer://127.0.0.1?size=16MiB&lease=0"))
        store = use("peer://127.0.0.1:0?size=16MiB")
        assert owner.put(range(3), SIZE) == ["OK"] * 3
        store.locate([f"key-{number}" for number in range(3)], owner.address)
        return Case(store, owner.stop, owner.go_on, frozenset({Code.MISS}), writes=False)
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
    if case.writes:
        assert put(case.store, range(3)) == [Code.OK] * 3
    assert get(case.store, range(3)) == [Code.OK] * 3  # the control
    stopped_s = effort(5, 40)
    longest, seen = 0.0, dict.fromkeys(Code, 0)
    case.stop()
    try:
        until = time.monotonic() + stopped_s
        while time.monotonic() < until:
            start = time.monotonic()
            codes = get_in_time(case.store, DEADLINE_S)
            longest = max(longest, time.monotonic() - start)
            for code in codes:
                seen[code] += 1
            if longest < DEADLINE_S:  # refused at once: no reason to ask as fast as can be
                time.sleep(0.02)
    finally:
        case.go_on()
    said = {code.value: count for code, count in seen.items() if count}
    record({"stopped_s": stopped_s, "deadline_s": DEADLINE_S, "longest_wait_s": round(longest, 3), "said": said})
    assert longest < MOST_S
    assert {code for code, count in seen.items() if count} <= case.lost
    if case.writes:  # what was stored may have been forgotten; the store works
        wait_until(lambda: put(case.store, range(10, 11), 5.0)[0] in (Code.OK, Code.EXISTS), BACK_S, pause_s=0.2)
        wait_until(lambda: get(case.store, range(10, 11)) == [Code.OK], BACK_S, pause_s=0.2)
    else:
        wait_until(lambda: get(case.store, range(3)) == [Code.OK] * 3, BACK_S, pause_s=0.2)


def get_in_time(store: KVStore, deadline_s: float) -> list[Code]:
    """`get` into buffers that belong to the store until it has let go of them, which may be long after."""
    targets = [memoryview(bytearray(SIZE)) for _ in range(3)]
    ops = [GetOp(f"key-{number}", (target,)) for number, target in enumerate(targets)]
    return [result.code for result in store.get(ops, deadline_s).result()]


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
    store = stack.enter_context(_Closing(f"{url}?threads=2")).store
    seen: set[Code] = set()
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
            wait_until(lambda: Code.OK in seen)
            server.kill()
            wait_until(lambda: bool(seen & LOST))
            server.start()
            seen.clear()
        wait_until(lambda: Code.OK in seen)
    finally:
        over.set()
        for thread in threads:
            thread.join(BACK_S)
    record({"kills": kills, "batches": batches[0], "wrong": len(failures)})
    assert failures == []
    assert seen <= {Code.OK, Code.EXISTS, Code.MISS, *LOST}
    assert put(store, range(3, 4)) in ([Code.OK], [Code.EXISTS])
