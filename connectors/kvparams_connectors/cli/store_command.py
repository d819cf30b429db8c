"""`kvparams store`: how fast a store is, and what one value in it is."""

import argparse
import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvparams_connectors.cli.benchmark_plot import plot_benchmark, require_matplotlib
from kvparams_connectors.cli.loopback_peer import run_loopback_peer
from kvparams_connectors.cli.new_file_check import refuse_new_file
from kvparams_connectors.cli.store_benchmark import (
    BenchmarkPlan,
    BenchmarkResult,
    format_size,
    measure_lookup_s,
    run_benchmark,
)
from kvparams_connectors.cli.value_inspection import fetch_value, inspect_value
from kvparams_connectors.store import open_store
from kvparams_connectors.store_url import StoreError, parse_size
from kvparams_connectors.transfer.page_auth_keys import read_page_auth_keys

__all__ = ["COMMAND"]

_EXAMPLE: Final = """
Examples:

  kvparams store bench 'file:///dev/shm/kv?size=4GiB' --sizes 256KiB,1MiB --threads 1,4 --plot speed.png
  kvparams store inspect 'file:///dev/shm/kv' kv1.64f2c0....16.L0-32.H0-8

`bench` stores pages of random bytes under keys of its own, and deletes them. A store with little room evicts other
pages for them. The table goes to standard output, and progress to standard error. `inspect` ends with status 0 for a
good page, 1 for a bad or missing page, and 2 if the store does not answer. It shows the page's content only with
--content. Find the keys of pages in an engine's answer, under kv_transfer_params.kvparams.load_keys.
"""
_MIN_PAGE: Final = 4 << 10
_MAX_PAGE: Final = 256 << 20
_MAX_THREADS: Final = 64
_HEADS: Final = ("PAGE", "CALLERS", "PUT", "GET", "SOCKET", "MEMORY", "PUT/SOCKET", "GET/SOCKET", "PUT/MEM", "GET/MEM")
_COLUMNS: Final = (
    "SOCKET: the same pages over a TCP connection within this machine; MEMORY: the same pages copied by one core"
)


class StoreCommand:
    """See `kvparams.cli.Command`."""

    summary = "Measure a store's speed, or show a stored page."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds one subcommand for each action."""
        parser.epilog = _EXAMPLE
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        bench = actions.add_parser("bench", help="measure the store's speed, and compare it with memory and a socket")
        bench.add_argument("url", metavar="URL", help="the URL of the store, for example memory:?size=1GiB")
        bench.add_argument(
            "--sizes",
            type=_sizes,
            default=_sizes("64KiB,256KiB,1MiB,4MiB"),
            help="the sizes of a page, separated by commas (default: 64KiB,256KiB,1MiB,4MiB)",
        )
        bench.add_argument(
            "--threads",
            type=_counts,
            default=[1],
            help="the numbers of concurrent callers, for example 1,4 (default: 1)",
        )
        bench.add_argument("--batch", type=_count, default=8, help="the number of pages per operation (default: 8)")
        bench.add_argument(
            "--rounds", type=_count, default=10, help="the number of rounds; each figure is their median (default: 10)"
        )
        bench.add_argument(
            "--working-set", type=_size, default=64 << 20, help="the size of all pages together (default: 64MiB)"
        )
        bench.add_argument(
            "--plot", type=Path, metavar="FILE", help="also draw a plot into this file (needs matplotlib)"
        )
        inspect = actions.add_parser("inspect", help="show the header of a stored page, and check the page")
        inspect.add_argument("url", metavar="URL", help="the URL of the store")
        inspect.add_argument(
            "key", metavar="KEY", help="the key of a page, from an answer's kv_transfer_params.kvparams.load_keys"
        )
        inspect.add_argument(
            "--seal-keys",
            type=Path,
            metavar="FILE",
            help="the key file of authenticated pages, to check the page's tag",
        )
        inspect.add_argument(
            "--cache-salt", metavar="SALT", help="the tenant's cache salt, to check the tag (default: none)"
        )
        inspect.add_argument(
            "--content", type=Path, metavar="FILE", help="write the payload, the KV of a prompt, to this file"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it."""
        if arguments.action == "bench":
            return _bench(arguments)
        return _inspect(arguments)


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.plot is not None:
        require_matplotlib()
    refuse_new_file(arguments.url)
    store = open_store(arguments.url)
    progress = _progress()
    found: list[BenchmarkResult] = []
    name = arguments.url.partition(":")[0]
    try:
        print(f"{name} store; {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
        print(f"{arguments.batch} pages per operation, {arguments.rounds} rounds; GB/s, headers and checksums included")
        progress("lookup of 1000 keys")
        lookup = measure_lookup_s(store)
        with run_loopback_peer() as floor:
            for page_bytes in arguments.sizes:
                for threads in arguments.threads:
                    pages = max(arguments.batch, arguments.working_set // page_bytes // threads)
                    plan = BenchmarkPlan(page_bytes, threads, min(pages, 1024), arguments.batch, arguments.rounds)
                    found.append(run_benchmark(store, floor, plan, progress))
    finally:
        progress("")
        store.close()
    rows = [_HEADS, *(_row(one) for one in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))
    print(_COLUMNS)
    print(f"lookup of 1000 missing keys: {1000 * lookup:.2f} ms")
    if arguments.plot is not None:
        plot_benchmark(arguments.plot, f"{name} store", found)
        print(f"the plot is in {arguments.plot}", file=sys.stderr)
    return 0


def _row(one: BenchmarkResult) -> tuple[str, ...]:
    speeds = (one.put, one.get, (one.socket_put + one.socket_get) / 2, one.memory)
    ratios = (one.put_of_socket, one.get_of_socket, one.put_of_memory, one.get_of_memory)
    return (
        format_size(one.plan.page_bytes),
        str(one.plan.threads),
        *(f"{figure:.2f}" for figure in (*speeds, *ratios)),
    )


def _inspect(arguments: argparse.Namespace) -> int:
    keys = None
    if arguments.seal_keys is not None:
        # Both kinds of tag are checked with it; the one named here would only matter for sealing.
        keys = read_page_auth_keys(arguments.seal_keys, "hmac-sha256").for_tenant(arguments.cache_salt)
    elif arguments.cache_salt is not None:
        raise StoreError("--cache-salt needs --seal-keys")
    refuse_new_file(arguments.url)
    store = open_store(arguments.url)
    try:
        value = fetch_value(store, arguments.key)
    finally:
        store.close()
    if value is None:
        print(f"kvparams store: the store has no value for the key {arguments.key[:128]!r}", file=sys.stderr)
        return 1
    seen = inspect_value(arguments.key, value, keys)
    for name, text in seen.fields:
        print(f"{name:15} {text}")
    for problem in seen.problems:
        print(f"{'problem':15} {problem}")
    print(f"{'verdict':15} {'bad' if seen.problems else 'good: header, checksums and key agree'}")
    if arguments.content is not None:
        _write(arguments.content, value)
    return 1 if seen.problems else 0


def _write(path: Path, value: memoryview) -> None:
    """Only its owner may read the file."""
    from kvparams.pages import HEADER_BYTES

    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(value[HEADER_BYTES:])
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or 'failed'}") from error


def _progress() -> Callable[[str], None]:
    """Updates a progress line on stderr if it is a terminal."""
    seen = False
    with suppress(OSError, ValueError):
        seen = sys.stderr.isatty()
    if not seen:
        return lambda _: None
    return lambda text: print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except StoreError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _sizes(text: str) -> list[int]:
    sizes = [_size(one) for one in text.split(",")]
    if any(not _MIN_PAGE <= size <= _MAX_PAGE for size in sizes):
        raise argparse.ArgumentTypeError("a page must have 4KiB to 256MiB")
    return sizes


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1000):
        raise argparse.ArgumentTypeError("must be a whole number from 1 to 1000")
    return int(text)


def _counts(text: str) -> list[int]:
    counts = [_count(one) for one in text.split(",")]
    if max(counts) > _MAX_THREADS:
        raise argparse.ArgumentTypeError(f"at most {_MAX_THREADS}")
    return counts


COMMAND: Final = StoreCommand()
