"""Tests that a process that uses a store for long does not grow, and that no operation allocates a page.

Each store is used by a process of its own (`memory_worker.py`), so that nothing else counts. Controls show that the
same tests notice a store that leaks or allocates a page.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final
from urllib.parse import quote

import pytest

from tests.support.connectors import lmcache_env
from tests.support.connectors.lmcache_mp_server import MPServer
from tests.support.connectors.lmcache_server import LMCacheServer
from tests.support.connectors.memory_worker import PAGE
from tests.support.connectors.mooncake_cluster import Cluster
from tests.support.connectors.valkey_server import ValkeyServer

Settings = dict[str, Any]
_WORKER: Final = Path(__file__).parents[2] / "support" / "connectors" / "memory_worker.py"
_MOST_GROWN: Final = 8 * PAGE
_LEAK: Final = 50
"""Operations of the leaking store that leak one page."""


@pytest.fixture
def started() -> Iterator[ExitStack]:
    """Servers, which end with the test."""
    with ExitStack() as stack:
        yield stack


def opened(name: str, folder: Path, started: ExitStack) -> Settings:
    """Start what the store needs; how to use it."""
    if name == "memory":
        return {"url": "memory:?size=8MiB"}
    if name == "file":
        return {"url": f"file://{folder}/store?size=8MiB"}
    if name == "valkey":
        return {"url": started.enter_context(ValkeyServer(folder / "server")).url}
    if name == "mooncake":
        return {"url": started.enter_context(Cluster(folder, "64MiB")).url()}
    if name == "lmcache":
        return {"url": started.enter_context(LMCacheServer(folder / "server")).url}
    if name == "lmcache-mp":
        return {"url": started.enter_context(MPServer(folder)).url()}
    if name == "peer":
        return {"url": "peer://127.0.0.1?size=8MiB", "source": "peer://127.0.0.1?size=8MiB"}
    assert name == "tiered"
    server = started.enter_context(ValkeyServer(folder / "server"))
    return {"url": f"tiered:?l1={quote('memory:?size=8MiB', safe='')}&l2={quote(server.url, safe='')}"}


def used(settings: Settings, *, python: str = sys.executable) -> tuple[int, int]:
    """Bytes by which the process grew, and the most that was allocated on top at any moment."""
    environment = None if python == sys.executable else lmcache_env.environment()
    done = subprocess.run(
        [python, str(_WORKER), json.dumps(settings)],
        cwd=lmcache_env.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    sizes: list[int] = seen["resident"]
    return int(median(sizes[-3:]) - median(sizes[:3])), int(seen["allocated_at_most"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("store", ["memory", "file", "valkey", "mooncake", "lmcache", "lmcache-mp", "peer", "tiered"])
def test_memory_neither_grows_nor_is_a_page_allocated(
    store: str,
    tmp_path: Path,
    started: ExitStack,
    effort: Callable[[int, int], int],
    record: Callable[[dict[str, object]], None],
) -> None:
    settings = {
        **opened(store, tmp_path, started),
        "operations": effort(2_000, 10_000 if store.startswith("lmcache") else 40_000),
    }
    python = lmcache_env.python() if store == "lmcache-mp" else sys.executable
    grown, allocated = used(settings, python=python)
    record({"operations": settings["operations"], "grown_bytes": grown, "allocated_at_most": allocated})
    assert allocated < PAGE
    assert grown < _MOST_GROWN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoiled", "grows", "allocates"), [({"leak": _LEAK}, True, True), ({"waste": 1}, False, True)]
)
def test_a_store_that_leaks_or_allocates_a_page_is_noticed(
    spoiled: Settings, grows: bool, allocates: bool, tmp_path: Path, started: ExitStack
) -> None:
    grown, allocated = used({**opened("memory", tmp_path, started), **spoiled, "operations": 4_000})
    assert (grown >= _MOST_GROWN, allocated >= PAGE) == (grows, allocates)
