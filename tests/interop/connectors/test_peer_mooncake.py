"""Tests the peer store with Mooncake's transfer engine: it reads the same bytes, and hides the engine's quirks."""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from random import Random

import pytest

from demo.processes import free_port
from kvparams_connectors.advice import advice_from_store
from kvparams_connectors.conformance import Opener, StoreConformance
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode, open_store
from kvparams_connectors.store_url import StoreError, StoreURL
from kvparams_connectors.stores.extents import ByteArray
from kvparams_connectors.stores.peer.channel import PeerChannel
from kvparams_connectors.stores.peer.handshake import connect_handshake
from kvparams_connectors.stores.peer.settings import PeerSettings
from kvparams_connectors.stores.peer.store import PeerStore
from kvparams_connectors.stores.peer.transfer_engine import GuardedTransferEngine
from kvparams_connectors.stores.peer.wire import (
    REPLY_HEAD,
    PeerOperation,
    PeerStatus,
    PlacedValue,
    PlacementTable,
    encode_placement,
    parse_placement,
    parse_reply,
)
from tests.support.connectors.peer_across import Across
from tests.support.connectors.peer_process import PeerProcess, a_peer, page
from tests.support.connectors.peer_steps import (
    SIZE,
    WAIT_S,
    Liar,
    contacted,
    get,
    lies,
    names,
    peer,
    put,
    reader_of,
    request,
)
from tests.support.connectors.steps import codes
from tests.support.waiting import wait_until

URL = "peer://127.0.0.1?size=32MiB&transport=mooncake"
ROOM = [1 << 30]


@pytest.fixture(scope="module")
def kept() -> Iterator[list[PeerProcess]]:
    processes: list[PeerProcess] = []
    yield processes
    for process in processes:
        process.kill()


@pytest.fixture
def owner(kept: list[PeerProcess]) -> PeerProcess:
    return a_peer(kept, URL)


def told(opened: list[KVStore], address: str, seeds: Sequence[int] = range(64), **settings: str | float) -> PeerStore:
    store = peer(opened, "127.0.0.1:0", **{"transport": "mooncake", "buffer_bytes": 16 << 20} | settings)
    store.hint_location(names(seeds), address)
    return store


@pytest.fixture(scope="module")
def transfers() -> Iterator[tuple[GuardedTransferEngine, GuardedTransferEngine]]:
    """For all tests of the suite: one for stores that are read from, one for those that read. To end one takes 1 s."""
    both = [
        GuardedTransferEngine("127.0.0.1", protocol="tcp", devices="", buffer_bytes=8 << 20, threads=4)
        for _ in range(2)
    ]
    yield both[0], both[1]
    for one in both:
        one.close()


@pytest.mark.slow
class TestThroughMooncake(StoreConformance):
    """What one peer store puts, another one has its transfer engine read."""

    @pytest.fixture
    def opener(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, opened: list[KVStore], transfers: tuple[GuardedTransferEngine, GuardedTransferEngine]
    ) -> Iterator[Opener]:
        made: list[Across] = []

        def open_one() -> KVStore:
            url = "?size=4MiB&lease=0&transport=mooncake"
            owner = PeerStore(PeerSettings.of(StoreURL.parse(f"peer://127.0.0.1{url}")), transfer=transfers[0])
            reader = PeerStore(PeerSettings.of(StoreURL.parse(f"peer://127.0.0.1:0{url}")), transfer=transfers[1])
            made.append(Across(owner, reader))
            opened.append(made[-1])
            return made[-1]

        yield open_one
        for across in made:  # nothing was read in another way
            read = across.reader.statistics
            assert read.bytes_read == read.bytes_transferred


def test_pages_are_read_from_the_memory_of_the_process_that_made_them(
    opened: list[KVStore], owner: PeerProcess
) -> None:
    assert owner.put(range(8), SIZE) == ["OK"] * 8
    store = told(opened, owner.address)
    assert get(store, range(12)) == [ResultCode.OK] * 8 + [ResultCode.MISS] * 4
    assert store.statistics.bytes_transferred == store.statistics.bytes_read == 8 * SIZE
    wait_until(lambda: owner.pins() == 0)


def test_values_of_any_size_and_place(opened: list[KVStore]) -> None:
    """Values in pieces, of nothing, and larger than where they could land."""
    owner, reader = peer(opened, transport="mooncake", size="8MiB"), told(opened, "127.0.0.1:1", buffer_bytes=2 << 20)
    assert owner.address is not None
    random = Random(5)
    sizes = {seed: random.choice([0, 1, 4097, 30_000, 70_000]) for seed in range(100)}
    for seed, size in sizes.items():
        assert put(owner, [seed], size) == [ResultCode.OK]
    owner.delete(names([seed for seed in sizes if seed % 2]), WAIT_S).result()
    for seed, size in {200: 600_000, 201: 900_000}.items():  # into the gaps, and too large for a slot of 256 KiB
        assert put(owner, [seed], size) == [ResultCode.OK]
    sizes = {seed: size for seed, size in sizes.items() if seed % 2 == 0} | {200: 600_000, 201: 900_000}
    reader.hint_location(names(list(sizes)), owner.address)
    targets = {seed: [memoryview(bytearray(size // 3)), memoryview(bytearray(size))] for seed, size in sizes.items()}
    results = reader.get([GetOp(f"key-{seed}", parts) for seed, parts in targets.items()], WAIT_S).result()
    for (seed, size), result in zip(sizes.items(), results, strict=True):
        assert result == Result(ResultCode.OK, size)
        assert b"".join(targets[seed])[:size] == page(seed, size), seed
    seen = reader.statistics
    assert seen.bytes_read - seen.bytes_transferred == 1_500_000  # those two came over the socket


def test_who_has_no_transfer_engine_is_read_over_the_socket(opened: list[KVStore]) -> None:
    plain, engine = peer(opened), peer(opened, transport="mooncake")
    for owner, reader in ((plain, told(opened, str(plain.address))), (engine, peer(opened, "127.0.0.1:0"))):
        put(owner, range(4))
        reader.hint_location(names(range(4)), str(owner.address))
        assert get(reader, range(4)) == [ResultCode.OK] * 4
        assert reader.statistics.bytes_transferred == 0


def test_what_is_held_stays_until_it_is_returned_or_its_time_is_over(opened: list[KVStore], owner: PeerProcess) -> None:
    owner.put(range(4), SIZE)
    reader = reader_of(owner)
    connect_handshake(reader, b"")

    def hold(give_up_ms: int) -> list[PlacedValue]:
        reader.send_parts([request(PeerOperation.HOLD, range(4), give_up_ms)])
        reply = parse_reply(reader.read(REPLY_HEAD.size), 4)
        return parse_placement(reader.read(reply.nbytes), ROOM * 4).values

    def give_back() -> PeerStatus:
        reader.send_parts([request(PeerOperation.RETURN, [], 1000)])
        return parse_reply(reader.read(REPLY_HEAD.size), 0).status

    first = hold(5000)
    assert owner.pins() == 4
    assert give_back() is PeerStatus.FINE
    assert owner.pins() == 0
    assert give_back() is PeerStatus.OVER  # once
    hold(100)
    wait_until(lambda: owner.pins() == 0)
    assert give_back() is PeerStatus.OVER
    owner.delete(range(4))
    owner.put(range(4), SIZE)
    again = hold(5000)
    assert min(placed.generation for placed in again) > max(placed.generation for placed in first)
    reader.close()
    wait_until(lambda: owner.pins() == 0)


def test_a_reader_that_goes_on_asking_holds_nothing_beyond_its_time(opened: list[KVStore], owner: PeerProcess) -> None:
    """Neither by asking all the time, nor by a request that it does not end."""
    owner.put(range(4), SIZE)
    for more in (request(PeerOperation.SIZES, range(4), 30_000), request(PeerOperation.RETURN, [], 30_000)[:5]):
        reader = reader_of(owner)
        connect_handshake(reader, b"")
        reader.send_parts([request(PeerOperation.HOLD, range(4), 400)])
        reader.read(parse_reply(reader.read(REPLY_HEAD.size), 4).nbytes)
        start, over = time.monotonic(), threading.Event()
        assert owner.pins() == 4

        def ask(reader: PeerChannel = reader, more: bytes = more, over: threading.Event = over) -> None:
            with suppress(OSError):
                reader.send_parts([more])
                while len(more) > 5 and not over.is_set():
                    reader.send_parts([more])
                    reader.read(parse_reply(reader.read(REPLY_HEAD.size), 4).nbytes)

        thread = threading.Thread(target=ask)
        thread.start()
        wait_until(lambda: owner.pins() == 0, 3.0)
        assert time.monotonic() - start > 0.2
        over.set()
        thread.join(WAIT_S)
        reader.close()


def test_a_stopped_peer_costs_its_deadline_and_nothing_lands_later(opened: list[KVStore], owner: PeerProcess) -> None:
    owner.put(range(8), 1 << 20)
    store = told(opened, owner.address, threads=1)
    assert get(store, range(8), 1 << 20) == [ResultCode.OK] * 8
    owner.stop()
    memory = memoryview(bytearray(8 << 20))
    targets = [memory[at << 20 : (at + 1) << 20] for at in range(8)]
    start = time.monotonic()
    job = store.get([GetOp(f"key-{at}", (target,)) for at, target in enumerate(targets)], 0.5)
    assert codes(job.result()) == [ResultCode.MISS] * 8
    assert job.wait_settled(1.0)  # not when the engine is through with it: that takes 30 s
    assert time.monotonic() - start < 1.5
    memory[:] = b"\xa5" * (8 << 20)
    owner.go_on()
    wait_until(lambda: set(get(store, range(8), 1 << 20)) == {ResultCode.OK}, WAIT_S)
    assert memory == b"\xa5" * (8 << 20)


@pytest.mark.slow
def test_a_peer_that_is_stopped_during_a_transfer(opened: list[KVStore], owner: PeerProcess) -> None:
    """Whenever it stops: in time, nothing wrong, and it is read again afterwards."""
    owner.put(range(24), 1 << 20)
    store = told(opened, owner.address)
    assert get(store, range(24), 1 << 20) == [ResultCode.OK] * 24
    for pause_s in (0.0, 0.002, 0.005, 0.01):
        targets = [memoryview(bytearray(1 << 20)) for _ in range(24)]
        job = store.get([GetOp(f"key-{at}", (target,)) for at, target in enumerate(targets)], 0.6)
        time.sleep(pause_s)
        owner.stop()
        results = job.result()
        assert job.wait_settled(1.0)
        for at, (target, result) in enumerate(zip(targets, results, strict=True)):
            assert result.code is not ResultCode.OK or target == page(at, 1 << 20)
        owner.go_on()
        wait_until(lambda: set(get(store, range(24), 1 << 20)) == {ResultCode.OK}, WAIT_S)


def test_a_peer_that_is_killed(opened: list[KVStore], owner: PeerProcess) -> None:
    owner.put(range(8), SIZE)
    store = told(opened, owner.address)
    assert get(store, range(8)) == [ResultCode.OK] * 8
    owner.kill()
    assert get(store, range(8)) == [ResultCode.MISS] * 8
    assert (store.statistics.values_lost, store.statistics.places_resting) == (8, 1)


def test_a_peer_that_was_restarted_is_read_again(opened: list[KVStore]) -> None:
    with PeerProcess(f"{URL.replace('127.0.0.1', f'127.0.0.1:{free_port()}')}") as owner:
        owner.put(range(4), SIZE)
        store = told(opened, owner.address)
        assert get(store, range(4)) == [ResultCode.OK] * 4
        owner.restart()
        assert get(store, range(4)) == [ResultCode.MISS] * 4
        owner.put(range(2, 6), SIZE)
        store.hint_location(names(range(64)), owner.address)
        wait_until(lambda: get(store, range(6)) == [ResultCode.MISS] * 2 + [ResultCode.OK] * 4, WAIT_S)


@pytest.mark.parametrize(("said", "code"), [(PeerStatus.FINE, ResultCode.OK), (PeerStatus.OVER, ResultCode.MISS)])
def test_what_was_not_held_until_the_end_is_not_believed(
    opened: list[KVStore], said: PeerStatus, code: ResultCode
) -> None:
    """The peer's time was over while we read: the memory may have had another owner. FINE is the control."""
    owner = peer(opened, transport="mooncake")
    put(owner, range(2))
    held = owner._own.pin_values(names(range(2)))  # pyright: ignore[reportPrivateUsage]
    session = owner._transfer.session  # pyright: ignore[reportPrivateUsage, reportOptionalMemberAccess]
    placed = [
        PlacedValue(Result(ResultCode.OK, SIZE), one.generation, one.addresses) for one in held if one is not None
    ]
    table = encode_placement(PlacementTable(session, placed))

    def answer(channel: PeerChannel, keys: list[str]) -> None:
        if keys:
            channel.send_parts([REPLY_HEAD.pack(PeerStatus.FINE, 2, len(table)), table])
        else:
            channel.send_parts([REPLY_HEAD.pack(said, 0, 0)])

    with Liar(answer) as liar:
        store = told(opened, liar.address)
        assert get(store, range(2)) == [code] * 2
        assert store.statistics.bytes_transferred == (2 * SIZE if code is ResultCode.OK else 0)
        assert store.statistics.values_lost == (0 if code is ResultCode.OK else 2)
    owner._own.unpin_values([one for one in held if one is not None])  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(("host", "asked"), [("127.0.0.2", False), ("127.0.0.1", True)])
def test_memory_that_is_said_to_be_on_another_host_is_not_asked_for(
    opened: list[KVStore], host: str, asked: bool
) -> None:
    """1.0#3.14 holds for what a peer says, too: also where the other host is a peer. The same host is the control."""
    placed = PlacedValue(Result(ResultCode.OK, SIZE), 1, ((1 << 40, SIZE),))
    with socket.create_server((host, 0)) as elsewhere:
        table = encode_placement(PlacementTable(f"{host}:{elsewhere.getsockname()[1]}", [placed, placed]))
        with Liar(lies(table)) as liar:
            store = told(opened, liar.address, peers="127.0.0.0/8")
            ops = [GetOp(key, (memoryview(bytearray(SIZE)),)) for key in names(range(2))]
            job = store.get(ops, 0.5)
            assert codes(job.result()) == [ResultCode.MISS] * 2
            assert store.statistics.values_lost == 2
            elsewhere.settimeout(0.3)
            assert contacted(elsewhere) is asked


@pytest.mark.slow
def test_landing_slots_that_are_lost_are_replaced_a_few_times_and_said(
    opened: list[KVStore], caplog: pytest.LogCaptureFixture
) -> None:
    owner = peer(opened, transport="mooncake")
    put(owner, range(40))
    reader = told(opened, str(owner.address), buffer_bytes=1 << 20)
    transfer = reader._transfer  # pyright: ignore[reportPrivateUsage]
    session = owner._transfer.session  # pyright: ignore[reportPrivateUsage, reportOptionalMemberAccess]
    assert transfer is not None
    first, slots = transfer.landing_area, transfer.landing_area.slots

    def fail() -> None:
        lost = transfer.lost_slots
        slot = transfer.landing_area.lease(WAIT_S)
        assert slot is not None
        assert not transfer.read(session, slot, [(1 << 40, SIZE)], time.monotonic() + WAIT_S)
        wait_until(lambda: transfer.lost_slots == lost + 1)

    for _ in range(slots):
        fail()
    wait_until(lambda: transfer.landing_area is not first)
    assert get(reader, [0]) == [ResultCode.OK]
    assert reader.statistics.bytes_transferred == SIZE
    assert reader.statistics.slots_lost == slots
    while not transfer.is_exhausted:
        fail()
    wait_until(lambda: "no landing slot is left" in caplog.text)
    assert transfer.lost_slots == 4 * slots
    assert get(reader, [1]) == [ResultCode.OK]  # over the connection
    assert reader.statistics.bytes_transferred == SIZE
    assert any("is no longer used" in one.finding for one in advice_from_store(reader))


def test_what_the_doctor_hears_of_an_engine_that_asks_nobody(opened: list[KVStore]) -> None:
    """Also on a loopback address: the engine listens everywhere."""
    found = advice_from_store(peer(opened, transport="mooncake"))
    assert [one.level for one in found] == ["ok", "warning", "warning"]
    assert "can read and write registered memory" in found[1].finding
    assert "authenticated pages" in found[1].action


def test_an_engine_that_takes_no_memory_leaves_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: GuardedTransferEngine, memory: ByteArray) -> None:
        if memory.size > 65 << 20:  # the store's own, not the landing area
            raise StoreError("peer store: not taken")

    monkeypatch.setattr(GuardedTransferEngine, "register_memory", refuse)
    before = threading.enumerate()
    with pytest.raises(StoreError, match="not taken"):
        open_store("peer://127.0.0.1?size=80MiB&transport=mooncake")
    wait_until(lambda: [one.name for one in threading.enumerate() if one not in before and "peer" in one.name] == [])


def test_an_address_that_is_not_there_is_a_failure_and_the_socket_is_used(opened: list[KVStore]) -> None:
    """The engine over there refuses addresses outside of its registered memory; what should have landed is retired."""
    owner = peer(opened, transport="mooncake")
    assert owner.address is not None
    put(owner, range(2))
    [held] = owner._own.pin_values(names([0]))  # pyright: ignore[reportPrivateUsage]
    assert held is not None
    transfer = told(opened, owner.address)._transfer  # pyright: ignore[reportPrivateUsage]
    assert transfer is not None
    session = owner._transfer.session  # pyright: ignore[reportPrivateUsage, reportOptionalMemberAccess]
    slot = transfer.landing_area.lease()
    assert slot is not None
    assert transfer.read(session, slot, held.addresses, time.monotonic() + WAIT_S)  # the control
    assert slot.view[:SIZE] == page(0, SIZE)
    slot.release()
    free = transfer.landing_area.free_slots
    slot = transfer.landing_area.lease()
    assert slot is not None
    assert not transfer.read(session, slot, [(1 << 40, SIZE)], time.monotonic() + WAIT_S)
    wait_until(lambda: transfer.lost_slots == 1)
    assert transfer.landing_area.free_slots == free - 1
    owner._own.unpin_values([held])  # pyright: ignore[reportPrivateUsage]


def test_puts_of_many_threads_read_by_a_transfer_engine(opened: list[KVStore]) -> None:
    """What is overwritten between the hold and the return would show here."""
    owner = peer(opened, size="2MiB", transport="mooncake")
    reader = told(opened, str(owner.address))
    seen = 0
    for round_ in range(60):
        seeds = [(round_ * 11 + number) % 64 for number in range(8)]
        jobs = [owner.put([PutOp(f"key-{seed}", (page(seed, SIZE),))], WAIT_S) for seed in seeds]
        seen += get(reader, seeds).count(ResultCode.OK)
        for job in jobs:
            job.result()
    assert seen > 0
