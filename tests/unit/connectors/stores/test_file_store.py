"""Tests the file of the file store: what is opened, what is refused, and the effect of a stopped process."""

import fcntl
import os
import struct
import time
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvparams_connectors.store import GetOp, PutOp, Result, ResultCode
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.stores.file.locks import FileLock, ProcessSeat
from kvparams_connectors.stores.file.store import FileStore
from tests.support.waiting import wait_until

SIZE = 1 << 20
DEADLINE_S = 20.0


def put(store: FileStore, key: str, size: int = 10_000, deadline_s: float = DEADLINE_S) -> ResultCode:
    return store.put([PutOp(key, (memoryview(bytearray(size)),))], deadline_s).result()[0].code


def has(store: FileStore, key: str) -> bool:
    return store.exists([key], DEADLINE_S).result()[0].code is ResultCode.OK


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with one value, closed."""
    store = FileStore(tmp_path / "store", SIZE, unit_bytes=4096)
    assert put(store, "key") is ResultCode.OK
    store.close()
    return tmp_path / "store"


def patch(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def test_the_file_has_exactly_the_size_that_was_asked_for_and_every_block_of_it(tmp_path: Path) -> None:
    path = tmp_path / "store"
    for size in (SIZE, 3 * SIZE + 12_345):
        FileStore(path, size, unit_bytes=4096).close()
        status = path.stat()
        assert status.st_size == size
        assert status.st_blocks * 512 >= size
        assert status.st_mode & 0o777 == 0o600  # KV holds what users said
        path.unlink()


def test_an_existing_store_is_opened_as_it_is(path: Path) -> None:
    for store in (FileStore(path), FileStore(path, SIZE), FileStore(path, SIZE, unit_bytes=4096)):
        assert has(store, "key")
        store.close()


@pytest.mark.parametrize(("size", "unit"), [(2 * SIZE, None), (None, 8192), (SIZE - 1, 4096)])
def test_an_existing_store_of_another_size_is_refused_and_stays(path: Path, size: int | None, unit: int | None) -> None:
    with pytest.raises(StoreError, match="remove the setting"):
        FileStore(path, size, unit_bytes=unit)
    store = FileStore(path)
    assert has(store, "key")
    store.close()


def test_a_file_of_another_version_is_refused_and_stays(path: Path) -> None:
    before = path.read_bytes()
    patch(path, 8, b"\2")
    with pytest.raises(StoreError, match="version 2"):
        FileStore(path)
    patch(path, 8, b"\1")
    assert path.read_bytes() == before


def test_a_file_that_is_no_store_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "letter"
    for content in (b"Dear Sir or Madam", b"x" * 100_000, b"KVPFILE"):
        path.write_bytes(content)
        with pytest.raises(StoreError, match="not a store"):
            FileStore(path, SIZE)
        assert path.read_bytes() == content


def test_a_damaged_head_and_a_file_that_was_cut_are_refused(path: Path) -> None:
    patch(path, 16, struct.pack("<Q", 2 * SIZE))
    with pytest.raises(StoreError, match="damaged"):
        FileStore(path)
    patch(path, 16, struct.pack("<Q", SIZE))
    os.truncate(path, SIZE - 4096)
    with pytest.raises(StoreError, match="cut"):
        FileStore(path)


def test_a_link_is_not_followed_and_a_directory_is_no_store(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    for wrong in (tmp_path / "link", tmp_path):
        with pytest.raises(StoreError, match="cannot open"):
            FileStore(wrong, SIZE)


def test_a_creation_that_was_cut_short_is_done_again(tmp_path: Path, path: Path) -> None:
    fixed = path.read_bytes()[:40]
    creating = fixed[:12] + struct.pack("<I", 1) + fixed[16:]
    for left_over in (b"", creating + zlib.crc32(creating).to_bytes(4, "little")):
        other = tmp_path / "other"
        other.write_bytes(left_over)
        store = FileStore(other, SIZE, unit_bytes=4096)
        assert put(store, "key") is ResultCode.OK
        store.close()
        other.unlink()


def test_a_disk_that_is_too_small_is_an_error_at_creation(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("needs /dev/shm: a tmpfs, which refuses at once what is larger than itself")
    disk = os.statvfs(shared)
    path = shared / f"kvparams-too-large-{os.getpid()}"
    try:
        with pytest.raises(StoreError, match="no room"):
            FileStore(path, disk.f_blocks * disk.f_frsize + (1 << 30))
        assert path.stat().st_blocks == 0
    finally:
        path.unlink(missing_ok=True)


def test_a_size_without_room_for_one_unit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="too small for one unit"):
        FileStore(tmp_path / "store", 8192, unit_bytes=4096)


def test_after_a_restart_of_the_machine_the_store_starts_empty(path: Path) -> None:
    """What a power cut left in the file need not fit together. The control: without the restart the value is there."""
    store = FileStore(path)
    assert has(store, "key")
    store.close()
    patch(path, 1024 + 64, b"\0" * 16)  # where the boot id stands
    store = FileStore(path)
    assert not has(store, "key")
    assert put(store, "key", size=store.capabilities.max_value_bytes) is ResultCode.OK
    store.close()


@contextmanager
def neighbour_holding_the_lock(path: Path) -> Generator[None]:
    """As a process does that was stopped in the middle of a change."""
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


def test_a_stopped_neighbour_costs_a_writer_its_deadline_and_a_reader_nothing(path: Path) -> None:
    store = FileStore(path)
    with neighbour_holding_the_lock(path):
        before = time.monotonic()
        assert put(store, "other", deadline_s=0.1) is ResultCode.TIMEOUT
        assert store.delete(["key"], 0.1).result()[0].code is ResultCode.TIMEOUT
        assert has(store, "key")
        target = memoryview(bytearray(10_000))
        assert store.get([GetOp("key", (target,))], DEADLINE_S).result()[0].code is ResultCode.OK
        assert time.monotonic() - before < DEADLINE_S / 2
    assert put(store, "other") is ResultCode.OK
    store.close()


def test_opening_waits_for_a_neighbour_no_longer_than_it_should(path: Path) -> None:
    with neighbour_holding_the_lock(path), pytest.raises(StoreError, match=r"another process"):
        FileStore(path, timeout_s=0.1)


def test_a_change_that_was_not_finished_is_repaired_by_whoever_comes_next(path: Path) -> None:
    store, other = FileStore(path), FileStore(path)
    patch(path, 1024, struct.pack("<Q", 1))  # the mark of a change in progress
    repairs = store.repairs
    assert put(other, "other") is ResultCode.OK
    assert store.repairs == repairs + 1
    assert has(store, "key")
    assert has(store, "other")
    store.close()
    other.close()


def test_records_that_are_not_whole_are_dropped_by_a_repair_and_their_room_is_used_again(path: Path) -> None:
    store = FileStore(path)
    raw = path.read_bytes()
    record = raw.index(b"key".ljust(128, b"\0"))
    patch(path, record + 200, b"\xff")
    assert not has(store, "key")  # the record's checksum does not fit
    patch(path, 1024, struct.pack("<Q", 1))
    assert put(store, "whole", size=store.capabilities.max_value_bytes) is ResultCode.OK
    store.close()


def test_a_seat_ends_with_whoever_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "seats"
    path.touch()
    fds = [os.open(path, os.O_RDWR) for _ in range(3)]
    first, second = ProcessSeat(fds[0], 2), ProcessSeat(fds[1], 2)
    assert (first.seat, second.seat) == (0, 1)
    assert (first.is_taken(1), second.is_taken(0)) == (True, True)
    with pytest.raises(OSError, match="seats"):
        ProcessSeat(fds[2], 2)
    os.close(fds[0])  # as the kernel does when a process is killed
    assert not second.is_taken(0)
    assert ProcessSeat(fds[2], 2).seat == 0
    second.leave()
    for fd in fds[1:]:
        os.close(fd)


def test_a_lock_excludes_the_threads_of_its_own_process_as_well(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    fd = os.open(path, os.O_RDWR)
    lock = FileLock(fd)
    with lock.held(time.monotonic() + DEADLINE_S), pytest.raises(TimeoutError), lock.held(time.monotonic() + 0.05):
        pass
    with lock.held(time.monotonic()):
        pass
    os.close(fd)


def test_users_of_a_file_that_is_removed_go_on_together_with_a_new_one(path: Path) -> None:
    """`rm` while they run: nobody goes on alone with what it has mapped."""
    users = [FileStore(path), FileStore(path)]
    assert all(has(user, "key") for user in users)
    path.unlink()
    assert not any(has(user, "key") for user in users)
    users.append(FileStore(path))  # a late one
    value = memoryview(os.urandom(10_000))
    assert users[0].put([PutOp("new", (value,))], DEADLINE_S).result()[0].code is ResultCode.OK
    for user in users:
        room = memoryview(bytearray(10_000))
        assert user.get([GetOp("new", (room,))], DEADLINE_S).result()[0].code is ResultCode.OK
        assert room == value
        assert user.exists_nowait(["new"]) is not None
    assert path.stat().st_size == SIZE  # nobody had to say it again
    assert f"{path} (deleted)" not in Path("/proc/self/maps").read_text()
    for user in users:
        user.close()


def test_who_only_asks_without_waiting_notices_as_well(path: Path) -> None:
    store = FileStore(path)
    assert store.exists_nowait(["other"]) == [Result(ResultCode.MISS)]
    path.unlink()
    wait_until(lambda: store.exists_nowait(["other"]) is None)
    assert not has(store, "other")  # whoever waits has it opened anew
    assert store.exists_nowait(["other"]) == [Result(ResultCode.MISS)]
    with store._changing:  # pyright: ignore[reportPrivateUsage]  somebody may be closing what is open
        assert store.exists_nowait(["other"]) is None
    store.close()


def test_what_was_begun_on_a_removed_file_ends_on_it(path: Path) -> None:
    """A value that is being read when the file is replaced comes whole, and is the old one."""
    store = FileStore(path, threads=2)
    value = os.urandom(10_000)
    assert store.put([PutOp("mine", (memoryview(value),))], DEADLINE_S).result()[0].code is ResultCode.OK
    seen: list[bool] = []

    def arrived(nbytes: int) -> None:
        path.unlink()
        seen.append(has(store, "mine"))  # the other thread is on a new file by then

    rooms = [memoryview(bytearray(10_000)) for _ in range(2)]
    gets = [GetOp("mine", (rooms[0],), on_complete=arrived), GetOp("mine", (rooms[1],))]
    assert [result.code for result in store.get(gets, DEADLINE_S).result()] == [ResultCode.OK] * 2
    assert seen == [False]
    assert rooms[0] == rooms[1] == value
    assert not has(store, "mine")
    store.close()


def test_where_something_else_takes_the_files_place_the_store_is_unavailable_and_comes_back(path: Path) -> None:
    store = FileStore(path)
    path.unlink()
    path.write_text("not a store")
    assert put(store, "new") is ResultCode.UNAVAILABLE
    assert store.exists(["new"], DEADLINE_S).result()[0].code is ResultCode.UNAVAILABLE
    assert store.exists_nowait(["new"]) is None
    assert path.read_text() == "not a store"
    path.unlink()
    codes: list[ResultCode] = []

    def is_available() -> bool:
        codes.append(put(store, "new"))
        return codes[-1] is not ResultCode.UNAVAILABLE

    wait_until(is_available, DEADLINE_S)
    assert codes[-1] is ResultCode.OK
    store.close()
