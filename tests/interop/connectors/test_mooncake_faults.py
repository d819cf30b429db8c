"""Tests the Mooncake store while the processes behind it are killed, stopped and started again."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest

from kvparams_connectors.arena import Arena
from kvparams_connectors.store import GetOp, PutOp, ResultCode
from kvparams_connectors.stores.mooncake.store import MooncakeStore
from tests.support.connectors.mooncake_cluster import Cluster
from tests.support.connectors.steps import codes
from tests.support.waiting import wait_stays_true_for, wait_until

SIZE = 300_000
AT_ONCE_S = 0.3


def content(seed: int, size: int = SIZE) -> memoryview:
    return memoryview(bytearray((seed * 31 + number * 7) % 251 for number in range(256)) * (size // 256 + 1))[:size]


def put(store: MooncakeStore, *keys: str, deadline_s: float = 5.0) -> list[ResultCode]:
    ops = [PutOp(key, (content(len(key)),)) for key in keys]
    return codes(store.put(ops, deadline_s).result())


def get(store: MooncakeStore, key: str, deadline_s: float = 5.0) -> ResultCode:
    """The code; bytes that are said to be good are."""
    target = memoryview(bytearray(SIZE))
    [result] = store.get([GetOp(key, (target,))], deadline_s).result()
    assert result.code is not ResultCode.OK or target == content(len(key))
    return result.code


def refused_at_once(store: MooncakeStore) -> bool:
    before = time.monotonic()
    found = {get(store, "any"), *put(store, "any"), *codes(store.exists(["any"]).result())}
    found |= {*codes(store.delete(["any"]).result())}
    return found == {ResultCode.UNAVAILABLE} and time.monotonic() - before < AT_ONCE_S


def test_a_master_that_is_killed_costs_one_deadline_and_is_back_by_itself(tmp_path: Path) -> None:
    with Cluster(tmp_path, "64MiB") as cluster:
        store = cluster.open()
        assert put(store, "key") == [ResultCode.OK]
        cluster.master.end()
        assert wait_until(lambda: put(store, "key-2", deadline_s=0.5) == [ResultCode.UNAVAILABLE], 5.0) < 2.5
        assert refused_at_once(store)
        assert store.stalls >= 1
        cluster.restart_master()
        wait_until(lambda: put(store, "key-2") == [ResultCode.OK], 20.0)
        assert get(store, "key-2") is ResultCode.OK
        assert get(store, "key") is ResultCode.MISS  # what was stored is forgotten
        store.close()


@pytest.mark.slow
def test_a_master_that_is_stopped_delays_nobody_beyond_a_deadline(tmp_path: Path) -> None:
    with Cluster(tmp_path, "64MiB") as cluster:
        store = cluster.open()
        assert put(store, "key") == [ResultCode.OK]
        cluster.master.stop()
        before = time.monotonic()
        job = store.exists(["key"], 1.5)
        assert codes(job.result()) == [ResultCode.TIMEOUT]
        assert 1.4 < time.monotonic() - before < 2.0
        assert not job.settled()
        assert refused_at_once(store)
        cluster.master.send(signal.SIGCONT)
        wait_until(lambda: get(store, "key") is ResultCode.OK, 20.0)
        assert job.settled()
        store.close()


@pytest.mark.slow
def test_an_owner_that_is_killed_loses_its_values_and_stalls_nobody(tmp_path: Path) -> None:
    with Cluster(tmp_path, "64MiB", "64MiB") as cluster:
        store = cluster.open()
        keys = [f"key-{number}" for number in range(40)]
        assert set(put(store, *keys)) == {ResultCode.OK}
        cluster.owners[0].end()
        before = time.monotonic()
        found = {get(store, key) for key in keys[:10]}
        assert ResultCode.OK in found  # the other owner's
        assert found <= {ResultCode.OK, ResultCode.MISS, ResultCode.UNAVAILABLE}
        assert time.monotonic() - before < 10 * 2.0
        store.close()


@pytest.mark.slow
def test_with_two_copies_an_owner_may_be_killed(tmp_path: Path) -> None:
    """The client tries no second copy; it gets it once the master has missed the owner for `client_ttl`."""
    with Cluster(tmp_path, "64MiB", "64MiB", options=("--client_ttl=2",)) as cluster:
        store, control = cluster.open(replicas=2), cluster.open(prefix="control:")
        keys = [f"key-{number}" for number in range(20)]
        assert set(put(store, *keys) + put(control, *keys)) == {ResultCode.OK}
        cluster.owners[0].end()
        assert get(store, keys[0]) in (ResultCode.OK, ResultCode.UNAVAILABLE)
        wait_until(lambda: {get(store, key) for key in keys} == {ResultCode.OK}, 30.0)
        assert {get(control, key) for key in keys} == {ResultCode.OK, ResultCode.MISS}
        control.close()
        store.close()


@pytest.mark.slow
def test_an_owner_that_is_stopped_costs_one_deadline_and_no_buffer(tmp_path: Path) -> None:
    """The library's call lasts 30 s; until it has ended its buffer belongs to it, and everything else is refused."""
    with Cluster(tmp_path, "64MiB") as cluster:
        store = cluster.open()
        arena = Arena(8 << 20, SIZE)
        store.register(arena)
        slot = arena.lease()
        assert slot is not None
        slot.view[:] = content(3)
        assert codes(store.put([PutOp("key", (slot.view,))]).result()) == [ResultCode.OK]
        cluster.owners[0].stop()
        start = time.monotonic()
        job = store.get([GetOp("key", (slot.view,))], 1.5)
        job.add_settled_callback(slot.release)
        assert codes(job.result()) == [ResultCode.TIMEOUT]
        assert time.monotonic() - start < 2.0
        wait_stays_true_for(8.0 - (time.monotonic() - start), lambda: refused_at_once(store), pause_s=0.5)
        assert not job.settled()
        assert arena.free_slots == arena.slots - 1
        cluster.owners[0].send(signal.SIGCONT)
        wait_until(job.settled, 40.0)
        assert arena.free_slots == arena.slots
        wait_until(lambda: put(store, "other") == [ResultCode.OK], 40.0)
        assert get(store, "key") in (ResultCode.OK, ResultCode.MISS)
        store.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_that_is_killed_in_the_middle_of_batches_leaves_no_wrong_byte(
    tmp_path: Path, effort: Callable[[int, int], int], record: Callable[[dict[str, object]], None]
) -> None:
    """Readers and writers go on while master and owners are killed, stopped and started in turn."""
    seen: dict[str, int] = {}
    wrong: list[str] = []
    slow: list[float] = []
    ended = threading.Event()
    rounds = effort(2, 10)

    with Cluster(tmp_path, "64MiB", "64MiB", options=("--default_kv_lease_ttl=500", "--client_ttl=3")) as cluster:
        stores = [cluster.open(), cluster.open(replicas=2)]

        def work(seed: int) -> None:
            number = seed
            while not ended.is_set():
                number = (number * 7 + 3) % 97
                key = "k" * (number % 40 + 1)
                store = stores[number % 2]
                before = time.monotonic()
                try:
                    code = get(store, key, 1.0) if number % 3 else put(store, key, deadline_s=1.0)[0]
                except AssertionError:
                    wrong.append(key)
                    return
                took = time.monotonic() - before
                if took > 1.5:
                    slow.append(took)
                seen[code.value] = seen.get(code.value, 0) + 1
                if code is ResultCode.UNAVAILABLE:
                    ended.wait(0.01)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for number in range(rounds):
            ended.wait(1.0)
            cluster.owners[-1].end()
            cluster.add_owner("64MiB")
            ended.wait(1.0)
            cluster.restart_master()
            wait_until(lambda number=number: ResultCode.OK in put(stores[0], f"back-{number}"), 40.0)
            cluster.owners[-1].stop()
            ended.wait(4.0)
            cluster.owners[-1].send(signal.SIGCONT)
            wait_until(lambda number=number: ResultCode.OK in put(stores[1], f"again-{number}"), 60.0)
        ended.set()
        for thread in threads:
            thread.join()
        for store in stores:
            store.close()
    record({"rounds": rounds, "results": seen, "wrong": len(wrong), "late": len(slow)})
    assert wrong == []
    assert seen.get("ok", 0) > 100
    assert len(seen) > 1  # the control: something went wrong at all
    assert slow == []


@pytest.mark.slow
def test_closing_while_two_calls_are_stuck_ends_within_bounds_and_so_does_the_process(tmp_path: Path) -> None:
    code = """
        import os, signal, sys, time
        from pathlib import Path
        from kvparams_connectors.store import *
        from tests.support.waiting import wait_until
        store = open_store(sys.argv[1])
        buffers = [memoryview(bytearray(100_000)) for _ in range(2)]
        assert store.put([PutOp(f"key-{n}", (b,)) for n, b in enumerate(buffers)]).result()[0].code is ResultCode.OK
        os.kill(int(sys.argv[2]), signal.SIGSTOP)
        threads = list(Path(f"/proc/{sys.argv[2]}/task").glob("*/stat"))  # they stop one by one; any may still answer
        wait_until(lambda: all(each.read_text().rpartition(")")[2].split()[0] == "T" for each in threads))
        jobs = [store.get([GetOp(f"key-{n}", (b,))], 1.0) for n, b in enumerate(buffers)]
        print({job.result()[0].code.name for job in jobs})
        before = time.monotonic()
        store.close()
        print([job.settled() for job in jobs], time.monotonic() - before < 15.0)
        print(store.exists(["key-0"]).result()[0].code.name, flush=True)
        """
    with Cluster(tmp_path, "64MiB") as cluster:
        before = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", dedent(code), cluster.url(), str(cluster.owners[0].pid)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        took = time.monotonic() - before
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["{'TIMEOUT'}", "[False, False] True", "UNAVAILABLE"]
    assert took < 40.0


@pytest.mark.slow
def test_closing_a_store_with_memory_of_its_own_does_not_stop_the_process_with_the_master(tmp_path: Path) -> None:
    """The library's own close holds the interpreter's lock until the master answers: the control shows it."""
    code = """
        import os, signal, sys, threading, time
        from kvparams_connectors.store import *
        url, master, bare = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "bare"
        store = open_store(url)
        gaps = [0.0]
        def tick():
            last = time.monotonic()
            while True:
                time.sleep(0.02)
                last, gap = time.monotonic(), time.monotonic() - last
                gaps.append(gap)
        threading.Thread(target=tick, daemon=True).start()
        os.kill(master, signal.SIGSTOP)
        before = time.monotonic()
        store._client._native.close() if bare else store.close()
        print(time.monotonic() - before < 15.0 and max(gaps) < 3.0, flush=True)
        os._exit(0)
        """
    with Cluster(tmp_path, "64MiB") as cluster:
        for way, fine in (("ours", "True\n"), ("bare", "False\n")):
            command = [sys.executable, "-c", dedent(code), cluster.url(segment="16MiB"), str(cluster.master.pid), way]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(18.0)
                cluster.master.send(signal.SIGCONT)
                assert process.communicate(timeout=60)[0] == fine
                assert process.returncode == 0
            finally:
                process.kill()
                process.wait(20)
