"""Defines how much work the stress tests do and where their measurements are written."""

import functools
import gc
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings

RESULTS = Path(__file__).parents[1] / "benchmarks" / "soak.jsonl"

# No example is judged by the clock. `make test` finds what has just been broken; `make test-long` looks longer, with
# `--hypothesis-profile=thorough`. Who needs more examples than others says so in multiples of these. Both draw the same
# examples each time, so that what was seen to pass, passes; `make soak` draws others, and more, to find what is new.
settings.register_profile("quick", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=100, derandomize=True)
settings.register_profile("soak", deadline=None, max_examples=25, print_blob=True)
settings.register_profile("searching", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("quick")

# Tests count what engines are asked. The check at a start would ask them, too, whenever it comes to it; its own tests
# turn it on.
os.environ["KVPARAMS_STARTUP_CHECK"] = "off"


_TOGETHER = {
    "tests/interop/connectors/lm_server/": "lmcache",
    "tests/interop/connectors/test_mooncake.py": "mooncake",
    "tests/interop/connectors/test_peer_mooncake.py": "transfer engines",
    "tests/interop/connectors/test_valkey_cluster.py": "cluster",
    "tests/system/differential/": "differential",
    "tests/system/modes/test_real_engines.py": "modes",
    "tests/system/proxy/ui/test_page.py": "browser",
    "tests/system/queue/test_end_to_end.py": "broker",
    "tests/system/queue/test_lost.py": "broker",
    "tests/system/queue/test_queue_mode.py": "broker",
    "tests/system/reference_engine/test_api.py": "engines",
    "tests/system/reference_engine/test_demo.py": "engines",
    "tests/system/reference_engine/test_fields.py": "engines",
    "tests/system/reference_engine/test_handover.py": "engines",
    "tests/system/reference_engine/test_openapi_of_legs.py": "engines",
    "tests/system/reference_engine/test_thousand_prompts.py": "engines",
    "tests/system/reference_engine/test_transfers.py": "engines",
    "tests/system/sidecar/test_sidecar_places.py": "places",
    "tests/system/sidecar/test_sidecar_command.py": "places",
    "tests/system/versions/": "versions",
}
"""Where a test's path begins so, its fixture's servers take seconds to start: all of a group run in one worker."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays to the end: the garbage collector looks at none of it, now or while tests run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """`--dist loadgroup` by path: xdist 3.8 tells workers' groups in a way that pytest 9 no longer reads."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling  # not everywhere, where these tests run

    class InGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((group for path, group in _TOGETHER.items() if nodeid.startswith(path)), nodeid)

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            """Forgets a group that is complete: xdist counts all groups of a worker anew with each test."""
            super().mark_test_complete(node, item_index, duration)
            assigned = self.assigned_work[node]
            scope = self._split_scope(self.registered_collections[node][item_index])
            if all(assigned[scope].values()):
                del assigned[scope]

    return InGroups(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run stress tests at full length and record what they saw")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--soak"):
        settings.load_profile("soak")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell that starts the tests in the background has them, and all that they start, ignore Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is only worth its time at full length is left out of any other run."""
    if config.getoption("--soak"):
        return
    left_out = [item for item in items if item.get_closest_marker("soak") is not None]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item.get_closest_marker("soak") is None]


@pytest.fixture(scope="session", autouse=True)
def read_entry_points_once() -> Generator[None]:
    """Reads what is installed once for each import path: each lookup of a plugin takes 10 ms otherwise."""

    @functools.cache
    def registered(path: tuple[str, ...], group: str) -> EntryPoints:
        return entry_points(group=group)

    def lookup(*, group: str, **wanted: Any) -> EntryPoints:
        return registered(tuple(sys.path), group).select(**wanted)

    with patch("kvparams.plugins.entry_points", lookup):
        yield


@pytest.fixture
def effort(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """`effort(budget, full)`: how many times to do something; `full` in a soak run."""
    soak = bool(request.config.getoption("--soak"))
    return lambda budget, full: full if soak else budget


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[dict[str, object]], None]:
    """Write down, in a soak run, what a stress test saw: one line of JSON for each test and run."""

    def write(seen: dict[str, object]) -> None:
        if not request.config.getoption("--soak"):
            return
        machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
        asked = ["git", "-C", str(RESULTS.parent), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        made = {"test": request.node.name, "day": time.strftime("%Y-%m-%d"), "commit": commit, "machine": machine}
        line = {**made, **seen}
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")

    return write
