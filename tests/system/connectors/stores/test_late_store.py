"""Tests that an engine starts while its store is away, and uses the store as soon as it is there."""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvparams_connectors.arena import Arena
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode, open_store
from kvparams_connectors.store_url import StoreError, StoreUnreachable
from kvparams_connectors.stores.guard.deferred_store import DeferredStore
from kvparams_connectors.stores.guard.store import open_guarded
from kvparams_connectors.stores.memory.store import MemoryStore
from tests.support.connectors.valkey_server import ValkeyServer
from tests.support.waiting import wait_until

WORDS = b"what was put"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    """It does not run yet."""
    server = ValkeyServer(tmp_path / "valkey")
    try:
        yield server
    finally:
        server.kill()


def put(store: KVStore) -> ResultCode:
    return store.put([PutOp("key", (memoryview(WORDS),))]).result()[0].code


def get(store: KVStore) -> tuple[ResultCode, bytes]:
    into = bytearray(len(WORDS))
    found = store.get([GetOp("key", (memoryview(into),))]).result()[0]
    return found.code, bytes(into)


@pytest.mark.slow
def test_it_costs_nothing_while_it_is_away_and_is_used_when_it_is_there(
    server: ValkeyServer, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StoreUnreachable):  # the control: whoever asks for the store itself is told
        open_store(server.url)
    with caplog.at_level(logging.WARNING):
        store = open_guarded(server.url)
    assert "until it can be reached, all KV is computed" in caplog.text
    try:
        store.register(Arena(1 << 20, 1 << 16))
        began = time.monotonic()
        answers = [put(store) for _ in range(20)]
        assert time.monotonic() - began < 1
        assert set(answers) == {ResultCode.UNAVAILABLE}
        for found in (store.exists(["key", "other"]), store.delete(["key", "other"]), store.discard(["key", "other"])):
            answers_of = found.then(lambda results: [result.code for result in results])  # what a connector does
            assert answers_of.result() == [ResultCode.UNAVAILABLE] * 2
        server.start()
        wait_until(lambda: put(store) in (ResultCode.OK, ResultCode.EXISTS), pause_s=0.1)
        assert get(store) == (ResultCode.OK, WORDS)
        assert store.capabilities.shared
    finally:
        store.close()


def test_what_waiting_does_not_mend_is_refused_at_once(server: ValkeyServer, tmp_path: Path) -> None:
    server.start()
    password = tmp_path / "password"
    password.write_text("wrong\n")
    with pytest.raises(StoreError, match="refuses this user") as refused:
        open_guarded(f"{server.url}?user=nobody&password_file={password}")
    assert not isinstance(refused.value, StoreUnreachable)
    with pytest.raises(StoreError, match="colour: is not known here"):
        open_guarded(f"{server.url}?colour=red")


class Opening:
    """Fails as often as it is told."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.tries = 0
        self.made: list[MemoryStore] = []

    def __call__(self) -> KVStore:
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)
        self.made.append(MemoryStore(1 << 20, unit_bytes=4096))
        return self.made[-1]


def test_attempts_are_apart_and_what_is_wrong_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    wrong = StoreError("the password is wrong")
    opening = Opening(StoreUnreachable("away"), wrong, wrong, ZeroDivisionError(), wrong)
    store = DeferredStore(opening, "test", pause_s=0.02)
    try:
        assert put(store) is ResultCode.UNAVAILABLE
        assert opening.tries == 0  # it has just been tried
        wait_until(lambda: put(store) is ResultCode.OK)
        assert opening.tries == 6
        assert caplog.text.count("the password is wrong") == 2  # again after another failure
        assert get(store) == (ResultCode.OK, WORDS)
    finally:
        store.close()


def test_a_store_that_is_opened_while_its_user_closes_is_closed_too() -> None:
    opening = Opening()
    store = DeferredStore(opening, "test", pause_s=0.0)
    put(store)
    store.close()
    store.close()
    assert put(store) is ResultCode.UNAVAILABLE
    assert all(put(made) is ResultCode.UNAVAILABLE for made in opening.made)
