"""How much effort the stress tests make, and where what they saw is written down."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

RESULTS = Path(__file__).parents[1] / "benchmarks" / "soak.jsonl"

# No example is judged by the clock. `make check` looks for what has just been broken; `make test` looks longer, with
# `--hypothesis-profile=thorough`. Who needs more examples than others says so in multiples of these.
settings.register_profile("quick", deadline=None, max_examples=25)
settings.register_profile("thorough", deadline=None, max_examples=100)
settings.load_profile("quick")


_TOGETHER = {
    ("tests/reference_engine/", "servers"): "engines",
    ("tests/sidecar/", "places"): "sidecar",
    ("tests/connectors/lm_server/", "server"): "lmcache",
    ("tests/connectors/test_mooncake.py", "cluster"): "mooncake",
}
"""Fixtures whose servers take seconds to start: all tests that use one of them run in one worker."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        used: list[str] = getattr(item, "fixturenames", [])
        for (path, fixture), group in _TOGETHER.items():
            if fixture in used and item.nodeid.startswith(path):
                item.add_marker(pytest.mark.xdist_group(group))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run stress tests at full length and record what they saw")


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
