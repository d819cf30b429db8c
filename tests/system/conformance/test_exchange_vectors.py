"""Tests that proxies do what spec/draft/vectors/exchanges.json says."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvparams_conformance.site import Site, Under
from tests.support.exchange_vectors import differences, replay
from tests.system.conformance.runs import RUNS

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[3] / "spec" / "draft" / "vectors" / "exchanges.json").read_text()
)["cases"]


async def differing(command: str) -> dict[str, list[str]]:
    """Returns the cases that a proxy does otherwise."""
    site = Site(Under("document", command=command))
    try:
        await site.start()
        found = {case["name"]: await replay(site, case) for case in CASES}
    finally:
        await site.stop()
    assert len(found) == len(CASES) > 10
    return {name: texts for name, texts in found.items() if texts}


async def test_our_proxy_agrees_with_every_vector(ours: str) -> None:
    assert await differing(f"{ours} {RUNS['store'].options}") == {}


async def test_the_reference_proxy_in_javascript_agrees_with_every_vector(node_proxy: str) -> None:
    assert await differing(node_proxy) == {}


@pytest.mark.slow
async def test_the_reference_proxy_in_go_agrees_with_every_vector(go_proxy: str) -> None:
    assert await differing(go_proxy) == {}


@pytest.mark.parametrize(
    ("wanted", "told", "found"),
    [
        ({"a": 1}, {"a": True}, ["x.a is True, not 1"]),
        ({"a": "$id", "b": "$id"}, {"a": "1", "b": "2"}, ["x.b is '2', and $id is '1'"]),
        ({"a": 1}, {"a": 1, "b": 2}, ["x.b is there"]),
        ({"a": None}, {}, ["x.a is Ellipsis, not None"]),
        ({"a": "$ttl:100"}, {"a": 101}, ["x.a is 101"]),
        ([1, 2], [1], ["x has 1 entries"]),
    ],
)
def test_a_difference_is_noticed(wanted: object, told: object, found: list[str]) -> None:
    """Negative control."""
    assert differences(wanted, told, {}, "x") == found
