"""Talks to LMCache in an interpreter of its own, because LMCache pins old versions of many of our dependencies.

Every wait ends, and whoever starts a worker ends it.
"""

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

__all__ = ["ChunkShape", "LMCacheError", "LMCacheWorker", "Spec", "lmcache_environment", "lmcache_python"]

ROOT: Final = Path(__file__).parents[2]
_START_S: Final = 120.0
_ANSWER_S: Final = 120.0


class LMCacheError(Exception):
    """LMCache is not there, or a worker failed; the end of what it said stands in the message."""


def lmcache_python() -> str:
    """The interpreter that has LMCache. Raises LMCacheError with what to do if there is none."""
    found = ROOT / ".venv-lmcache" / "bin" / "python"
    if not found.exists():
        raise LMCacheError(f"{found} is not there; run `make install-lmcache`")
    return str(found)


def lmcache_environment() -> dict[str, str]:
    """The environment for LMCache: it tells nobody that it was used, and keeps its banner."""
    quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "WARNING"}
    return {**os.environ, **quiet, "PYTHONHASHSEED": "0"}


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """The KV of one full chunk, in bfloat16."""

    layers: int
    tokens: int
    heads: int
    head_size: int

    @property
    def nbytes(self) -> int:
        """Of all of it, K and V."""
        return 2 * self.layers * self.tokens * self.heads * self.head_size * 2


@dataclass(frozen=True, slots=True)
class Spec:
    """What a worker is: LMCache's `StorageManager` with one backend, and chunks that lie ready in its pool."""

    settings: Mapping[str, object]
    """Of `LMCacheEngineConfig`. Or `{"file": PATH}`: LMCache's own YAML."""
    backend: str
    """As LMCache calls it: `RemoteBackend`, `RemoteBackend-kvparams`."""
    shape: ChunkShape
    count: int
    """Chunks that are put and read at a time."""
    pages: str = ""
    """A file with `count` chunks to put and as much room for those that were read; empty: chunks of its own."""
    last_tokens: int = 0
    """Tokens of the last chunk; 0: it is full."""
    disabled: Sequence[str] = field(default_factory=tuple)
    """Packages that the worker is to believe are not installed."""


class LMCacheWorker:
    """A worker process; a context manager that ends it."""

    def __init__(self, spec: Spec, log: Path) -> None:
        """Start it, and wait until LMCache is ready.

        Raises:
            LMCacheError: it did not get ready.
        """
        self._log = log
        command = [lmcache_python(), str(Path(__file__).with_name("lmcache_worker.py")), json.dumps(asdict(spec))]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, cwd=ROOT, env=lmcache_environment()
            )
        try:
            self._answer(_START_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def said(self) -> str:
        """What LMCache has logged so far."""
        return self._log.read_text(errors="replace")

    def ask(self, do: str, name: str = "", **more: object) -> dict[str, Any]:
        """Have it do something and wait for the answer; see `tests.support.lmcache_worker` for what there is.

        Raises:
            LMCacheError: it failed, or did not answer.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, "name": name, **more}).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer(_ANSWER_S)

    def close(self) -> None:
        """End it."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.close()  # it ends by itself when nobody can ask any more
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        out = self._process.stdout
        assert out is not None
        give_up = time.monotonic() + timeout_s
        ready, _, _ = select.select([out], [], [], max(0.0, give_up - time.monotonic()))
        line = out.readline() if ready else b""
        if not line:
            state = f"ended with {self._process.poll()}" if ready else f"did not answer within {timeout_s} s"
            raise LMCacheError(f"the LMCache worker {state}:\n{self.said[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LMCacheError(f"{answer['error']}\n{self.said[-4000:]}")
        return answer
