"""Tests the peer store: the conformance suite alone and over the network, leases, hints, allowed peers, secrets."""

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from urllib.parse import quote

import pytest

from kvparams.params import PROTOCOL_VERSION, Endpoint, KVTransferParams, Transfer
from kvparams_connectors.advice import advice_from_store
from kvparams_connectors.cli.store_diagnosis import examine_store
from kvparams_connectors.conformance import Floors, Opener, StoreConformance
from kvparams_connectors.conformance.toy_engine import block_table, make_tokens, toy_engine
from kvparams_connectors.store import GetOp, KVStore, Result, ResultCode, open_store
from kvparams_connectors.store_url import StoreError, StoreURL
from kvparams_connectors.stores.memory.store import MemoryStore
from kvparams_connectors.stores.peer.addresses import LOOPBACK_HOSTS, AllowedPeers, PeerAddress, parse_peer_address
from kvparams_connectors.stores.peer.connections import PeerConnections
from kvparams_connectors.stores.peer.key_locations import KeyLocations
from kvparams_connectors.stores.peer.settings import PeerSettings, url_for_rank
from kvparams_connectors.stores.peer.store import PeerStore
from kvparams_connectors.stores.tiered.store import TieredStore
from tests.support.connectors.peer_across import Across
from tests.support.connectors.peer_process import PeerProcess, page
from tests.support.connectors.peer_steps import SIZE, WAIT_S, a_listener, contacted, get, names, peer, put
from tests.support.connectors.steps import codes
from tests.support.connectors.valkey_relay import Relay
from tests.support.connectors.valkey_server import ValkeyServer


class TestAlone(StoreConformance):
    """One peer store, which nobody reads from."""

    at_least = Floors(put=0.02, get=0.05)

    @pytest.fixture
    def opener(self, opened: list[KVStore]) -> Opener:  # pyright: ignore[reportIncompatibleMethodOverride]
        return lambda: peer(opened)


class TestThroughTheNetwork(StoreConformance):
    """What one peer store puts is read by another one: every level holds for the way over the socket as well."""

    at_least = Floors(put=0.02, get=0.01)

    @pytest.fixture
    def opener(self, opened: list[KVStore]) -> Opener:  # pyright: ignore[reportIncompatibleMethodOverride]
        def open_one() -> KVStore:
            opened.append(Across(peer(opened), peer(opened, "127.0.0.1:0")))
            return opened[-1]

        return open_one


# ---- settings


@pytest.mark.parametrize(
    ("url", "rank", "found"),
    [
        ("peer://127.0.0.1:7400?size=1MiB&ports=7400-7499", 0, "peer://127.0.0.1:7400?size=1MiB&ports=7400-7499"),
        ("peer://127.0.0.1:7400?size=1MiB&ports=7400-7499", 3, "peer://127.0.0.1:7403?size=1MiB&ports=7400-7499"),
        ("peer://[::1]:7400", 1, "peer://[::1]:7401"),
        ("peer://node-5:7400/", 1, "peer://node-5:7401/"),
        ("peer://127.0.0.1:0?size=1MiB", 1, "peer://127.0.0.1:0?size=1MiB"),
        ("peer://127.0.0.1?size=1MiB", 1, "peer://127.0.0.1?size=1MiB"),
        ("valkey://127.0.0.1:7400", 1, "valkey://127.0.0.1:7400"),
        ("file:///tmp/kv?size=1MiB", 1, "file:///tmp/kv?size=1MiB"),
    ],
)
def test_engines_of_one_machine_have_ports_of_their_own(url: str, rank: int, found: str) -> None:
    assert url_for_rank(url, rank) == found


def test_a_rank_without_a_port_is_refused() -> None:
    with pytest.raises(StoreError, match="rank 2 of this machine would listen at port 65537"):
        url_for_rank("peer://127.0.0.1:65535", 2)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("peer://", "has no address to listen on"),
        ("peer://127.0.0.1:70000", "is not a host and a port"),
        ("peer://127.0.0.1/path", "has no address to listen on"),
        ("peer://user@127.0.0.1:1", "has a user or password before the host"),
        ("peer://127.0.0.1?sise=1GiB", "sise: is not known here; did you mean size"),
        ("peer://10.0.0.5:7400", "peers is missing"),
        ("peer://0.0.0.0:7400?peers=10.0.0.0/8", "set local="),
        ("peer://127.0.0.1?local=a/b", "local: must be a host name"),
        ("peer://127.0.0.1?peers=10.0.0.0/33", "no network, address or name"),
        ("peer://127.0.0.1?peers=10.0.0.1/8", "no network, address or name"),
        ("peer://127.0.0.1?peers=10.0.0", "no network, address or name"),
        ("peer://127.0.0.1?peers=a,,b", "no network, address or name"),
        ("peer://127.0.0.1?ports=0-5", "ports: must be a port or a range"),
        ("peer://127.0.0.1?ports=9-5", "ports: must be a port or a range"),
        ("peer://127.0.0.1?transport=udp", "transport: must be one of tcp, mooncake, rdma"),
        ("peer://127.0.0.1?protocol=rdma", "protocol: is not known here"),
        ("peer://127.0.0.1?devices=a b", "devices"),
        ("peer://127.0.0.1?lease=-1", "lease: must be a whole number of seconds from 0 to 86400"),
        ("peer://127.0.0.1?secret_file=/nowhere/secret", "secret_file cannot be read"),
        ("peer://127.0.0.1?size=1KiB", "less than one unit"),
        ("peer://0:7400?peers=10.0.0.0/8", "neither an address nor a name"),
        ("peer://127.1", "neither an address nor a name"),
        ("peer://127.0.0.1?local=0x7f000001", "neither an address nor a name"),
        ("peer://127.0.0.1?transport=mooncake&local=" + "h" * 241, "at most 240 characters"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(url: str, words: str) -> None:
    with pytest.raises(StoreError, match=r"peer store|memory store") as error:
        open_store(url)
    assert words in str(error.value)


def test_a_port_that_is_taken_is_said(opened: list[KVStore]) -> None:
    first = peer(opened)
    assert first.address is not None
    with pytest.raises(StoreError, match="cannot listen"):
        open_store(f"peer://{first.address}")


def test_where_others_can_read(opened: list[KVStore]) -> None:
    assert peer(opened, "127.0.0.1:0").address is None
    store = peer(opened, local="node-5")
    assert store.address is not None
    place = parse_peer_address(store.address)
    assert place is not None
    assert place.host == "node-5"
    assert parse_peer_address(str(PeerAddress("::1", 7400))) == PeerAddress("::1", 7400)
    six = peer(opened, "[::1]")
    assert six.address is not None
    assert six.address.startswith("[::1]:")
    put(six, [1])
    reader = peer(opened, "127.0.0.1:0")
    reader.hint_location(names([1]), six.address)
    assert get(reader, [1]) == [ResultCode.OK]


def test_what_the_doctor_hears(opened: list[KVStore], tmp_path: Path) -> None:
    assert [advice.level for advice in advice_from_store(peer(opened))] == ["ok"]
    open_to_all = peer(opened, "0.0.0.0", local="127.0.0.1", peers="127.0.0.0/8")
    assert [advice.level for advice in advice_from_store(open_to_all)] == ["ok", "warning"]
    secret = tmp_path / "secret"
    secret.write_text("x" * 32)
    guarded = peer(opened, "0.0.0.0", local="127.0.0.1", peers="127.0.0.0/8", secret_file=str(secret))
    assert [advice.level for advice in advice_from_store(guarded)] == ["ok"]
    seen = list(examine_store("peer://127.0.0.1?size=64MiB"))
    assert "error" not in [advice.level for advice in seen]
    assert "no other process can read this store" not in [advice.finding for advice in seen]
    assert "no other process can read this store" in [one.finding for one in examine_store("memory:?size=64MiB")]


def test_a_secret_with_an_engine_that_asks_for_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x" * 32)
    with pytest.raises(StoreError, match="does not protect Mooncake's transfer engine"):
        open_store(f"peer://127.0.0.1?transport=mooncake&secret_file={tmp_path}/secret")


# ---- leases


def test_what_was_put_is_leased_and_nothing_evicts_it(opened: list[KVStore]) -> None:
    store = peer(opened, size="1MiB", lease=30)
    assert put(store, range(10)) == [ResultCode.OK] * 10
    assert put(store, [10]) == [ResultCode.FULL]
    assert get(store, range(10)) == [ResultCode.OK] * 10
    assert codes(store.delete(names([3]), WAIT_S).result()) == [ResultCode.OK]  # a release waits for no lease
    assert put(store, [10]) == [ResultCode.OK]
    assert get(store, [3]) == [ResultCode.MISS]


def test_without_a_lease_the_oldest_goes(opened: list[KVStore]) -> None:
    """The control of the test before."""
    store = peer(opened, size="1MiB", lease=0)
    assert put(store, range(10)) == [ResultCode.OK] * 10
    assert put(store, [10]) == [ResultCode.OK]
    assert sorted(get(store, range(10)), key=lambda code: code.name) == [ResultCode.MISS] + [ResultCode.OK] * 9


def test_a_lease_ends_and_being_found_renews_it(opened: list[KVStore]) -> None:
    store = peer(opened, size="1MiB", lease=1)
    start = time.monotonic()
    assert put(store, range(10)) == [ResultCode.OK] * 10
    until = time.monotonic() + WAIT_S
    while put(store, [10]) == [ResultCode.FULL]:
        assert time.monotonic() < until
        assert put(store, [0]) == [ResultCode.EXISTS]  # found, and so leased anew
        assert get(store, [1]) == [ResultCode.OK]
        assert codes(store.exists(names([2]), WAIT_S).result()) == [ResultCode.OK]
    assert time.monotonic() - start >= 1
    while (said := put(store, [11, 12, 13, 14, 15, 16])) != [ResultCode.OK] * 6:
        assert time.monotonic() < until
        assert said[-1] is not ResultCode.OK
        assert get(store, [0, 1, 2]) == [ResultCode.OK] * 3
    assert get(store, [0, 1, 2]) == [ResultCode.OK] * 3


def test_others_that_read_renew_no_lease(opened: list[KVStore]) -> None:
    owner, reader = peer(opened, size="1MiB", lease=1), peer(opened, "127.0.0.1:0")
    assert owner.address is not None
    put(owner, range(10))
    reader.hint_location(names(range(10)), owner.address)
    until = time.monotonic() + WAIT_S
    while put(owner, [10]) == [ResultCode.FULL]:
        assert time.monotonic() < until
        get(reader, range(10))
    assert get(owner, [10]) == [ResultCode.OK]


# ---- hints, and whom it asks


def test_the_newest_hint_of_a_key_counts_for_a_while() -> None:
    located = KeyLocations(3, 10.0)
    here, there = PeerAddress("10.0.0.1", 1), PeerAddress("10.0.0.2", 2)
    located.add(["a", "b"], here, 0.0)
    located.add(["b"], there, 5.0)
    assert located.find(["a", "b", "c"], 9.0) == [here, there, None]
    assert located.find(["a", "b"], 12.0) == [None, there]
    located.add(["c", "d", "e"], here, 12.0)  # there is room for three
    assert located.find(["b", "c", "d", "e"], 12.0) == [None, here, here, here]
    located.forget(["c", "unknown"])
    assert located.find(["c", "d"], 12.0) == [None, here]
    located.forget(["d", "e"], there)  # it was not said to be there
    assert located.find(["d", "e"], 12.0) == [here, here]
    located.forget(["d", "e"], here)
    assert located.find(["d", "e"], 12.0) == [None, None]


@pytest.mark.parametrize(
    ("hosts", "place", "allowed"),
    [
        (LOOPBACK_HOSTS, "127.0.0.1:1", True),
        (LOOPBACK_HOSTS, "127.9.9.9:65535", True),
        (LOOPBACK_HOSTS, "[::1]:5", True),
        (LOOPBACK_HOSTS, "[::ffff:127.0.0.1]:5", True),
        (LOOPBACK_HOSTS, "LocalHost:5", True),
        (LOOPBACK_HOSTS, "10.0.0.1:5", False),
        (LOOPBACK_HOSTS, "[::ffff:10.0.0.1]:5", False),
        (LOOPBACK_HOSTS, "0.0.0.0:5", False),
        (LOOPBACK_HOSTS, "localhost.example.org:5", False),
        (LOOPBACK_HOSTS, "127.0.0.1.example.org:5", False),
        (LOOPBACK_HOSTS, "2130706433:5", False),  # 127.0.0.1 as some resolvers read it
        (LOOPBACK_HOSTS, "0x7f.1:5", False),
        ("10.0.0.0/8,node-5", "10.200.0.1:5", True),
        ("10.0.0.0/8,node-5", "node-5:5", True),
        ("10.0.0.0/8,node-5", "node-6:5", False),
        ("10.0.0.0/8,node-5", "11.0.0.1:5", False),
    ],
)
def test_whom_it_may_ask(hosts: str, place: str, allowed: bool) -> None:
    parsed = parse_peer_address(place)
    assert parsed is not None
    assert (parsed in AllowedPeers(hosts)) is allowed
    assert parsed not in AllowedPeers(hosts, range(7400, 7500))


@pytest.mark.parametrize(
    "text",
    [
        *("", "host", "host:", ":5", "host:0", "host:65536", "host:5:5", "http://host:5", "a b:5", "host:5/x", "u@h:5"),
        *("[::1:5", "::1:5", "[fe80::1%eth0]:5", "host:+5", "h" * 254 + ":5"),
    ],
)
def test_what_is_no_place_is_none(text: str) -> None:
    assert parse_peer_address(text) is None


def a_document(address: str) -> KVTransferParams:
    return KVTransferParams(
        version=PROTOCOL_VERSION,
        request_id="r",
        transfer=Transfer(id="t", attempt=1),
        phase="decode",
        mode="store",
        producer=Endpoint(id="p", incarnation="i", address=address),
    )


def test_an_address_that_is_not_allowed_is_never_contacted(opened: list[KVStore]) -> None:
    """1.0#3.14: whatever a document says, only peers are asked; the control is the same store with this peer."""
    with a_listener() as listener:
        forged = f"127.0.0.1:{listener.getsockname()[1]}"
        elsewhere = peer(opened, peers="10.0.0.0/8,localhost")  # a name is not its address
        other_port = peer(opened, ports="1-2")
        for store in (elsewhere, other_port):
            store.hint_location(names([1]), forged)
            assert get(store, [1]) == [ResultCode.MISS]
            assert codes(store.exists(names([1]), WAIT_S).result()) == [ResultCode.MISS]
            with toy_engine(store) as engine:
                plan = engine.connector.plan(make_tokens(20), a_document(forged))
                assert plan.source == forged
                assert engine.connector.lookup(plan).result().tokens == 0
                assert engine.connector.load(plan, block_table(1), 0, 20).result().end_token == 0
            assert not contacted(listener)
            assert store.statistics.connections == 0
            assert store.statistics.places_refused == 3
        control = peer(opened, connect_s=0.1)
        control.hint_location(names([1]), forged)
        assert get(control, [1]) == [ResultCode.MISS]
        assert control.statistics.values_lost == 1
        assert contacted(listener)


def test_no_connection_is_made_to_whom_is_not_allowed() -> None:
    """Whoever asks: the connections themselves look, too. Allowed, it is the control."""
    with a_listener() as listener:
        place = parse_peer_address(f"127.0.0.1:{listener.getsockname()[1]}")
        assert place is not None
        closed = PeerConnections(AllowedPeers("10.0.0.0/8"), secret=b"", connect_s=0.1)
        with pytest.raises(PermissionError, match="not among the peers"):
            closed.acquire(place, time.monotonic() + WAIT_S)
        assert not contacted(listener)
        with pytest.raises(TimeoutError):
            PeerConnections(AllowedPeers(LOOPBACK_HOSTS), secret=b"", connect_s=0.1).acquire(
                place, time.monotonic() + WAIT_S
            )
        assert contacted(listener)


def test_a_hint_to_itself_asks_nobody(opened: list[KVStore]) -> None:
    store = peer(opened)
    assert store.address is not None
    store.hint_location(names([1]), store.address)
    assert get(store, [1]) == [ResultCode.MISS]
    assert store.statistics.connections == 0


# ---- reading from another process


def test_pages_are_read_from_the_process_that_made_them(opened: list[KVStore]) -> None:
    with PeerProcess("peer://127.0.0.1?size=16MiB") as owner:
        assert owner.put(range(8), SIZE) == ["OK"] * 8
        store = peer(opened, "127.0.0.1:0")
        assert get(store, [0]) == [ResultCode.MISS]  # nobody has said where
        store.hint_location(names(range(12)), owner.address)
        assert get(store, range(12)) == [ResultCode.OK] * 8 + [ResultCode.MISS] * 4
        assert store.exists(names([0, 9, 1]), WAIT_S).result() == [
            Result(ResultCode.OK, SIZE),
            Result(ResultCode.MISS),
            Result(ResultCode.OK, SIZE),
        ]
        assert put(store, [3, 20]) == [ResultCode.OK, ResultCode.OK]
        assert get(store, [3, 20, 4]) == [ResultCode.OK] * 3  # its own, and another's
        assert owner.delete([4]) == ["OK"]
        assert get(store, [4]) == [ResultCode.MISS]
        assert owner.put([4], SIZE) == ["OK"]
        assert get(store, [4]) == [
            ResultCode.MISS
        ]  # it was not there: nobody is asked again, until somebody says it is
        store.hint_location(names([4]), owner.address)
        assert get(store, [4]) == [ResultCode.OK]
        assert codes(store.delete(names([5]), WAIT_S).result()) == [ResultCode.MISS]  # it is the other's
        assert get(store, [5]) == [ResultCode.OK]
        store.quarantine(names([5]))
        assert get(store, [5]) == [ResultCode.MISS]
        assert store.statistics.connections == 1
        assert store.statistics.bytes_read == SIZE * 11


def test_a_lookup_is_one_round_trip_and_so_is_a_batch_of_values(opened: list[KVStore]) -> None:
    owner, reader = peer(opened), peer(opened, "127.0.0.1:0")
    put(owner, range(1000), 100)
    with Relay(int(str(owner.address).rpartition(":")[2]), delay_s=0.02) as relay:
        reader.hint_location(names(range(1000)), f"127.0.0.1:{relay.port}")
        assert get(reader, [0], 100) == [ResultCode.OK]  # connected
        before = relay.round_trips
        assert codes(reader.exists(names(range(1000)), WAIT_S).result()) == [ResultCode.OK] * 1000
        assert relay.round_trips == before + 1
        assert get(reader, range(1000), 100) == [ResultCode.OK] * 1000
        assert relay.round_trips == before + 2


def test_batches_of_more_keys_than_one_request_takes(opened: list[KVStore]) -> None:
    owner, reader = peer(opened, size="64MiB"), peer(opened, "127.0.0.1:0")
    assert owner.address is not None
    seeds = range(5000)
    put(owner, seeds, 100)
    reader.hint_location(names(range(6000)), owner.address)
    assert get(reader, seeds, 100) == [ResultCode.OK] * 5000
    found = codes(reader.exists(names(range(6000)), WAIT_S).result())
    assert found == [ResultCode.OK] * 5000 + [ResultCode.MISS] * 1000
    assert reader.statistics.connections == 1


@pytest.mark.parametrize("ours", ["secret", "other", "none"])
@pytest.mark.parametrize("theirs", ["secret", "none"])
def test_only_who_knows_the_secret_reads(opened: list[KVStore], tmp_path: Path, ours: str, theirs: str) -> None:
    for name in ("secret", "other"):
        (tmp_path / name).write_text(f"{name} " * 5 + "\n")

    def open_with(which: str, place: str) -> PeerStore:
        more = {} if which == "none" else {"secret_file": str(tmp_path / which)}
        return peer(opened, place, **more)

    owner, reader = open_with(theirs, "127.0.0.1"), open_with(ours, "127.0.0.1:0")
    assert owner.address is not None
    put(owner, [1])
    reader.hint_location(names([1]), owner.address)
    if ours == theirs:
        assert get(reader, [1]) == [ResultCode.OK]
    else:
        assert get(reader, [1]) == [ResultCode.MISS]
        assert (reader.statistics.values_lost, reader.statistics.places_resting) == (1, 1)
        assert owner.statistics.bytes_served == 0


def test_a_secret_is_shown_nowhere(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("do-not-show-me-please")
    settings = PeerSettings.of(StoreURL.parse(f"peer://127.0.0.1?secret_file={tmp_path}/secret"))
    assert settings.secret == b"do-not-show-me-please"
    assert "show-me" not in repr(settings)
    (tmp_path / "short").write_text("short")
    with pytest.raises(StoreError, match="not one line of 16"):
        open_store(f"peer://127.0.0.1?secret_file={tmp_path}/short")


# ---- under a connector, and as a tier


def test_kv_travels_from_one_engine_to_the_other_by_the_document_alone(opened: list[KVStore]) -> None:
    prefill, decode = peer(opened), peer(opened, "127.0.0.1:0")
    assert prefill.address is not None
    with toy_engine(prefill, seed=1) as producer, toy_engine(decode) as consumer:
        plan = producer.connector.plan(make_tokens(60))
        assert producer.connector.save(plan, block_table(1), 0, 60).result().saved == len(plan.pages)
        blind = consumer.connector.plan(make_tokens(60))
        assert consumer.connector.lookup(blind).result().tokens == 0
        told = consumer.connector.plan(make_tokens(60), a_document(prefill.address))
        assert consumer.connector.lookup(told).result().tokens == 60
        assert consumer.connector.load(told, block_table(2), 0, 60).result().end_token == 60
        ours, theirs = consumer.sequence(block_table(2)), producer.sequence(block_table(1))
        assert ours[:, :, :60].equal(theirs[:, :, :60])
        assert producer.connector.release(plan).result().deleted == 1
        assert consumer.connector.lookup(told).result().tokens == 56


def test_a_flipped_byte_in_the_peers_memory_is_never_loaded(opened: list[KVStore]) -> None:
    prefill, decode = peer(opened), peer(opened, "127.0.0.1:0")
    assert prefill.address is not None
    with toy_engine(prefill, seed=1) as producer, toy_engine(decode) as consumer:
        plan = producer.connector.plan(make_tokens(60))
        producer.connector.save(plan, block_table(1), 0, 60).result()
        memory = prefill._own.buffer  # pyright: ignore[reportPrivateUsage]
        [held] = prefill._own.pin_values([plan.keys[2]])  # pyright: ignore[reportPrivateUsage]
        assert held is not None
        memory[held.addresses[0][0] - memory.ctypes.data + 300] ^= 1
        prefill._own.unpin_values([held])  # pyright: ignore[reportPrivateUsage]
        told = consumer.connector.plan(make_tokens(60), a_document(prefill.address))
        report = consumer.connector.load(told, block_table(2), 0, 60).result()
        assert (report.end_token, [page.reason for page in report.refused]) == (16, ["flipped_payload"])
        assert consumer.connector.lookup(told).result().tokens >= 16


@pytest.fixture(params=["file", "valkey"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store that everybody shares: its URL."""
    if request.param == "file":
        yield f"file://{tmp_path}/store?size=16MiB"
        return
    with ValkeyServer(tmp_path / "server") as server:
        yield server.url


def test_peer_first_then_the_shared_store(opened: list[KVStore], shared: str) -> None:
    second = quote(shared, safe="")

    def tiers(place: str) -> TieredStore:
        store = open_store(f"tiered:?l1={quote(f'peer://{place}?size=4MiB&lease=0', safe='')}&l2={second}")
        assert isinstance(store, TieredStore)
        opened.append(store)
        return store

    prefill, decode = tiers("127.0.0.1"), tiers("127.0.0.1:0")
    assert prefill.address is not None
    assert decode.address is None
    assert put(prefill, range(6)) == [ResultCode.OK] * 6
    decode.hint_location(names(range(6)), prefill.address)
    assert get(decode, range(6)) == [ResultCode.OK] * 6
    assert decode.statistics.found == (6, 0)
    prefill.close()  # the peer is gone; the shared store has everything
    assert get(decode, range(6)) == [ResultCode.OK] * 6
    assert decode.statistics.found == (6, 6)


# ---- the memory that others read


def test_what_is_held_is_not_overwritten(opened: list[KVStore]) -> None:
    store = MemoryStore(1 << 20, unit_bytes=4096)
    opened.append(store)
    assert put(store, [1]) == [ResultCode.OK]
    [held, nothing] = store.pin_values(names([1, 2]))
    assert nothing is None
    assert held is not None
    store.delete(names([1]), WAIT_S).result()
    for seed in range(100, 140):
        put(store, [seed])
    assert b"".join(held.views) == page(1, SIZE)
    assert put(store, [1]) == [ResultCode.OK]
    [again] = store.pin_values(names([1]))
    assert again is not None
    assert again.generation > held.generation
    store.unpin_values([held, again])
    for seed in range(200, 240):
        put(store, [seed])
    assert b"".join(held.views) != page(1, SIZE)  # the control: let go, it was overwritten


def test_random_sizes_through_the_network(opened: list[KVStore]) -> None:
    owner, reader = peer(opened), peer(opened, "127.0.0.1:0")
    assert owner.address is not None
    random = Random(7)
    for round_ in range(20):
        sizes = {round_ * 100 + number: random.choice([0, 1, 4095, 4096, 4097, 70_000]) for number in range(20)}
        for seed, size in sizes.items():
            assert put(owner, [seed], size) == [ResultCode.OK]
        reader.hint_location(names(list(sizes)), owner.address)
        targets = {
            seed: [memoryview(bytearray(size // 2)), memoryview(bytearray(size))] for seed, size in sizes.items()
        }
        results = reader.get([GetOp(f"key-{seed}", parts) for seed, parts in targets.items()], WAIT_S).result()
        for (seed, size), result in zip(sizes.items(), results, strict=True):
            assert result == Result(ResultCode.OK, size)
            assert b"".join(targets[seed])[:size] == page(seed, size)
