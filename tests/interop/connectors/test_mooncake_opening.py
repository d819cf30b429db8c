"""Tests that a store opens without delay while its Mooncake master is not well."""

import signal
import threading
import time
from pathlib import Path

import pytest

from kvparams_connectors.store import PutOp, ResultCode
from kvparams_connectors.store_url import StoreUnreachable
from kvparams_connectors.stores.guard.store import open_guarded
from tests.support.connectors.mooncake_cluster import Cluster
from tests.support.waiting import wait_until


class Ticking:
    """A thread that wants the interpreter every few milliseconds, and knows how long it had to wait for it."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick)
        self.longest_s = 0.0

    def __enter__(self) -> "Ticking":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _tick(self) -> None:
        before = time.monotonic()
        while not self._over.wait(0.005):
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - before)
            before = now


@pytest.mark.slow
def test_a_master_that_is_stopped_holds_up_no_thread_and_is_used_when_it_goes_on(tmp_path: Path) -> None:
    with Cluster(tmp_path, "64MiB") as cluster:
        url = cluster.url()
        cluster.master.send(signal.SIGSTOP)
        try:
            with Ticking() as ticking:
                with pytest.raises(StoreUnreachable, match="does not answer"):
                    cluster.open(connect_s=0.5)
                store = open_guarded(url)
                ops = [PutOp("key", (memoryview(b"content"),))]
                wait_until(lambda: store.put(ops).result()[0].code is ResultCode.UNAVAILABLE, 5.0)
            assert ticking.longest_s < 1.5
        finally:
            cluster.master.send(signal.SIGCONT)
        try:
            wait_until(lambda: store.put(ops).result()[0].code in (ResultCode.OK, ResultCode.EXISTS), 30.0)
        finally:
            store.close()
