"""Examines the machine and stores for `kvparams doctor`.

A store is examined from opening it to a page that comes back whole.

Every line says what was found and what to do; the first error of a store ends its examination, because what follows
would only say the same again.
"""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from secrets import token_bytes, token_hex
from typing import Final

from kvparams.errors import KVParamsError, PluginError
from kvparams.keys import KVShard
from kvparams.pages import HEADER_BYTES, PageIdentity, seal, verify
from kvparams_connectors.advice import Advice, advice_from_store
from kvparams_connectors.cli.new_file_check import refuse_new_file, removed_if_new
from kvparams_connectors.store import GetOp, KVStore, PutOp, Result, ResultCode, open_store
from kvparams_connectors.store_url import StoreUnreachable

__all__ = ["examine_machine", "examine_store"]

_DEADLINE_S: Final = 10.0
_PAGE: Final = 1 << 20
_PAGES: Final = 8
_ROUNDS: Final = 5
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SLOW: Final = 0.2
"""GB/s. Prefill of a prompt of a small model is about as fast; slower KV is not worth its fetching."""
_SLOW_LOOKUP_S: Final = 0.02
_PART: Final = KVShard(0, 1, 0, 1)


def examine_machine() -> Iterator[Advice]:
    """Python, packages, memory: what every store on this machine has to do with."""
    yield Advice("ok", f"Python {sys.version.partition(' ')[0]}, {os.cpu_count()} cores")
    for package, needed in (("cryptography", "fast page tags"), ("torch", "an engine's connector")):
        try:
            yield Advice("ok", f"{package} {version(package)}")
        except PackageNotFoundError:
            extra = "sealed" if package == "cryptography" else "connectors"
            yield Advice("warning", f"{package} is not installed", f"for {needed}: pip install 'kvparams[{extra}]'")
    shm = Path("/dev/shm")
    if shm.is_dir():
        usage = shutil.disk_usage(shm)
        found = f"/dev/shm has {usage.free >> 20} MiB free of {usage.total >> 20}"
        if usage.total < 1 << 30:
            yield Advice(
                "warning", found, "it is too small for a store that engines share; in a container, raise --shm-size"
            )
        else:
            yield Advice("ok", found)
    yield from examine_huge_pages(_HUGE_PAGES)
    speed = _memory_speed()
    if speed < 2:
        yield Advice(
            "warning", f"memory copies run at {speed:.1f} GB/s", "the machine is busy or throttled: try again later"
        )
    else:
        yield Advice("ok", f"memory copies run at {speed:.1f} GB/s")


def examine_huge_pages(setting: Path) -> Iterator[Advice]:
    """Returns what the kernel's setting of transparent huge pages means; nothing where there is none.

    Source: https://valkey.io/topics/latency/ (`always` costs latency and memory whenever the server forks).
    """
    try:
        text = setting.read_text()
    except OSError:
        return
    if "[always]" in text:
        todo = f"if a Valkey server runs here: echo madvise > {setting}, and restart the server"
        yield Advice("warning", "transparent huge pages are on for all processes", todo)
    else:
        yield Advice("ok", f"transparent huge pages: {text.strip()}")


def examine_store(url: str) -> Iterator[Advice]:
    """Reachable, of the right version, set up well, right, fast. A file that this creates is removed again."""
    try:
        refuse_new_file(url)
        with removed_if_new(url):
            yield from _examine(url)
    except KVParamsError as error:
        yield Advice("error", str(error), _opening(error))


def _examine(url: str) -> Iterator[Advice]:
    start = time.monotonic()
    try:
        store = open_store(url)
    except KVParamsError:
        raise
    except Exception as error:  # noqa: BLE001 - somebody else's code; the other stores are still to be examined
        yield Advice(
            "error", f"the store cannot be opened ({type(error).__name__})", "this is a bug in the store: report it"
        )
        return
    try:
        yield Advice("ok", f"the store opens in {1000 * (time.monotonic() - start):.0f} ms")
        yield from _capabilities(store)
        advice = advice_from_store(store)
        yield from advice
        if any(one.level == "error" for one in advice):
            return
        broken = False
        for one in _round_trip(store):
            broken |= one.level == "error"
            yield one
        if not broken:
            yield from _speed(store)
    finally:
        store.close()


def _opening(error: KVParamsError) -> str:
    if isinstance(error, PluginError):
        return "correct the word before the colon, or install the package that provides this store"
    if isinstance(error, StoreUnreachable):
        return "start the server, and check that this machine can reach it"
    return ""  # a StoreError says itself what to do


def _capabilities(store: KVStore) -> Iterator[Advice]:
    can = store.capabilities
    if not can.shared and store.address is None:  # with an address, others read it where it is
        yield Advice(
            "warning",
            "no other process can read this store",
            "use it as the first tier only: tiered:?l1=...&l2=...",
        )
    if can.max_value_bytes < 4 << 20:
        yield Advice(
            "warning",
            f"the store accepts values of at most {can.max_value_bytes} bytes",
            "pages of a large model are 1 to 8 MiB: give the store more room, or use smaller pages",
        )


def _round_trip(store: KVStore) -> Iterator[Advice]:
    """Sends one page through every operation and verifies it; the control is a key that is not there."""
    name = f"kvparams-doctor-{token_hex(8)}"
    size = max(HEADER_BYTES, min(_PAGE, store.capabilities.max_value_bytes))
    identity = PageIdentity(token_bytes(32), token_bytes(32), 1, _PART, size - HEADER_BYTES)
    page = memoryview(bytearray(bytes(HEADER_BYTES) + token_bytes(identity.payload_bytes)))
    seal(page, identity)
    target = memoryview(bytearray(size))
    try:
        steps: list[tuple[str, Result, Result]] = [
            ("put", store.put([PutOp(name, (page,))], _DEADLINE_S).result()[0], Result(ResultCode.OK, size)),
            ("lookup", store.exists([name], _DEADLINE_S).result()[0], Result(ResultCode.OK, size)),
            ("get", store.get([GetOp(name, (target,))], _DEADLINE_S).result()[0], Result(ResultCode.OK, size)),
            ("put again", store.put([PutOp(name, (page,))], _DEADLINE_S).result()[0], Result(ResultCode.EXISTS)),
            ("lookup of another key", store.exists([f"{name}.no"], _DEADLINE_S).result()[0], Result(ResultCode.MISS)),
        ]
        for what, found, wanted in steps:
            fits = not wanted.nbytes or not found.has_size or found.nbytes == wanted.nbytes
            if found.code is not wanted.code or not fits:
                yield Advice("error", f"{what} ended with {found.code.value}, {found.nbytes} bytes", _TODO[found.code])
                return
        refusal = verify(target, identity)
        if refusal is not None:
            yield Advice(
                "error", f"a page came back damaged: {refusal.message}", "do not use this store: it changes bytes"
            )
            return
    finally:
        (deleted,) = store.delete([name], _DEADLINE_S).result()
    if deleted.code is not ResultCode.OK:
        yield Advice("error", f"delete ended with {deleted.code.value}", _TODO[deleted.code])
        return
    yield Advice("ok", f"a page of {size >> 10} KiB came back unchanged, and was deleted")


_TODO: Final = {
    ResultCode.OK: "the server does not behave as expected: check its version",
    ResultCode.EXISTS: "another deployment uses the same keys: give each deployment its own `prefix`",
    ResultCode.MISS: "the store loses values at once: check the server's memory and eviction settings",
    ResultCode.CORRUPT: "do not use this store: it changes bytes",
    ResultCode.FULL: "the store has no room: give it more memory, and an eviction policy",
    ResultCode.TOO_LARGE: "raise the server's limit on values, or use smaller pages",
    ResultCode.TIMEOUT: "the server is too slow or stopped: check its load and the network",
    ResultCode.UNAVAILABLE: "check that the server runs and that this machine can reach it",
    ResultCode.DENIED: "check `user` and `password_file`, and the permissions of this user",
    ResultCode.INVALID: "this is a bug in the store: report it",
    ResultCode.INTERNAL: "this is a bug in the store: see the log",
}


def _speed(store: KVStore) -> Iterator[Advice]:
    size = max(HEADER_BYTES, min(_PAGE, store.capabilities.max_value_bytes // (4 * _PAGES)))
    source, target = memoryview(bytearray(token_bytes(size))), memoryview(bytearray(size))
    best = {"put": 0.0, "get": 0.0}
    for _ in range(_ROUNDS):
        keys = [f"kvparams-doctor-{token_hex(8)}" for _ in range(_PAGES)]
        start = time.perf_counter()
        puts = store.put([PutOp(key, (source,)) for key in keys], _DEADLINE_S).result()
        middle = time.perf_counter()
        gets = [store.get([GetOp(key, (target,))], _DEADLINE_S).result()[0] for key in keys]
        end = time.perf_counter()
        store.delete(keys, _DEADLINE_S).result()
        bad = next((result for result in (*puts, *gets) if result.code is not ResultCode.OK), None)
        if bad is not None:
            yield Advice("error", f"an operation with {_PAGES} pages ended with {bad.code.value}", _TODO[bad.code])
            return
        best["put"] = max(best["put"], _PAGES * size / (middle - start) / 1e9)
        best["get"] = max(best["get"], _PAGES * size / (end - middle) / 1e9)
    found = f"put {best['put']:.2f} GB/s, get {best['get']:.2f} GB/s with pages of {size >> 10} KiB"
    if min(best.values()) < _SLOW:
        yield Advice(
            "warning",
            found,
            "recomputing may be faster than loading: check the network, and run `kvparams store bench`",
        )
    else:
        yield Advice("ok", found)
    start = time.perf_counter()
    store.exists([f"{name}.no" for name in map(str, range(1000))], _DEADLINE_S).result()
    lookup_s = time.perf_counter() - start
    found = f"a lookup of 1000 keys takes {1000 * lookup_s:.1f} ms"
    if lookup_s > _SLOW_LOOKUP_S:
        yield Advice("warning", found, "every request waits for a lookup: move the store closer, or reduce its load")
    else:
        yield Advice("ok", found)


def _memory_speed() -> float:
    """GB/s of one core."""
    source, target = memoryview(bytearray(16 << 20)), memoryview(bytearray(16 << 20))
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        target[:] = source
        best = max(best, source.nbytes / (time.perf_counter() - start) / 1e9)
    return best
