"""Provides real engines with the proxy beside one of them, in every place.

They are started together when the first test asks for one.
"""

import asyncio
from collections.abc import Callable, Mapping

import httpx
import pytest
import uvloop

from demo.processes import Processes, Server
from tests.support.started import client, processes, store_url
from tests.system.sidecar.places import PLACES, Place, place

__all__ = ["client", "processes", "store_url"]

STEPS = ("--step-ms", "20")
"""So that streams last, and there is time to leave."""


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the proxy runs on in production."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def single(processes: Processes) -> Server:
    """One engine that does all the work alone."""
    return processes.engine("single")


@pytest.fixture(scope="session")
def places(processes: Processes, single: Server, store_url: str) -> dict[str, Place]:
    """All of them, ready."""
    prefill = processes.engine("p0", "prefill", store_url, *STEPS)
    decode = processes.engine("d0", "decode", store_url, *STEPS)
    found = {name: place(processes, name, prefill, decode, store_url, *STEPS) for name in PLACES}
    processes.wait_ready(single, prefill, decode)
    for each in found.values():
        processes.wait_until(each.server, lambda url=each.ours: _healthy(url))
    return found


@pytest.fixture(params=PLACES)
def beside(request: pytest.FixtureRequest, places: dict[str, Place]) -> Place:
    """Each of them in turn."""
    return places[request.param]


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=1.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
