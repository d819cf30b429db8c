"""Tests what pods and endpoint slices say about engines, in each convention that is understood."""

from collections.abc import Mapping
from typing import Any

import pytest

from kvparams_proxy.discovery.pod_entries import endpoint_slice_entries, pod_entries


def _pod(labels: Mapping[str, str], annotations: Mapping[str, str] | None = None, **more: Any) -> dict[str, Any]:
    status = {"podIP": "10.0.0.1", "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    metadata = {"name": "p-0", "uid": "u", "labels": labels, "annotations": annotations or {}}
    return {"metadata": metadata | more.pop("metadata", {}), "status": status | more}


def test_our_own_labels_and_annotations_say_everything() -> None:
    annotations = {
        "kvparams.io/connector": "mooncake",
        "kvparams.io/port": "9000",
        "kvparams.io/bootstrap-port": "8998",
        "kvparams.io/kv-events-port": "5557",
    }
    (found,) = pod_entries(_pod({"kvparams.io/role": "prefill", "kvparams.io/group": "a"}, annotations), [8000])
    assert found.uid == "u"
    assert found.document == {
        "id": "p-0",
        "url": "http://10.0.0.1:9000",
        "labels": {"kvparams.io/role": "prefill", "kvparams.io/group": "a"},
        "drain": False,
        "role": "prefill",
        "connector": "mooncake",
        "group": "a",
        "bootstrap": "http://10.0.0.1:8998",
        "kv_events": "tcp://10.0.0.1:5557",
    }


@pytest.mark.parametrize(
    ("labels", "role"),
    [
        ({"llm-d.ai/role": "decode"}, "decode"),
        ({"llm-d.ai/role": "both"}, "aggregated"),
        ({"llm-d.ai/role": "encode"}, "encode"),
        ({"llm-d.ai/role": "encode-prefill"}, "prefill"),
        ({"llm-d.ai/role": "both", "kvparams.io/role": "decode"}, "decode"),
        ({"model": "llama-prefill"}, None),
    ],
)
def test_roles_of_others(labels: dict[str, str], role: str | None) -> None:
    (found,) = pod_entries(_pod(labels), [8000])
    assert found.document.get("role") == role


@pytest.mark.parametrize(
    ("changes", "drains"),
    [
        ({}, False),
        ({"conditions": []}, True),
        ({"conditions": [{"type": "Ready", "status": "False"}]}, True),
        ({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}, True),
    ],
)
def test_a_pod_that_is_not_ready_or_is_being_deleted_drains(changes: dict[str, Any], drains: bool) -> None:
    (found,) = pod_entries(_pod({}, **changes), [8000])
    assert found.document["drain"] is drains


@pytest.mark.parametrize("changes", [{"podIP": None}, {"podIP": ""}, {"phase": "Failed"}, {"phase": "Succeeded"}])
def test_a_pod_without_an_address_is_no_engine(changes: dict[str, Any]) -> None:
    assert pod_entries(_pod({}, **changes), [8000]) == ()


def test_an_address_of_version_6_has_brackets() -> None:
    (found,) = pod_entries(_pod({}, podIP="fd00::1"), [8000])
    assert found.document["url"] == "http://[fd00::1]:8000"


@pytest.mark.parametrize(
    ("pod", "said"),
    [
        (_pod({}, {"kvparams.io/port": "x"}), "kvparams.io/port must be a port"),
        (_pod({}, {"kvparams.io/port": "99999"}), "kvparams.io/port must be a port"),
        (_pod({}, podIP="evil.example/path"), "no IP address"),
    ],
)
def test_what_cannot_be_used_is_said(pod: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pod_entries(pod, [8000])


def test_pods_of_any_shape_raise_nothing_else() -> None:
    pods: list[dict[str, Any]] = [{}, {"metadata": None, "status": []}]
    pods.append({"metadata": {"labels": [1]}, "status": {"conditions": 7}})
    for pod in pods:
        assert pod_entries(pod, [8000]) == ()


def test_an_endpoint_slice_names_its_endpoints() -> None:
    slice: dict[str, Any] = {
        "metadata": {"name": "s", "labels": {"kvparams.io/role": "decode"}},
        "ports": [{"port": 8080}],
        "endpoints": [
            {"addresses": ["10.0.0.1"], "conditions": {"ready": True}, "targetRef": {"name": "p-0", "uid": "u"}},
            {"addresses": ["10.0.0.2"], "conditions": {"ready": False, "terminating": True}},
            {"addresses": []},
        ],
    }
    first, second = endpoint_slice_entries(slice, 8000)
    assert (first.document["id"], first.document["url"], first.uid) == ("p-0", "http://10.0.0.1:8080", "u")
    assert (second.document["id"], second.document["drain"]) == ("10.0.0.2", True)


@pytest.mark.parametrize(("said", "ranks"), [("4", "4"), ("4-7", "4-7"), ("x", "x"), ("9" * 200, "9" * 200)])
def test_an_annotation_says_the_ranks_behind_one_port(said: str, ranks: object) -> None:
    (found,) = pod_entries(_pod({"kvparams.io/role": "prefill"}, {"kvparams.io/ranks": said}), [8000])
    assert found.document["ranks"] == ranks


def test_behind_several_ports_are_ranks() -> None:
    pod = _pod({"kvparams.io/role": "decode"})
    found = pod_entries(pod, [8000, 8001])
    assert [(each.document["id"], each.document["url"]) for each in found] == [
        ("p-0-8000", "http://10.0.0.1:8000"),
        ("p-0-8001", "http://10.0.0.1:8001"),
    ]
    (said,) = pod_entries(_pod({}, {"kvparams.io/port": "9000"}), [8000, 8001])
    assert (said.document["id"], said.document["url"]) == ("p-0", "http://10.0.0.1:9000")
