"""Compiles the C programs of `benchmarks/native` when they are first needed, into `.cache/benchmarks`."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final, Literal

from tests.support.processes import StartError

__all__ = ["compiled"]

_SOURCES: Final = Path(__file__).with_name("native")
_BINARIES: Final = Path(__file__).parents[1] / ".cache" / "benchmarks"
_PARTS: Final = {
    "stub_engine": ("stub_engine.c", "http_server.c", "http_server.h"),
    "load_generator": ("load_generator.c", "http_client.c", "http_client.h"),
}
_FLAGS: Final = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror")


def compiled(program: Literal["stub_engine", "load_generator"]) -> Path:
    """Returns the program's file, which is compiled if its sources have changed.

    Raises:
        StartError: there is no C compiler, or it refuses the sources.
    """
    sources = [_SOURCES / name for name in _PARTS[program]]
    digest = hashlib.sha256(b"\0".join([repr(_FLAGS).encode(), *(path.read_bytes() for path in sources)]))
    target = _BINARIES / f"{program}-{digest.hexdigest()[:16]}"
    if target.exists():
        return target
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise StartError("the benchmarks need a C compiler: install gcc or clang, or name one in CC")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_suffix(f".{os.getpid()}")
    files = [str(path) for path in sources if path.suffix == ".c"]
    done = subprocess.run(
        [compiler, *_FLAGS, "-o", str(beside), *files], capture_output=True, text=True, check=False, timeout=120
    )
    if done.returncode:
        raise StartError(f"{program} does not compile:\n{done.stderr[-4000:]}")
    beside.replace(target)
    return target
