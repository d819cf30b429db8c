"""Names real stores for engines to share, each with the URL that prefill writes to and the one that decode reads."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from demo.processes import free_port
from tests.support.connectors.lmcache_server import LMCacheServer
from tests.support.connectors.mooncake_cluster import Cluster
from tests.support.connectors.valkey_server import ValkeyServer

__all__ = ["KINDS", "StoreURLs", "running_store"]

KINDS: Final = ("file", "valkey", "mooncake", "lmcache", "peer", "tiered")


@dataclass(frozen=True, slots=True)
class StoreURLs:
    """Of one store."""

    writing: str
    reading: str


@contextmanager
def running_store(kind: str, folder: Path) -> Generator[StoreURLs]:
    """Start what a store of this kind needs; `folder` takes files and logs."""
    folder.mkdir(parents=True, exist_ok=True)
    file = f"file://{folder}/kv?size=512MiB"
    with ExitStack() as stack:
        if kind == "file":
            url = file
        elif kind == "valkey":
            url = stack.enter_context(ValkeyServer(folder / "valkey", max_memory="512mb")).url
        elif kind == "mooncake":
            url = stack.enter_context(Cluster(folder, "512MiB")).url(local="127.0.0.1")
        elif kind == "lmcache":
            url = stack.enter_context(LMCacheServer(folder / "lmcache")).url
        elif kind == "tiered":  # each engine its own memory before what they share
            shared = stack.enter_context(ValkeyServer(folder / "valkey", max_memory="512mb")).url
            url = f"tiered:?l1={quote('memory:?size=64MiB', safe='')}&l2={quote(shared, safe='')}"
        elif kind == "peer":  # decode reads the memory of the engine that computed
            yield StoreURLs(f"peer://127.0.0.1:{free_port()}?size=256MiB", "peer://127.0.0.1:0?size=1MiB")
            return
        else:
            raise ValueError(f"no store {kind}; known: {', '.join(KINDS)}")
        yield StoreURLs(url, url)
