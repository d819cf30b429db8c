"""A pytest plugin: what one engine alone answers, asked once for all tests that name this in `pytest_plugins`."""

from pathlib import Path

import pytest

from demo.processes import Processes
from tests.vllm.engines import start_engine
from tests.vllm.own_connectors import Alone
from tests.vllm.traffic import answers, mixed


@pytest.fixture(scope="session")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Alone:
    """200 of them in a soak run."""
    asks = mixed(200 if request.config.getoption("--soak") else 60)
    with Processes(tmp_path_factory.mktemp("single")) as processes:
        single = start_engine(processes, "single", model)
        processes.wait_ready(single, within_s=400)
        return Alone(asks, answers(single.url, asks))
