"""Our stores beside LMCache 0.5.6's own path to the same server, measured in turns in the same run.

    python -m benchmarks.lmcache_compare [--server valkey|mooncake]... [--page-bytes N]... [--total-bytes N]
                                         [--rounds N] [--threads N] [--unix]

It starts the server on loopback. LMCache runs in its own interpreter and is its `StorageManager` with one remote
backend and no cache of its own in front: `batched_put` until its callback has come for every chunk, `batched_get` until
the chunks lie in its pool; "+ copy" with one plain copy of each chunk from memory that is not LMCache's, or back to it,
which is the least that a gather can cost. Its configurations are `redis://` and `unix://` (redis-py with hiredis, which
it uses where it is installed), `resp://` (its C++ client, eight threads), `mooncakestore://` as it is, and "bare":
without chunk metadata, which is nothing but the client library's zero-copy calls.

Ours are the store, with pages sealed and verified, beside LMCache; the connector, which gathers them from an engine's
blocks and scatters them there, beside "+ copy"; and LMCache's `StorageManager` with our plugin. All sides move the same
bytes in every round, and what each has read is compared once.
"""

import argparse
import importlib
import mmap
import os
import platform
import random
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
import valkey

from benchmarks.ratios import median_interval
from benchmarks.sides import Side, in_turns, processor
from kvparams.keys import Geometry, KVShard, Namespace
from kvparams.pages import HEADER_BYTES, PageIdentity, seal, verify
from kvparams_connectors.arena import Arena
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode, Results, open_store
from kvparams_connectors.transfer.cache_layouts import CACHE_LAYOUTS, CacheSpec
from kvparams_connectors.transfer.connector import ConnectorSettings, KVStoreConnector, SequencePlan
from kvparams_connectors.transfer.layout import PagedKVLayout
from tests.support.lmcache_process import ChunkShape, LMCacheWorker, Spec
from tests.support.processes import Processes, free_ports

__all__ = ["main"]

_DEADLINE_S = 60.0
_BATCH_BYTES = 8 << 20
_OWNER_BYTES = 2 << 30
_BAR = 1.5
_PLUGIN = "LMCache + kvparams"
_COPY = " + copy"
_SHAPE = Geometry(layers=16, kv_heads=4, k_dim=128, v_dim=128)
_TOKEN_BYTES = _SHAPE.layers * _SHAPE.kv_heads * (_SHAPE.k_dim + _SHAPE.v_dim) * 2
_BLOCK = 8
"""Tokens of an engine's block: the smallest page has one."""


class Store:
    """Our store, in batches; pages are sealed before they are put and verified after they are read."""

    def __init__(self, store: KVStore, identities: Sequence[PageIdentity]) -> None:
        self._store = store
        self._identities = identities

    def put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        jobs: list[Job[Results]] = []
        for batch in _batches(pages):
            for number in batch:
                seal(pages[number], self._identities[number])
            jobs.append(self._store.put([PutOp(keys[number], (pages[number],)) for number in batch], _DEADLINE_S))
        for job in jobs:
            self._check(job)

    def get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        batches = _batches(pages)
        jobs = [
            self._store.get([GetOp(keys[number], (pages[number],)) for number in batch], _DEADLINE_S)
            for batch in batches
        ]
        for batch, job in zip(batches, jobs, strict=True):
            self._check(job)
            if any(verify(pages[number], self._identities[number]) for number in batch):
                sys.exit("a page came back wrong")

    @staticmethod
    def _check(job: Job[Results]) -> None:
        if any(result.code is not ResultCode.OK for result in job.result()):
            sys.exit(f"the store failed: {job.result()}")


class Connector:
    """Our connector: the same bytes from an engine's blocks and back to them."""

    def __init__(self, store: KVStore, sources: Sequence[memoryview]) -> None:
        """Prepares the blocks of an engine.

        Args:
            sources: what the other sides move: so many bytes are moved here.
        """
        page_tokens, count = sources[0].nbytes // _TOKEN_BYTES, len(sources)
        self._sources = sources
        self._tokens = count * page_tokens
        blocks = self._tokens // _BLOCK
        form = next(one for one in CACHE_LAYOUTS if one.name == "kv_first_nhd")
        sizes = {"S": 2, "B": blocks, "N": _BLOCK, "H": _SHAPE.kv_heads, "D": _SHAPE.k_dim, "C": 2 * _SHAPE.k_dim}
        dims = [sizes[letter] for letter in form.dims]
        self._cache = torch.randint(0, 2**15, [_SHAPE.layers, *dims], dtype=torch.int16)
        self._original: torch.Tensor | None = self._cache.clone()
        spec = CacheSpec(_BLOCK, _SHAPE.kv_heads, _SHAPE.k_dim, _SHAPE.v_dim, "bfloat16")
        layout = PagedKVLayout.from_engine(list(self._cache.view(torch.bfloat16)), spec, form=form)
        self._table = random.Random(1).sample(range(blocks), blocks)
        namespace = Namespace("bench", "1", "bfloat16", _SHAPE, page_tokens)
        self._connector = KVStoreConnector(store, namespace, layout, ConnectorSettings(deadline_s=_DEADLINE_S))

    def plan(self, key: str) -> SequencePlan:
        """The sequence of the round to which a key belongs."""
        return self._connector.plan([int(key.partition(".")[0]), *range(1, self._tokens)])

    def put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        plan = self.plan(keys[0])
        report = self._connector.save(plan, self._table, 0, self._tokens, required=True).result()
        if report.saved != len(pages):
            sys.exit(f"not everything was saved: {report}")

    def get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        if self._original is not None:
            self._cache.zero_()
        report = self._connector.load(self.plan(keys[0]), self._table, 0, self._tokens).result()
        if report.end_token != self._tokens:
            sys.exit(f"not everything was loaded: {report}")
        if self._original is not None:  # the first time: what is compared here lies in blocks, not in pages
            if not torch.equal(self._cache, self._original):
                sys.exit("the blocks came back wrong")
            for page, source in zip(pages, self._sources, strict=True):
                page[:] = source
        self._original = None

    def close(self) -> None:
        self._connector.close()


class LMCache:
    """LMCache in its own process, told by a pipe: a question and its answer take about 0.1 ms of a round."""

    def __init__(self, worker: LMCacheWorker, *, copies: bool = False) -> None:
        """Prepares LMCache's side.

        Args:
            copies: from memory that is not LMCache's, and back to it.
        """
        self._worker = worker
        self._put, self._get = ("save", "load") if copies else ("put", "get")
        self._show = not copies

    def put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        if not self._worker.ask(self._put, keys[0].partition(".")[0])["done"]:
            sys.exit(f"LMCache did not finish a put:\n{self._worker.said[-2000:]}")

    def get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        name = keys[0].partition(".")[0]
        if not all(self._worker.ask(self._get, name)["found"]):
            sys.exit(f"LMCache did not find everything:\n{self._worker.said[-2000:]}")
        if self._show:
            self._worker.ask("show")
        self._show = False

    def clean(self) -> None:
        self._worker.ask("release")


class Shared:
    """Pages in a file that two processes map: sources, sealed, and as much room behind them."""

    def __init__(self, path: Path, page_bytes: int, count: int) -> None:
        self.path = path
        memory_bytes = 2 * count * page_bytes + (1 << 16)
        with path.open("w+b") as file:
            file.truncate(memory_bytes)
            self._map = mmap.mmap(file.fileno(), 0)
        self.arena = Arena(2 * count * page_bytes, page_bytes, allocate=lambda nbytes: memoryview(self._map)[:nbytes])
        views = [slot.view for slot in self.arena.lease_many(2 * count, 2 * count)]
        self.sources, self.targets = views[:count], views[count:]
        part, size = KVShard(0, 1, 0, 1), page_bytes - HEADER_BYTES
        self.identities = [
            PageIdentity(b"n" * 32, number.to_bytes(32, "little"), 1, part, size) for number in range(count)
        ]
        for number, source in enumerate(self.sources):
            source[:] = random.Random(number).randbytes(page_bytes)
            seal(source, self.identities[number])


def measure(
    url: str,
    theirs: Mapping[str, Mapping[str, object]],
    clean: Callable[[LMCache | None, Sequence[str]], None],
    *,
    page_bytes: int,
    total_bytes: int,
    rounds: int,
) -> None:
    """Print one block of the table.

    Args:
        url: of our store on the server.
        theirs: LMCache's configurations by name.
        clean: removes what a side has put; told the LMCache side, if it was one, and the keys.
    """
    count = max(2, total_bytes // page_bytes)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        shared = Shared(folder / "pages", page_bytes, count)
        store, second = open_store(url), open_store(url)
        stack.callback(store.close)
        stack.callback(second.close)
        store.register(shared.arena)
        connector = Connector(second, shared.sources)
        stack.callback(connector.close)
        sides: dict[str, Side] = {"store": Store(store, shared.identities), "connector": connector}
        for name, settings in theirs.items():
            backend = "RemoteBackend-kvparams" if "remote_storage_plugins" in settings else "RemoteBackend"
            shape = ChunkShape(_SHAPE.layers, page_bytes // _TOKEN_BYTES, _SHAPE.kv_heads, _SHAPE.k_dim)
            pool = {"chunk_size": shape.tokens, "local_cpu": False, "max_local_cpu_size": 4 * total_bytes / (1 << 30)}
            spec = Spec({**pool, **settings}, backend, shape, count, str(shared.path))
            worker = stack.enter_context(LMCacheWorker(spec, folder / f"{len(sides)}.log"))
            sides[name] = LMCache(worker)
            if name != _PLUGIN:
                sides[name + _COPY] = LMCache(worker, copies=True)
        turns = {name: _Cleaning(side) for name, side in sides.items()}
        last: list[_Cleaning] = []
        for turn in turns.values():
            turn.tell = last.append

        def clear(keys: Sequence[str]) -> None:
            side = last[-1].side
            if isinstance(side, LMCache):
                side.clean()
            elif isinstance(side, Connector):
                keys = side.plan(keys[0]).keys
            clean(side if isinstance(side, LMCache) else None, keys)
            last.clear()

        seconds = in_turns(turns, shared.sources, shared.targets, rounds=rounds, warm_ups=2, clean=clear)
    own = [name for name in theirs if name != _PLUGIN]
    beside = {"store": own, _PLUGIN: own, "connector": [name + _COPY for name in own]}
    for way, figures in seconds.items():
        for name, spent in figures.items():
            speed = median_interval([count * page_bytes / one / 1e9 for one in spent])
            ratios = [
                f"{median_interval([a / b for a, b in zip(figures[other], spent, strict=True)])} of {other}"
                for other in beside.get(name, ())
            ]
            print(f"{page_bytes >> 10:6} KiB  {way}  {name:20} {speed!s:>20} GB/s  {'  '.join(ratios)}", flush=True)


class _Cleaning:
    """A side that says whose turn it was."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.tell: Callable[[_Cleaning], None] = lambda _: None

    def put(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        self.tell(self)
        self.side.put(keys, pages)

    def get(self, keys: Sequence[str], pages: Sequence[memoryview]) -> None:
        self.side.get(keys, pages)


def plugin(url: str) -> dict[str, object]:
    """LMCache with our plugin."""
    start = "remote_storage_plugin.kvparams"
    return {
        "remote_storage_plugins": ["kvparams"],
        "extra_config": {
            f"{start}.module_path": "kvparams_connectors.engines.lmcache.plugin",
            f"{start}.class_name": "KVParamsAdapter",
            f"{start}.store": url,
            f"{start}.deadline_ms": int(_DEADLINE_S * 1000),
        },
    }


def on_valkey(folder: Path, processes: Processes, arguments: argparse.Namespace) -> None:
    """The tables for Valkey, over loopback TCP or a unix socket."""
    (port,) = free_ports(1)
    server = ["valkey-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    limits = ["--dir", str(folder), "--maxmemory", "4gb", "--maxmemory-policy", "allkeys-lru"]
    path = folder / "v.sock"
    processes.start("valkey", [*server, *limits, "--unixsocket", str(path)])
    client = cast("Any", valkey.Valkey(host="127.0.0.1", port=port))
    _until(lambda: _answers(client))
    url = f"valkey://{path if arguments.unix else f'127.0.0.1:{port}'}?threads={arguments.threads}"
    bare: dict[str, object] = {"remote_url": f"resp://127.0.0.1:{port}", "extra_config": {"save_chunk_meta": False}}
    theirs: dict[str, dict[str, object]] = (
        {"unix://": {"remote_url": f"unix://{path}"}}
        if arguments.unix
        else {"redis://": {"remote_url": f"redis://127.0.0.1:{port}"}, "resp://": bare}
    )
    theirs[_PLUGIN] = plugin(url)
    for page_bytes in arguments.page_bytes or (256 << 10, 1 << 20, 4 << 20):
        measure(
            url,
            theirs,
            lambda side, keys: client.flushall(),
            page_bytes=page_bytes,
            total_bytes=arguments.total_bytes,
            rounds=arguments.rounds,
        )
    client.close()


def on_mooncake(folder: Path, processes: Processes, arguments: argparse.Namespace) -> None:
    """The tables for Mooncake: a master, and an owner whose memory all sides use."""
    port, metrics = free_ports(2)
    master = f"127.0.0.1:{port}"
    binary = Path(sysconfig.get_path("scripts")) / "mooncake_master"
    at = [f"--rpc_port={port}", "--metrics_host=127.0.0.1", f"--metrics_port={metrics}", "--logtostderr"]
    health = f"http://127.0.0.1:{metrics}/health"
    processes.start("master", [str(binary), "--rpc_address=127.0.0.1", *at], ready=[health])
    module = "kvparams_connectors.stores.mooncake.owner"
    processes.start("owner", [sys.executable, "-m", module, "--master", master, "--size", str(_OWNER_BYTES)])
    _until(lambda: b"ready\n" in (folder / "owner.log").read_bytes())
    native: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    if native.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master):
        sys.exit("the client library was not set up")
    url = f"mooncake://{master}?prefix=ours:"
    own = {
        "transfer_timeout": int(_DEADLINE_S),
        "mooncake_local_hostname": "127.0.0.1",
        "mooncake_metadata_server": "P2PHANDSHAKE",
        "mooncake_protocol": "tcp",
        "mooncake_master_server_addr": master,  # what 0.3.13 reads; LMCache's own name for it is ignored there
        "mooncake_global_segment_size": "0",
    }
    theirs: dict[str, dict[str, object]] = {
        "mooncakestore://": {"remote_url": f"mooncakestore://{master}/", "extra_config": own},
        "mooncakestore:// bare": {
            "remote_url": f"mooncakestore://{master}/",
            "extra_config": {**own, "save_chunk_meta": False},
        },
        _PLUGIN: plugin(url),
    }

    def clean(side: LMCache | None, keys: Sequence[str]) -> None:
        native.remove_all(True)

    for page_bytes in arguments.page_bytes or (256 << 10, 1 << 20, 4 << 20):
        measure(
            url,
            theirs,
            clean,
            page_bytes=page_bytes,
            total_bytes=arguments.total_bytes,
            rounds=arguments.rounds,
        )
    native.close()


def _answers(client: Any) -> bool:
    try:
        return bool(client.ping())
    except valkey.ValkeyError:
        return False


def _until(what: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not what():
        if time.monotonic() > give_up:
            sys.exit("a server did not start")
        time.sleep(0.05)


def _batches(pages: Sequence[memoryview]) -> list[range]:
    size = max(1, _BATCH_BYTES // pages[0].nbytes)
    return [range(at, min(at + size, len(pages))) for at in range(0, len(pages), size)]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the machine, the command and the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lmcache_compare", description=__doc__)
    parser.add_argument("--server", action="append", choices=("valkey", "mooncake"), help="default: both")
    parser.add_argument("--page-bytes", type=int, action="append", help="default: 256 KiB, 1 MiB and 4 MiB")
    parser.add_argument("--total-bytes", type=int, default=64 << 20, help="of all pages together (default 64 MiB)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--unix", action="store_true", help="Valkey over its unix socket, which resp:// cannot")
    parser.add_argument("--threads", type=int, default=4, help="of our Valkey store (default 4; LMCache's have 8)")
    arguments = parser.parse_args(argv)
    if any(size % (_BLOCK * _TOKEN_BYTES) for size in arguments.page_bytes or ()):
        parser.error(f"a page is a multiple of {_BLOCK * _TOKEN_BYTES} bytes here")
    python = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"machine: {processor()}, {os.cpu_count()} cores, {python}; LMCache 0.5.6")
    print(f"command: python -m benchmarks.lmcache_compare {' '.join(sys.argv[1:] if argv is None else argv)}".rstrip())
    for server in arguments.server or ("valkey", "mooncake"):
        with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
            print(f"\n{server}; the last columns: how many times as fast as LMCache's own path (the bar is {_BAR})")
            (on_valkey if server == "valkey" else on_mooncake)(Path(folder), processes, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
