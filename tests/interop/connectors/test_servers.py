"""Tests that a test server whose start fails is not left behind."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.connectors import lmcache_mp_server, lmcache_server, mooncake_cluster, peer_process, valkey_server


class Interrupted(Exception):
    """Whatever goes wrong while somebody waits for a server."""


def interrupt(*_: object) -> Any:
    raise Interrupted


STARTS: list[tuple[ModuleType, object, str, Callable[[Path], object]]] = [
    (valkey_server, valkey_server.ValkeyServer, "_ping", lambda folder: valkey_server.ValkeyServer(folder).__enter__()),
    (lmcache_server, lmcache_server.LMCacheServer, "_answers", lambda to: lmcache_server.LMCacheServer(to).__enter__()),
    (lmcache_mp_server, lmcache_mp_server, "http_get", lambda folder: lmcache_mp_server.MPServer(folder).__enter__()),
    (peer_process, peer_process.PeerProcess, "_answer", lambda _: peer_process.PeerProcess("peer://127.0.0.1")),
    (mooncake_cluster, mooncake_cluster, "wait_until", mooncake_cluster.Cluster),
]


@pytest.mark.parametrize(("module", "owner", "wait", "start"), STARTS, ids=[one[0].__name__[17:] for one in STARTS])
def test_a_server_whose_start_fails_is_not_left_behind(
    module: ModuleType,
    owner: object,
    wait: str,
    start: Callable[[Path], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Seen(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            started.append(self)

    monkeypatch.setattr(module.subprocess, "Popen", Seen)  # type: ignore[attr-defined]
    monkeypatch.setattr(owner, wait, interrupt)
    with pytest.raises(Interrupted):
        start(tmp_path)
    [process] = started
    assert process.returncode is not None
