"""Measures how fast a connector moves KV between paged tensors and a store, beside the bare store and memcpy.

    python -m benchmarks.connector_bench [--store URL]... [--form NAME] [--page-bytes N] [--pages N] [--block N]
                                         [--head-unit N] [--rounds N] [--portion N] [--paced GB/s]

A round moves the same number of bytes by each side, in random order: `save` copies pages out of the blocks, seals and
puts them; `load` gets, verifies and writes them to the blocks. Beside them the bare store: `put` and `get` of pages
that lie ready, `seal + put` and `get + verify` of the same. Reported are medians of the rounds' ratios with their
bootstrap interval. All sides are warm and move equally many bytes under keys that are new in every round.
"""

import argparse
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.ratios import median_interval
from benchmarks.sides import processor
from kvparams.keys import Geometry, KVShard, Namespace
from kvparams.pages import HEADER_BYTES, seal, verify
from kvparams_connectors.arena import Arena
from kvparams_connectors.jobs import Job
from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode, Results, open_store
from kvparams_connectors.stores.memory.store import MemoryStore
from kvparams_connectors.transfer.cache_layouts import CACHE_LAYOUTS, CacheSpec
from kvparams_connectors.transfer.connector import ConnectorSettings, KVStoreConnector, SequencePlan
from kvparams_connectors.transfer.layout import PagedKVLayout
from kvparams_connectors.transfer.shard_grid import ShardGrid

__all__ = ["main"]

_DEADLINE_S = 120.0
_DTYPE = torch.bfloat16
_SHAPE = Geometry(layers=16, kv_heads=4, k_dim=128, v_dim=128)
_TOKEN_BYTES = _SHAPE.layers * _SHAPE.kv_heads * (_SHAPE.k_dim + _SHAPE.v_dim) * 2


class PacedStore(MemoryStore):
    """Values in memory that come and go no faster than over a wire; the CPU is free meanwhile."""

    def __init__(self, size_bytes: int, gb_per_s: float) -> None:
        super().__init__(size_bytes)
        self._seconds_per_byte = 1e-9 / gb_per_s

    @property
    def memory(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns nothing: what lies behind a wire is not read in place."""
        return None

    def put_blocking(self, ops: Sequence[PutOp], deadline: float) -> Results:
        start = time.perf_counter()
        return self._paced(start, super().put_blocking(ops, deadline))

    def get_blocking(self, ops: Sequence[GetOp], deadline: float) -> Results:
        start = time.perf_counter()
        return self._paced(start, super().get_blocking(ops, deadline))

    def _paced(self, start: float, results: Results) -> Results:
        takes = sum(result.nbytes for result in results) * self._seconds_per_byte
        time.sleep(max(0.0, start + takes - time.perf_counter()))
        return results


class Bench:
    """An engine's cache that holds one long sequence, the same pages ready in slots, and a store."""

    def __init__(self, store: KVStore, arguments: argparse.Namespace) -> None:
        page_tokens, pages, block = arguments.page_bytes // _TOKEN_BYTES, arguments.pages, arguments.block
        self._namespace = Namespace("bench", "1", "bfloat16", _SHAPE, page_tokens)
        self._tokens, self._store, self._batch = pages * page_tokens, store, arguments.portion
        blocks = -(-self._tokens // block)
        form = next(one for one in CACHE_LAYOUTS if one.name == arguments.form)
        sizes = {"S": 2, "B": blocks, "N": block, "H": _SHAPE.kv_heads, "D": _SHAPE.k_dim, "C": 2 * _SHAPE.k_dim}
        cache = torch.randint(0, 2**15, [_SHAPE.layers, *(sizes[letter] for letter in form.dims)], dtype=torch.int16)
        spec = CacheSpec(block, _SHAPE.kv_heads, _SHAPE.k_dim, _SHAPE.v_dim, "bfloat16")
        layout = PagedKVLayout.from_engine(list(cache.view(_DTYPE)), spec, form=form)
        self._table = random.Random(1).sample(range(blocks), blocks)
        config = ConnectorSettings(
            deadline_s=_DEADLINE_S,
            arena_bytes=arguments.arena_bytes,
            portion_pages=arguments.portion,
            save_portion_pages=arguments.save_portion,
            grid=None if arguments.head_unit is None else ShardGrid(_SHAPE.layers, arguments.head_unit),
        )
        self._connector = KVStoreConnector(store, self._namespace, layout, config)
        part = KVShard.whole(_SHAPE)
        nbytes = HEADER_BYTES + self._namespace.payload_bytes(page_tokens, part)
        arena = Arena(2 * pages * (nbytes + 64), nbytes)
        store.register(arena)
        slots = [slot.view for slot in arena.lease_many(2 * pages, 2 * pages)]
        self._sources, self._targets = slots[:pages], slots[pages:]
        for source in self._sources:
            np.frombuffer(source, np.uint8)[:] = 7
        self._round = 0
        self._bare: SequencePlan = self._plan(0)
        self._own: SequencePlan = self._plan(1)
        self.renew_bare()
        self.renew_own()

    def renew_bare(self) -> None:
        """Gives the bare side new keys and sealed pages; the old ones go. Not timed."""
        self._forget(self._whole().keys)
        self._round += 1
        self._bare = self._plan(self._round)
        self.seal()

    def renew_own(self) -> None:
        """Gives the connector new keys; the old ones go. Not timed."""
        self._forget(self._own.keys)
        self._round += 1
        self._own = self._plan(self._round)
        self.seal()  # a server frees what was deleted in its own time, and has as much of it as for the bare side

    def _plan(self, number: int) -> SequencePlan:
        return self._connector.plan([number, *range(1, self._tokens)])

    @property
    def nbytes(self) -> int:
        """Payload bytes that every side moves."""
        return self._tokens * _TOKEN_BYTES

    def memcpy(self) -> None:
        """Copies each page once."""
        for target, source in zip(self._targets, self._sources, strict=True):
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

    def seal(self) -> None:
        whole = self._whole()
        for page, source in enumerate(self._sources):
            seal(source, whole.identity(page))

    def put(self) -> None:
        whole = self._whole()
        self._wait(self._store.put, [PutOp(key, (view,)) for key, view in zip(whole.keys, self._sources, strict=True)])

    def get(self) -> None:
        whole = self._whole()
        self._wait(self._store.get, [GetOp(key, (view,)) for key, view in zip(whole.keys, self._targets, strict=True)])

    def seal_and_put(self) -> None:
        self.seal()
        self.put()

    def get_and_verify(self) -> None:
        self.get()
        whole = self._whole()
        if any(verify(target, whole.identity(page)) for page, target in enumerate(self._targets)):
            sys.exit("a page came back wrong")

    def save(self) -> None:
        report = self._connector.save(self._own, self._table, 0, self._tokens, required=True).result()
        if report.saved != len(self._own.pages):
            sys.exit(f"not everything was saved: {report}")

    def load(self) -> None:
        report = self._connector.load(self._own, self._table, 0, self._tokens).result()
        if report.end_token != self._tokens:
            sys.exit(f"not everything was loaded: {report}")

    def close(self) -> None:
        self._connector.close()

    def _forget(self, *keys: Sequence[str]) -> None:
        for some in keys:
            self._store.delete(some, _DEADLINE_S).result()

    def _whole(self) -> SequencePlan:
        """The bare side's pages, each in one piece."""
        plan = self._bare
        if len(plan.units) == 1:
            return plan
        part = KVShard.whole(_SHAPE)
        keys = tuple(f"{plan.keys[plan.parts(page.index).start]}.whole" for page in plan.pages)
        return SequencePlan(plan.namespace, part, plan.tokens, plan.pages, keys, 0, 0, None, None, (part,))

    def _wait(self, operation: Callable[..., Job[Results]], ops: Sequence[PutOp] | Sequence[GetOp]) -> None:
        size = self._batch
        jobs = [operation(ops[at : at + size], _DEADLINE_S) for at in range(0, len(ops), size)]
        if any(result.code is not ResultCode.OK for job in jobs for result in job.result()):
            sys.exit("the store failed")


def measure(bench: Bench, name: str, rounds: int) -> None:
    """Print a line for each way, beside memcpy, and for the connector beside the store."""
    ways = {
        "put": bench.put,
        "seal + put": bench.seal_and_put,
        "save": bench.save,
        "get": bench.get,
        "get + verify": bench.get_and_verify,
        "load": bench.load,
        "memcpy": bench.memcpy,
    }
    seconds: dict[str, list[float]] = {what: [] for what in ways}
    order = random.Random(1)
    renewals = {"put": bench.renew_bare, "seal + put": bench.renew_bare, "save": bench.renew_own}
    for number in range(rounds + 2):  # two to warm up
        for group in (("put", "seal + put", "save"), ("get", "get + verify", "load", "memcpy")):
            chosen = list(group)
            order.shuffle(chosen)
            for what in chosen:
                if what in renewals:  # right before, so that each finds the room that as much as it needs has left
                    renewals[what]()
                start = time.perf_counter()
                ways[what]()
                took = time.perf_counter() - start
                if number >= 2:
                    seconds[what].append(took)
    for what in ways:
        speed = median_interval([bench.nbytes / took / 1e9 for took in seconds[what]])
        beside = [
            "memcpy",
            *(["put", "seal + put"] if what == "save" else ["get", "get + verify"] if what == "load" else []),
        ]
        ratios = "  ".join(
            f"{median_interval([a / b for a, b in zip(seconds[one], seconds[what], strict=True)])} of {one}"
            for one in beside
            if one != what
        )
        print(f"{name + ' ' + what:22} {speed!s:>20} GB/s  {ratios}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the machine, the command and the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.connector_bench", description=__doc__)
    parser.add_argument("--store", action="append", metavar="URL", help="default: memory, and a file on /dev/shm")
    parser.add_argument(
        "--form", default="kv_first_nhd", choices=[form.name for form in CACHE_LAYOUTS if form.name != "mla"]
    )
    parser.add_argument("--page-bytes", type=int, default=1 << 20)
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--block", type=int, default=16, help="tokens per block (default 16)")
    parser.add_argument("--head-unit", type=int, help="KV heads per stored part; default: all in one")
    parser.add_argument("--portion", type=int, default=8)
    parser.add_argument("--save-portion", type=int, default=8)
    parser.add_argument("--arena-bytes", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--paced", type=float, metavar="GB/s", help="instead of --store: a store behind a wire this fast"
    )
    arguments = parser.parse_args(argv)
    if arguments.page_bytes % _TOKEN_BYTES:
        parser.error(f"a token takes {_TOKEN_BYTES} bytes; --page-bytes is no multiple of it")
    python = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"machine: {processor()}, {os.cpu_count()} cores, {python}")
    print("device: the CPU; the way over a GPU was not measured")
    print(f"command: python -m benchmarks.connector_bench {' '.join(sys.argv[1:] if argv is None else argv)}".rstrip())
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        size = 4 * arguments.pages * arguments.page_bytes
        urls = arguments.store or [f"memory:?size={size}", f"file://{directory}/store?size={size}"]
        for url in ["paced:"] if arguments.paced else urls:
            store = PacedStore(size, arguments.paced) if arguments.paced else open_store(url)
            bench = Bench(store, arguments)
            measure(bench, url.partition(":")[0], arguments.rounds)
            bench.close()
            store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
