"""Shows each trap of LMCache's multi-process server with LMCache's own client, then tests that the store avoids it.

LMCache's interpreter runs it, from test_lmcache_mp.py. A trap that LMCache's own client no longer meets fails its test.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any, Final

import pytest

from kvparams_connectors.store import GetOp, PutOp, ResultCode, StoreError, open_store
from kvparams_connectors.stores.lmcache.mp_client import (
    LMCacheMPClient,
    LMCacheMPLibrary,
    NoReplyError,
    pseudo_token_ids,
)
from kvparams_connectors.stores.lmcache.mp_shared_memory import HEAD_BYTES
from kvparams_connectors.stores.lmcache.mp_store import LMCacheMPStore
from tests.support.connectors.lmcache_mp_server import MPServer
from tests.support.waiting import wait_until

DEADLINE_S: Final = 20.0
SIZE: Final = 300_000
ROOM: Final = 12
NAMES: Final = count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MPServer]:
    """Room for 12 values; started once, and again by who kills it."""
    with MPServer(tmp_path_factory.mktemp("server"), pool_bytes=ROOM * ((1 << 20) + 4096) + 8192) as started:
        yield started


class Raw:
    """LMCache's own client, as an engine would use it, for the model of a store."""

    def __init__(self, server: MPServer, prefix: str) -> None:
        self.library = LMCacheMPLibrary()
        self.link: LMCacheMPClient = self.library.connect(f"127.0.0.1:{server.port}")
        chunk_bytes = (1 << 20) + HEAD_BYTES
        self.model = f"kvparams.{prefix}.{chunk_bytes}"
        self.instance = 4711
        self.registration = self.library.registration(self.instance, self.model, chunk_bytes)
        self.wait(self.link.register(self.registration))

    def key(self, key: str, request: str, *, worker: bool = True) -> Any:
        return self.library.key(self.model, pseudo_token_ids(key, 256), request, worker=worker)

    def lookup(self, key: str, request: str) -> int:
        """And leave it at that."""
        self.wait(self.link.lookup(self.key(key, request, worker=False)))
        return int(self.wait(self.link.status(request, 5.0)))

    @staticmethod
    def wait(answer: Any, timeout_s: float = 5.0) -> Any:
        return LMCacheMPClient.wait(answer, time.monotonic() + timeout_s)


class Case:
    """A store under a prefix of its own, and LMCache's client beside it."""

    def __init__(self, server: MPServer) -> None:
        server.clear()
        self.prefix = f"f{next(NAMES)}"
        store = open_store(server.url(prefix=self.prefix))
        assert isinstance(store, LMCacheMPStore)
        self.store = store
        self.raw = Raw(server, self.prefix)

    def put(self, *keys: str, deadline_s: float = DEADLINE_S) -> list[ResultCode]:
        return codes(self.store.put([PutOp(key, (content(key),)) for key in keys], deadline_s))

    def get(self, *keys: str, deadline_s: float = DEADLINE_S) -> list[ResultCode]:
        """The codes; what was read is right, or this fails."""
        targets = [memoryview(bytearray(SIZE)) for _ in keys]
        job = self.store.get([GetOp(key, (target,)) for key, target in zip(keys, targets, strict=True)], deadline_s)
        found = codes(job)
        for key, target, code in zip(keys, targets, found, strict=True):
            assert code is not ResultCode.OK or target == content(key), key
        assert job.wait_settled(DEADLINE_S)
        return found

    def delete(self, *keys: str, deadline_s: float = 1.0) -> list[ResultCode]:
        return codes(self.store.delete(keys, deadline_s))


@pytest.fixture
def case(server: MPServer) -> Iterator[Case]:
    case = Case(server)
    yield case
    case.raw.link.close()
    case.store.close()


def content(key: str) -> memoryview:
    return memoryview(Random(key).randbytes(SIZE))


def codes(job: Any) -> list[ResultCode]:
    return [result.code for result in job.result()]


def names(number: int) -> list[str]:
    return [f"key-{at}" for at in range(number)]


def test_full_looks_like_cached_and_is_told_apart(case: Case) -> None:
    keys = names(ROOM)
    for key in keys:
        assert case.put(key) == [ResultCode.OK]
    for key in keys:
        if not case.raw.lookup(key, f"hold-{key}"):  # one that was evicted meanwhile
            assert case.put(key) == [ResultCode.OK]
            assert case.raw.lookup(key, f"hold-{key}-2")
    # The control: what is locked cannot be evicted, and a value for which there is no room is answered like one that
    # is there.
    while case.put("more") == [ResultCode.OK]:
        assert case.raw.lookup("more", "hold-more")
    answers = [
        case.raw.wait(case.raw.link.prepare_store(case.raw.key(key, f"ask-{key}"), case.raw.instance)).context
        for key in ("another", keys[0])
    ]
    assert answers == [{"slots": [], "chunk_indices": []}] * 2
    began = time.monotonic()
    assert case.put("another", keys[0]) == [ResultCode.FULL, ResultCode.EXISTS]
    assert time.monotonic() - began < 6
    assert case.get("another", keys[0]) == [ResultCode.MISS, ResultCode.OK]


def test_no_lock_is_left_on_any_path(case: Case) -> None:
    keys = names(4)
    assert case.put(*keys) == [ResultCode.OK] * 4
    # The control: a lookup that nobody ends keeps the value from being deleted.
    assert case.raw.lookup(keys[3], "forgotten") == 1
    assert case.delete(keys[3], deadline_s=0.3) == [ResultCode.TIMEOUT]
    for _ in range(3):
        assert case.put(*keys[:3]) == [ResultCode.EXISTS] * 3
        assert case.get(*keys[:3], "missing", keys[0]) == [ResultCode.OK] * 3 + [ResultCode.MISS, ResultCode.OK]
        assert codes(case.store.exists([*keys[:3], "missing"])) == [ResultCode.OK] * 3 + [ResultCode.MISS]
        small = memoryview(bytearray(10))
        assert codes(case.store.get([GetOp(keys[0], (small,))])) == [ResultCode.TOO_LARGE]
        for deadline_s in (0.0, 0.0005, 0.002):
            case.get(*keys[:3], deadline_s=deadline_s)
            case.put(*keys[:3], deadline_s=deadline_s)
    assert case.delete(*keys[:3]) == [ResultCode.OK] * 3
    # And for the control the lock can be given back.
    case.raw.wait(case.raw.link.free(case.raw.key(keys[3], "forgotten", worker=False)))
    assert case.delete(keys[3]) == [ResultCode.OK]


def test_what_the_server_raises_costs_one_deadline_and_not_the_next(case: Case) -> None:
    assert case.put("key") == [ResultCode.OK]
    # The control: somebody whom the server does not know is never answered.
    with pytest.raises(NoReplyError):
        case.raw.wait(case.raw.link.prepare_store(case.raw.key("other", "unknown"), 999), 0.5)
    case.raw.wait(case.raw.link.unregister(case.store.session.instance))
    began = time.monotonic()
    assert case.put("second", deadline_s=1.0) == [ResultCode.TIMEOUT]
    assert time.monotonic() - began < 3
    assert case.put("second") == [ResultCode.OK]
    assert case.get("key", "second") == [ResultCode.OK] * 2


def test_a_server_that_was_started_anew_is_noticed(case: Case, server: MPServer) -> None:
    keys = names(3)
    assert case.put(*keys) == [ResultCode.OK] * 3
    _, old = case.store.session.ready(time.monotonic() + 5)
    assert old.current
    server.kill()
    assert set(case.get(*keys, deadline_s=0.5)) == {ResultCode.TIMEOUT}
    server.start()
    # The control: the memory that was mapped is still there, with the old values in it, and is not the server's.
    assert not old.current
    assert bytes(content(keys[0])[:100]) in bytes(old._bytes)  # pyright: ignore[reportPrivateUsage]
    del old
    assert case.get(*keys) == [ResultCode.MISS] * 3
    assert case.put(*keys) == [ResultCode.OK] * 3
    assert case.get(*keys) == [ResultCode.OK] * 3
    assert case.store.session.renewed == 2


def test_a_server_that_stops_costs_the_deadline_and_everything_is_given_back_later(
    case: Case, server: MPServer
) -> None:
    keys = names(4)
    assert case.put(*keys[:3]) == [ResultCode.OK] * 3
    server.stop()
    try:
        for operation in (case.get, case.put, case.get):
            began = time.monotonic()
            assert set(operation(*keys, deadline_s=0.4)) == {ResultCode.TIMEOUT}
            assert time.monotonic() - began < 4
    finally:
        server.go_on()
    wait_until(lambda: case.get(*keys[:3]) == [ResultCode.OK] * 3)
    assert case.put(keys[3]) in ([ResultCode.OK], [ResultCode.EXISTS])
    assert case.get(*keys) == [ResultCode.OK] * 4
    assert case.store.session.unreleased == 0
    assert case.delete(*keys) == [ResultCode.OK] * 4  # nothing is locked


def test_a_server_that_stops_in_the_middle_of_batches_leaves_nothing_wrong(case: Case, server: MPServer) -> None:
    keys = names(8)
    random = Random(3)
    for _ in range(6):
        jobs = [case.store.put([PutOp(key, (content(key),)) for key in keys], 0.5)]
        targets = [memoryview(bytearray(SIZE)) for _ in keys]
        jobs.append(case.store.get([GetOp(*op) for op in zip(keys, ([one] for one in targets), strict=True)], 0.5))
        time.sleep(random.random() * 0.03)
        server.stop()
        results = [job.result() for job in jobs]
        server.go_on()
        assert all(job.wait_settled(DEADLINE_S) for job in jobs)
        for key, target, result in zip(keys, targets, results[1], strict=True):
            assert result.code is not ResultCode.OK or target == content(key)
        allowed = {
            ResultCode.OK,
            ResultCode.EXISTS,
            ResultCode.MISS,
            ResultCode.TIMEOUT,
            ResultCode.UNAVAILABLE,
            ResultCode.FULL,
        }
        assert {result.code for some in results for result in some} <= allowed
    wait_until(lambda: set(case.put(*keys)) <= {ResultCode.OK, ResultCode.EXISTS})
    assert case.get(*keys) == [ResultCode.OK] * 8
    assert case.delete(*keys) == [ResultCode.OK] * 8


def test_room_that_was_given_and_never_written_is_not_read_as_a_value(case: Case) -> None:
    assert case.put("old") == [ResultCode.OK]
    assert case.delete("old") == [ResultCode.OK]
    raw = case.raw
    answer = raw.wait(raw.link.prepare_store(raw.key("key", "writer"), raw.instance))
    assert len(answer.context["slots"]) == 1
    raw.wait(raw.link.unregister(raw.instance))  # a writer that leaves: what it has reserved is published
    assert raw.lookup("key", "control") == 1  # the control: it is found
    raw.wait(raw.link.free(raw.key("key", "control", worker=False)))
    assert case.get("key") == [ResultCode.CORRUPT]
    assert case.delete("key") == [ResultCode.OK]
    assert case.put("key") == [ResultCode.OK]
    assert case.get("key") == [ResultCode.OK]


def test_a_flipped_byte_in_the_pool_is_left_to_whoever_reads_pages(case: Case, server: MPServer) -> None:
    """The store promises no checksum; this is why pages have one. What lies in front of a value is checked."""
    assert case.put("key") == [ResultCode.OK]
    whole = server.memory.read_bytes()
    at = whole.index(bytes(content("key")[:64]))
    with server.memory.open("r+b") as file:
        file.seek(at - 1)  # in the digest of the key
        file.write(bytes([whole[at - 1] ^ 1]))
    assert case.get("key") == [ResultCode.CORRUPT]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("?vaule=1MiB", "vaule: is not known here; known: http, max_value, prefix"),
        ("?max_value=2GiB", "max_value: must be a size such as 4MiB, at most 1GiB"),
        ("?prefix=a/b", "prefix: must be 1 to 128 characters"),
        ("/path", "has no server"),
        ("", "no LMCache server answers"),
    ],
)
def test_what_cannot_be_opened_is_said_in_words(settings: str, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        open_store(f"lmcache-mp://127.0.0.1:9{settings}")


def test_the_doctor_is_told_when_nothing_can_be_deleted(server: MPServer) -> None:
    good, bad = open_store(server.url()), open_store(server.url().replace(f"http={server.http}", "http=9"))
    assert isinstance(good, LMCacheMPStore)
    assert isinstance(bad, LMCacheMPStore)
    assert [advice.level for advice in good.advice()] == ["ok"]
    assert [advice.level for advice in bad.advice()] == ["ok", "error"]
    assert codes(bad.delete(["key"])) == [ResultCode.UNAVAILABLE]
    good.close()
    bad.close()


def test_a_process_ends_although_its_server_has_gone(server: MPServer) -> None:
    """What waits to be sent to a server that is gone would keep a ZeroMQ context, and the process, for ever. The last
    test of this file: the server stays away."""
    code = (
        "import sys; from kvparams_connectors.store import *\n"
        f"store = open_store({server.url()!r}); print('open', flush=True); sys.stdin.readline()\n"
        "for _ in range(3): print(store.exists(['key'], 0.2).result()[0].code)\n"
        "store.close()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        server.kill()
        out, _ = child.communicate(b"\n", timeout=30)
    assert out.split() == [b"ResultCode.TIMEOUT"] * 3
    assert child.returncode == 0
