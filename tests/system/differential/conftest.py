"""Provides one engine alone, and a proxy before a prefill and a decode engine; their answers must be equal.

A page of the store has as many tokens as a block of an engine's own cache, so that both find equally much.
"""

import sys
from collections.abc import Iterator

import pytest

from demo.processes import Processes, Server, free_port
from tests.support.started import client

__all__ = ["client"]

CACHE = ("--page-tokens", "16", "--blocks", "8192")


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Starts servers; stops them at the end of the module."""
    with Processes(tmp_path_factory.mktemp("logs")) as group:
        yield group


@pytest.fixture(scope="module")
def servers(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Server]:
    """By name, ready: `single`, `proxy`, and `continuing`, a proxy that would continue streams elsewhere and so asks
    engines for more than the client did; also `prefill` and `decode`."""
    store = f"file://{tmp_path_factory.mktemp('store')}/kv?size=256MiB"
    found = {
        "single": processes.engine("single", "both", None, *CACHE),
        "prefill": processes.engine("p0", "prefill", store, *CACHE),
        "decode": processes.engine("d0", "decode", store, *CACHE),
    }
    processes.wait_ready(*found.values())
    found["proxy"] = processes.proxy([found["prefill"]], [found["decode"]])
    port = free_port()
    command = (sys.executable, "-m", "kvparams", "proxy", "--connector", "store", "--port", str(port), "--probe", "1")
    engines = (f"--prefill=p0={found['prefill'].url}", f"--decode=d0={found['decode'].url}")
    found["continuing"] = processes.start("continuing", *command, *engines, "--continuation", port=port)
    processes.wait_ready(found["proxy"], found["continuing"])
    return found
