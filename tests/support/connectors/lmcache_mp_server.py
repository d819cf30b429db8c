"""Runs a real LMCache multi-process server for tests: its own process, free ports, a pool in shared memory of its own.

Whoever starts a server ends it and removes its shared memory.
"""

import json
import os
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any, Final, Self

from tests.support.lmcache_process import lmcache_environment, lmcache_python
from tests.support.processes import free_ports, http_get
from tests.support.waiting import wait_until

__all__ = ["MPServer"]

_START_S: Final = 120.0


class MPServer:
    """One server; a context manager that ends it."""

    def __init__(self, folder: Path, *, pool_bytes: int = 40 << 20) -> None:
        self.port, self.http = free_ports(2)
        self._name = f"kvparams-test-{self.port}"
        self._log = folder / f"lmcache-mp-{self.port}.log"
        self._command = [
            *(str(Path(lmcache_python()).with_name("lmcache")), "server", "--host", "127.0.0.1"),
            *("--port", str(self.port), "--http-host", "127.0.0.1", "--http-port", str(self.http)),
            *("--l1-size-gb", str(pool_bytes / (1 << 30)), "--chunk-size", "256", "--max-workers", "2"),
            *("--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven"),
            *("--shm-name", self._name, "--disable-observability"),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, **settings: object) -> str:
        """A store's URL."""
        query = "&".join(f"{name}={value}" for name, value in {"max_value": "1MiB", **settings}.items())
        return f"lmcache-mp://127.0.0.1:{self.port}?http={self.http}&{query}"

    @property
    def said(self) -> str:
        """Its log."""
        return self._log.read_text(errors="replace")

    @property
    def memory(self) -> Path:
        """Its pool."""
        return Path("/dev/shm") / f"lmcache_l1_pool_{self._name}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        environment = {**lmcache_environment(), "LMCACHE_LOG_LEVEL": "INFO"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        try:
            self._await(self._process)
        except BaseException:  # whoever starts it has nothing to end
            self._end()
            raise

    def _await(self, process: "subprocess.Popen[bytes]") -> None:
        url = f"http://127.0.0.1:{self.http}/"
        wait_until(
            lambda: http_get(url)[0] != 0 or process.poll() is not None,
            _START_S,
            pause_s=0.05,
            seen=lambda: self.said[-4000:],
        )
        assert process.poll() is None, f"lmcache server did not start:\n{self.said[-4000:]}"

    def kill(self) -> None:
        """End it at once, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None

    def stop(self) -> None:
        """SIGSTOP: it is there and answers nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def clear(self) -> None:
        """Everything goes, locked or not."""
        self.post("/cache/clear", {"tier": "l1", "force": True})

    def post(self, path: str, body: object) -> Any:
        """Ask its administration."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20) as answer:
            return json.loads(answer.read())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self.kill()
        self.memory.unlink(missing_ok=True)
