"""Provides engines as real processes, three of them sharing a file store.

They are started together when the first test asks for one.
"""

import pytest
import torch

from demo.processes import Processes, Server
from reference_engine.model import Model
from reference_engine.shape import ModelShape
from tests.support.started import client, processes, store_url

__all__ = ["client", "processes", "store_url"]


@pytest.fixture(scope="session")
def model() -> Model:
    """The model that every engine serves."""
    torch.set_num_threads(1)  # as in an engine: the matrices are too small for more
    return Model(ModelShape(), max_tokens=4096)


@pytest.fixture(scope="session")
def servers(processes: Processes, store_url: str) -> dict[str, Server]:
    """One engine of each role by name, ready; `single` has no store and does all the work alone."""
    found = {
        "prefill": processes.engine("p0", "prefill", store_url),
        "decode": processes.engine("d0", "decode", store_url),
        "both": processes.engine("b0", "both", store_url),
        "single": processes.engine("single"),
    }
    processes.wait_ready(*found.values())
    return found


@pytest.fixture
def prefill(servers: dict[str, Server]) -> str:
    """The URL of the prefill engine."""
    return servers["prefill"].url


@pytest.fixture
def decode(servers: dict[str, Server]) -> str:
    """The URL of the decode engine."""
    return servers["decode"].url


@pytest.fixture
def both(servers: dict[str, Server]) -> str:
    """The URL of the engine that takes both legs and shares the store with the others."""
    return servers["both"].url


@pytest.fixture
def single(servers: dict[str, Server]) -> str:
    """The URL of the engine that does all the work alone."""
    return servers["single"].url
