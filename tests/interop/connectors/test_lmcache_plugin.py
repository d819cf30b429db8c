"""Tests our stores under LMCache 0.5.6's own `StorageManager`: stored chunks come back, and damaged ones never do.

LMCache runs in a process of its own, configured by its own YAML. A control shows that LMCache's own connector loads a
flipped byte without an error.
"""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote

import pytest
import valkey

from kvparams.pages import HEADER_BYTES
from kvparams_connectors.engines.lmcache.chunk_keys import LMCacheChunk, LMCacheChunkLayout
from tests.support.connectors.lmcache_env import environment, python
from tests.support.connectors.valkey_server import ValkeyServer
from tests.support.lmcache_process import ChunkShape, LMCacheError, LMCacheWorker, Spec
from tests.support.waiting import wait_until

SHAPE: Final = ChunkShape(layers=4, tokens=16, heads=2, head_size=32)
FORM: Final = LMCacheChunkLayout("KV_2LTD", (("bfloat16", 2, 4, 64),), 1024, 16)
COUNT: Final = 6
LAST: Final = 5
"""Tokens of the last chunk."""
POOL_GIB: Final = 0.03
YAML: Final = """
chunk_size: 16
local_cpu: false
max_local_cpu_size: {pool}
save_unfull_chunk: true
remote_serde: naive
remote_storage_plugins: ["kvparams"]
extra_config:
  remote_storage_plugin.kvparams.module_path: kvparams_connectors.engines.lmcache.plugin
  remote_storage_plugin.kvparams.class_name: KVParamsAdapter
  remote_storage_plugin.kvparams.store: "{url}"
{more}"""

Start = Callable[..., LMCacheWorker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a worker on a store's URL."""
    python()
    with ExitStack() as stack:

        def start(url: str, more: str = "") -> LMCacheWorker:
            number = len(list(tmp_path.glob("*.yaml")))
            file = tmp_path / f"lmcache-{number}.yaml"
            file.write_text(YAML.format(pool=POOL_GIB, url=url, more=more))
            spec = Spec({"file": str(file)}, "RemoteBackend-kvparams", SHAPE, COUNT, last_tokens=LAST)
            return stack.enter_context(LMCacheWorker(spec, tmp_path / f"lmcache-{number}.log"))

        yield start


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path / "server") as started:
        yield started


def tiered(server: ValkeyServer) -> str:
    return f"tiered:?l1={quote('memory:?size=8MiB', safe='')}&l2={quote(server.url, safe='')}"


def chunk(worker: LMCacheWorker, name: str, number: int) -> LMCacheChunk:
    return LMCacheChunk(FORM, worker.ask("keys", name)["keys"][number], 0)


def flip_in_valkey(server: ValkeyServer, key: str, at: int) -> None:
    client = cast("Any", valkey.Valkey(port=server.port))
    value = bytearray(client.get(key))
    value[at] ^= 4
    client.set(key, bytes(value))
    client.close()


def flip_in_file(path: Path, one: LMCacheChunk, at: int) -> None:
    """In the mapped file that all processes share."""
    content = path.read_bytes()
    digest = content.index(one.digest, content.index(b"KVPG"))  # in the header, 80 bytes behind its start
    with path.open("r+b") as file:
        file.seek(digest - 80 + at)
        file.write(bytes([content[digest - 80 + at] ^ 4]))


def works(worker: LMCacheWorker) -> None:
    """Everything that LMCache asks of a connector, once."""
    free = worker.ask("free")["bytes"]
    assert worker.ask("contains", "1")["found"] == 0
    assert worker.ask("put", "1") == {"done": True}
    assert worker.ask("contains", "1")["found"] == COUNT
    assert worker.ask("get", "1")["found"] == [True] * COUNT
    assert worker.ask("compare", "1")["same"] == [True] * COUNT
    worker.ask("release")
    assert worker.ask("prefix", "1") == {"found": COUNT, "got": COUNT}
    assert worker.ask("compare", "1")["same"] == [True] * COUNT
    worker.ask("release")
    assert worker.ask("get", "2")["found"] == [False] * COUNT
    assert worker.ask("put", "1") == {"done": True}  # again: it is there
    assert worker.ask("ping")["code"] == 0
    assert worker.ask("remove", "1")["removed"] == COUNT
    assert worker.ask("contains", "1")["found"] == 0
    assert worker.ask("free")["bytes"] == free, "LMCache's pool has a leak"


@pytest.mark.slow
def test_on_a_file_that_processes_share(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "store"
    worker = start(f"file://{path}?size=16MiB")
    works(worker)
    worker.ask("put", "3")
    flip_in_file(path, chunk(worker, "3", 2), HEADER_BYTES + 700)
    assert worker.ask("get", "3")["found"] == [True, True, False, True, True, True]
    assert worker.ask("compare", "3")["same"] == [True, True, False, True, True, True]
    worker.ask("release")
    assert "was not used: flipped_payload" in worker.said
    assert worker.ask("contains", "3")["found"] == 2


def test_on_valkey(start: Start, server: ValkeyServer) -> None:
    worker = start(f"{server.url}?prefix=lm")
    works(worker)
    worker.ask("put", "3")
    keys = [f"lm:{chunk(worker, '3', number).key}" for number in (1, 3, 5)]
    for key, at in zip(keys, (HEADER_BYTES, 60, HEADER_BYTES + LAST * 1024 - 1), strict=True):
        flip_in_valkey(server, key, at)
    expected = [True, False, True, False, True, False]
    assert worker.ask("get", "3")["found"] == expected
    assert worker.ask("compare", "3")["same"] == expected
    worker.ask("release")
    wait_until(lambda: server.ask("EXISTS", *keys).startswith(":0"))  # nobody waited for it to be put away
    assert worker.ask("prefix", "3") == {"found": 1, "got": 1}
    worker.ask("release")
    assert worker.ask("put", "3") == {"done": True}  # what was damaged is gone and can be stored anew
    assert worker.ask("get", "3")["found"] == [True] * COUNT


@pytest.mark.slow
def test_on_memory_before_valkey(start: Start, server: ValkeyServer) -> None:
    first, second = start(tiered(server)), start(tiered(server))
    works(first)
    first.ask("put", "3")
    flip_in_valkey(server, chunk(first, "3", 0).key, 2000)
    assert second.ask("get", "3")["found"] == [False, True, True, True, True, True]
    assert second.ask("compare", "3")["same"] == [False, True, True, True, True, True]
    for worker in (first, second):
        worker.ask("close")
        assert "Error occurred when closing" not in worker.said


@pytest.mark.slow
def test_the_control_with_lmcaches_own_connector_a_flipped_byte_is_loaded(server: ValkeyServer, tmp_path: Path) -> None:
    python()
    settings = {
        "chunk_size": 16,
        "local_cpu": False,
        "max_local_cpu_size": POOL_GIB,
        "remote_url": f"redis://127.0.0.1:{server.port}",
        "remote_serde": "naive",
    }
    with LMCacheWorker(Spec(settings, "RemoteBackend", SHAPE, COUNT), tmp_path / "log") as worker:
        assert worker.ask("put", "1") == {"done": True}
        key = worker.ask("keys", "1")["keys"][2]
        flip_in_valkey(server, f"{key}kv_bytes", 700)
        assert worker.ask("get", "1")["found"] == [True] * COUNT
        assert worker.ask("compare", "1")["same"] == [True, True, False, True, True, True]
        assert "was not used" not in worker.said


@pytest.mark.slow
@pytest.mark.alone
def test_a_server_that_stops_costs_the_deadline_and_then_nothing(start: Start, server: ValkeyServer) -> None:
    more = "  remote_storage_plugin.kvparams.deadline_ms: 500\n"
    worker = start(server.url, more)
    free = worker.ask("free")["bytes"]
    worker.ask("put", "1")
    server.stop()
    try:
        for _ in range(3):
            began = time.monotonic()
            assert worker.ask("get", "1")["found"] == [False] * COUNT
            assert time.monotonic() - began < 2
            worker.ask("release")
        began = time.monotonic()
        for _ in range(20):
            assert worker.ask("contains", "1")["found"] == 0
            assert worker.ask("put", "2") == {"done": True}
        assert time.monotonic() - began < 2
        assert worker.ask("ping")["code"] != 0
    finally:
        server.go_on()
    wait_until(lambda: worker.ask("contains", "1")["found"] == COUNT)
    assert worker.ask("get", "1")["found"] == [True] * COUNT
    assert worker.ask("compare", "1")["same"] == [True] * COUNT
    worker.ask("release")
    wait_until(lambda: worker.ask("free")["bytes"] == free)  # what the stopped server held on to has come back


@pytest.mark.slow
def test_another_revision_shares_nothing_and_a_key_is_needed_where_there_is_one(
    start: Start, server: ValkeyServer, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("00" * 32)
    keys.chmod(0o600)
    plain = start(server.url)
    other = start(server.url, "  remote_storage_plugin.kvparams.revision: '2'\n")
    sealed = start(server.url, f"  remote_storage_plugin.kvparams.seal_keys: {keys}\n")
    plain.ask("put", "1")
    assert other.ask("contains", "1")["found"] == 0
    assert sealed.ask("get", "1")["found"] == [False] * COUNT
    sealed.ask("put", "2")
    assert sealed.ask("get", "2")["found"] == [True] * COUNT
    assert plain.ask("get", "2")["found"] == [False] * COUNT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("use_layerwise: true\n", "use_layerwise counts a chunk as loaded before its layers are read"),
        ("  remote_storage_plugin.kvparams.deadlin_ms: 5\n", "deadlin_ms: is not known here"),
    ],
)
def test_what_cannot_be_served_safely_is_refused_in_words(start: Start, tmp_path: Path, more: str, words: str) -> None:
    """LMCache goes on without a remote store, as with every connector that cannot be made."""
    worker = start(f"file://{tmp_path}/store?size=16MiB", more)
    assert words in worker.said
    assert worker.ask("contains", "1")["found"] == 0
    assert not (tmp_path / "store").exists()


def test_an_environment_without_lmcache_is_a_failure_with_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tests.support.lmcache_process.ROOT", tmp_path)
    with pytest.raises(pytest.fail.Exception, match="make install-lmcache"):
        python()
    with pytest.raises(LMCacheError, match="make install-lmcache"):
        LMCacheWorker(Spec({}, "", SHAPE, 1), tmp_path / "log")


@pytest.mark.slow
def test_the_reason_why_lmcache_is_not_run_under_vllm_still_holds() -> None:
    """`STORES.md` says it. When this fails, LMCacheConnectorV1 may start without a GPU: run it under vLLM then."""
    code = (
        "from types import SimpleNamespace",
        "from lmcache.utils import EngineType",
        "from lmcache.v1.config import LMCacheEngineConfig",
        "from lmcache.v1.gpu_connector import CreateGPUConnector",
        "config, ours = LMCacheEngineConfig.from_defaults(), SimpleNamespace(local_worker_id=0)",
        "CreateGPUConnector(config, ours, EngineType.VLLM)",
    )
    told = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
    command = [python(), "-c", "\n".join(code)]
    ended = subprocess.run(command, env=told, capture_output=True, text=True, timeout=120, check=False)
    assert ended.stderr.endswith("RuntimeError: No supported cpu connector found.\n"), ended.stderr
