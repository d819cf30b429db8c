"""Tests what an InferencePool says, and its objectives."""

from typing import Any

import pytest

from kvparams_proxy.config.discovery_url import KubernetesSource
from kvparams_proxy.discovery.inference_pool import pods_of_pool
from kvparams_proxy.picker.objectives import WatchedObjectives


def _pool(**spec: Any) -> dict[str, Any]:
    return {"spec": {"selector": {"matchLabels": {"b": "2", "a": "1"}}, "targetPorts": [{"number": 8000}], **spec}}


def test_a_pool_says_labels_and_ports() -> None:
    assert pods_of_pool(_pool()) == KubernetesSource("a=1,b=2", ports=(8000,))
    assert pods_of_pool(_pool(targetPorts=[{"number": 1}, {"number": 2}])).ports == (1, 2)


@pytest.mark.parametrize(
    "pool",
    [
        {},
        {"spec": None},
        _pool(selector={}),
        _pool(selector={"matchLabels": {}}),
        _pool(selector={"matchLabels": {"a": 1}}),
        _pool(targetPorts=[]),
        _pool(targetPorts=7),
        _pool(targetPorts=["8000"]),
        _pool(targetPorts=[{"number": True}]),
        _pool(targetPorts=[{"number": 65536}]),
        _pool(targetPorts=[{"number": 8000}] * 9),
    ],
)
def test_a_pool_that_cannot_be_used_is_refused(pool: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="InferencePool"):
        pods_of_pool(pool)


def test_objectives_are_those_of_the_pool() -> None:
    found = WatchedObjectives("llama", {"flag": 1, "both": 2})

    def objective(name: str, pool: object = "llama", **spec: object) -> dict[str, Any]:
        return {"metadata": {"name": name}, "spec": {"poolRef": {"name": pool}, **spec}}

    found.replace(
        [
            objective("high", priority=10),
            objective("plain"),
            objective("both", priority=9),
            objective("other", "qwen", priority=5),
            objective("text", priority="5"),
            objective("huge", priority=1 << 40),
            {"metadata": None, "spec": []},
            {},
        ]
    )
    names = ("high", "plain", "both", "flag", "other", "text", "huge", "none")
    assert {name: found.priority(name) for name in names} == {
        "high": 10, "plain": 0, "both": 2, "flag": 1, "other": None, "text": None, "huge": None, "none": None
    }  # fmt: skip
    found.replace([])
    assert found.priority("high") is None
