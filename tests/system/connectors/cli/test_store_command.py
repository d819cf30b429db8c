"""Tests `kvparams store`: speeds beside floors, and the display of one page."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvparams.cli import main
from kvparams.keys import Geometry, KVShard, Namespace, chain_pages, page_key
from kvparams.page_auth import PageAuthKeys
from kvparams.pages import HEADER_BYTES, PageIdentity, page_identity, read_claim, seal
from kvparams_connectors.cli.loopback_peer import LoopbackPeer, run_loopback_peer
from kvparams_connectors.cli.store_benchmark import BenchmarkPlan, format_size, measure_lookup_s, run_benchmark
from kvparams_connectors.conformance import Fault, FaultyStore
from kvparams_connectors.conformance.helpers import make_value
from kvparams_connectors.store import PutOp, open_store
from kvparams_connectors.store_url import StoreError, parse_size
from kvparams_connectors.stores.memory.store import MemoryStore
from tests.support.connectors.valkey_server import ValkeyServer

SHAPE = Geometry(layers=2, kv_heads=2, k_dim=8, v_dim=8)
SPACE = Namespace("model", "revision", "float16", SHAPE, page_tokens=8)
PART = KVShard.whole(SHAPE)
PAGES = chain_pages(SPACE, list(range(16)))
KEY, OTHER = (page_key(SPACE, page, PART) for page in PAGES)
IDENTITY = page_identity(SPACE, PAGES[0], PART)
SECRET = b"a prompt that nobody should see "


def page(keys: PageAuthKeys | None = None) -> memoryview:
    content = (SECRET * 100)[: IDENTITY.payload_bytes]
    buffer = memoryview(bytearray(bytes(HEADER_BYTES) + content))
    seal(buffer, IDENTITY, None if keys is None else keys.for_tenant("acme"))
    return buffer


class Shelf:
    """A store in a file, and what is in it."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file://{folder}/store?size=8MiB"

    def put(self, key: str, value: memoryview) -> None:
        store = open_store(self.url)
        assert store.put([PutOp(key, (value,))]).result()[0].nbytes == value.nbytes
        store.close()


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


@pytest.fixture(scope="module")
def floor() -> Iterator[LoopbackPeer]:
    with run_loopback_peer() as found:
        yield found


def test_bench_prints_a_table_and_leaves_nothing_behind(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shelf.put("mine", page())
    picture = tmp_path / "speed.svg"
    arguments = [
        "--sizes",
        "16KiB,64KiB",
        "--threads",
        "1,2",
        "--rounds",
        "2",
        "--working-set",
        "256KiB",
        "--batch",
        "4",
    ]
    assert main(["store", "bench", shelf.url, *arguments, "--plot", str(picture)]) == 0
    said = capsys.readouterr()
    rows = [line.split() for line in said.out.splitlines() if re.match(r"\s*\d+ KiB", line)]
    assert [(row[0], row[2]) for row in rows] == [("16", "1"), ("16", "2"), ("64", "1"), ("64", "2")]
    assert all(float(figure) > 0 for row in rows for figure in row[3:5])
    assert "lookup of 1000 missing keys" in said.out
    assert "SOCKET: the same pages over a TCP connection" in said.out
    assert said.err == f"the plot is in {picture}\n"
    assert "<svg" in picture.read_text()
    store = open_store(shelf.url)
    try:
        assert store.exists(["mine"]).result()[0].nbytes == page().nbytes
        unit = 64 << 10
        assert store.put(
            [PutOp("fills", (memoryview(bytearray(store.capabilities.max_value_bytes - 8 * unit)),))]
        ).result()
        assert store.exists(["mine"]).result()[0].nbytes == page().nbytes  # nothing of the bench takes room
    finally:
        store.close()


def test_a_store_that_changes_bytes_is_not_measured(floor: LoopbackPeer) -> None:
    inner = MemoryStore(4 << 20, unit_bytes=4096)
    store = FaultyStore(inner, lambda operation, _: Fault("flip", at=9000) if operation == "get" else None)
    with pytest.raises(StoreError, match="do not use this store"):
        run_benchmark(store, floor, BenchmarkPlan(16384, 2, 4, 2, 2), lambda _: None)
    store.close()
    inner.close()


def test_a_store_with_too_little_room_is_told_from_a_slow_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["store", "bench", "memory:?size=1MiB", "--sizes", "256KiB", "--rounds", "1"]) == 2
    assert "--working-set" in capsys.readouterr().err


def test_the_lookup_of_a_store_that_fails_is_an_error() -> None:
    inner = MemoryStore(1 << 20, unit_bytes=4096)
    store = FaultyStore(inner, lambda operation, key: Fault("fail"))
    with pytest.raises(StoreError, match="unavailable"):
        measure_lookup_s(store)
    store.close()
    inner.close()


def test_the_bare_connection_carries_what_it_is_given(floor: LoopbackPeer) -> None:
    """The other process gives back what it was sent last: so both directions are seen to carry real bytes."""
    for size in (1, 100_000, 3 << 20, 7):
        source, target = make_value(size, size), memoryview(bytearray(size))
        floor.put(source)
        floor.get(target)
        assert target == source


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sizes", "1KiB"], "4KiB to 256MiB"),
        (["--sizes", "1MB"], "not a size"),
        (["--threads", "0"], "whole number"),
        (["--threads", "65"], "at most 64"),
        (["--rounds", "x"], "whole number"),
    ],
)
def test_a_wrong_option_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["store", "bench", "memory:?size=1MiB", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_inspect_shows_the_header_and_never_the_content(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    shelf.put(KEY, page())
    assert main(["store", "inspect", shelf.url, KEY]) == 0
    said = capsys.readouterr().out
    for text in (SPACE.digest.hex(), PAGES[0].chain.hex(), "tokens          8", "layers          0 to 1", "good:"):
        assert text in said
    assert "prompt" not in said
    assert SECRET.hex()[:16] not in said


def test_inspect_writes_the_content_where_it_is_asked_to(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shelf.put(KEY, page())
    path = tmp_path / "payload"
    assert main(["store", "inspect", shelf.url, KEY, "--content", str(path)]) == 0
    assert path.read_bytes() == bytes(page()[HEADER_BYTES:])
    assert path.stat().st_mode & 0o777 == 0o600
    assert main(["store", "inspect", shelf.url, KEY, "--content", str(path)]) == 2  # nothing is overwritten
    assert "cannot be written" in capsys.readouterr().err


def flipped(at: int) -> memoryview:
    found = page()
    found[at] ^= 1
    return found


@pytest.mark.parametrize(
    ("key", "stored", "words"),
    [
        (KEY, flipped(HEADER_BYTES + 5), "flipped_payload"),
        (KEY, flipped(60), "flipped_header"),
        (KEY, page()[:-1], "torn"),
        (KEY, memoryview(b"something else" * 30), "no page"),
        (KEY, memoryview(b"short"), "no page"),
        (OTHER, page(), "the chain of the key is"),
        ("another", page(), "the key is not a page key"),
    ],
)
def test_inspect_says_what_is_wrong_with_a_page(
    shelf: Shelf, capsys: pytest.CaptureFixture[str], key: str, stored: memoryview, words: str
) -> None:
    shelf.put(key, stored)
    assert main(["store", "inspect", shelf.url, key]) == 1
    said = capsys.readouterr().out
    assert words in said
    assert "verdict         bad" in said


def test_inspect_says_where_a_key_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["store", "inspect", "--help"])
    assert "kv_transfer_params.kvparams.load_keys" in capsys.readouterr().out


def test_inspect_says_that_there_is_no_such_key(shelf: Shelf, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "inspect", shelf.url, KEY]) == 1
    assert "has no value for the key" in capsys.readouterr().err


def test_inspect_checks_a_tag_with_the_keys_it_is_given(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = PageAuthKeys([bytes(range(32))])
    shelf.put(KEY, page(keys))
    file = tmp_path / "keys"
    file.write_text(f"{bytes(range(32)).hex()}\n")
    file.chmod(0o600)
    with_keys = ["--seal-keys", str(file)]
    assert main(["store", "inspect", shelf.url, KEY]) == 1
    assert "add --seal-keys FILE" in capsys.readouterr().out
    assert main(["store", "inspect", shelf.url, KEY, *with_keys]) == 1
    assert "forged" in capsys.readouterr().out  # another tenant's
    assert main(["store", "inspect", shelf.url, KEY, *with_keys, "--cache-salt", "acme"]) == 0
    said = capsys.readouterr().out
    assert keys.key_ids[0] in said
    assert "aes-256-gmac" in said
    assert main(["store", "inspect", shelf.url, KEY, "--cache-salt", "acme"]) == 2
    assert "--seal-keys" in capsys.readouterr().err


def test_what_a_header_claims_is_read_or_refused() -> None:
    assert read_claim(page()).identity == IDENTITY
    assert isinstance(read_claim(page()).identity, PageIdentity)
    impossible = page()
    impossible[16:32] = b"\xff" * 16
    for wrong in (page()[:255], memoryview(bytes(300)), impossible):
        with pytest.raises(ValueError, match=r"fewer|start|must be in"):
            read_claim(wrong)


@pytest.mark.parametrize("action", [["doctor"], ["store", "inspect"], ["store", "bench"]], ids=" ".join)
@pytest.mark.parametrize("tier", [False, True], ids=["alone", "as-a-tier"])
def test_a_mistyped_file_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: list[str], tier: bool
) -> None:
    path = tmp_path / "no-such-file"
    url = f"tiered:?l1=memory%3A%3Fsize%3D8MiB&l2=file%3A%2F%2F{path}" if tier else f"file://{path}"
    assert main([*action, url, *(["key"] if "inspect" in action else [])]) in (1, 2)
    said = capsys.readouterr()
    assert f"{path} does not exist. Check the path" in said.out + said.err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_or_has_a_size_is_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The control."""
    path = tmp_path / "store"
    for url in (f"file://{path}?size=4MiB", f"file://{path}"):
        assert main(["store", "inspect", url, KEY]) == 1
        assert "has no value for the key" in capsys.readouterr().err
    assert path.stat().st_size == 4 << 20


@pytest.mark.slow
def test_a_store_that_stops_is_told_soon_and_in_words(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path / "valkey")
    stopped = threading.Event()

    def stop(text: str) -> None:
        if "round 2" in text and not stopped.is_set():
            server.stop()
            stopped.set()

    try:
        server.start()
        store = open_store(server.url)
        began = time.monotonic()
        with (
            run_loopback_peer() as floor,
            pytest.raises(StoreError, match="ended with timeout: the store has stopped, or is slower"),
        ):
            run_benchmark(store, floor, BenchmarkPlan(16384, 1, 8, 4, 1000), stop)
        assert stopped.is_set()
        assert time.monotonic() - began < 20
        store.close()
    finally:
        server.kill()


@pytest.mark.parametrize("nbytes", [4 << 10, 96 << 10, 1 << 20, 3 << 19])
def test_the_sizes_of_pages_are_written_as_they_are_given(nbytes: int) -> None:
    assert parse_size(format_size(nbytes).replace(" ", "")) == nbytes


def test_a_store_that_cannot_be_opened_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for action in (["bench", "memory:?sise=1"], ["inspect", "file:///nowhere/at/all?size=1MiB", "key"]):
        assert main(["store", *action]) == 2
        said = capsys.readouterr()
        assert said.err.startswith("kvparams: ")
        assert len(said.err.splitlines()) == 1
