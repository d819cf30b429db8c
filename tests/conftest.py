"""How much effort the stress tests make, and where what they saw is written down."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[1] / "benchmarks" / "soak.jsonl"


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
