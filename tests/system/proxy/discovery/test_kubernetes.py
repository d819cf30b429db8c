"""Tests the real proxy with production-stack's command line before a Kubernetes API and stub engines."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from demo.client import NO_CERTIFICATES
from kvparams_proxy.config_errors import ConfigError
from kvparams_proxy.discovery.kubernetes_api import ExpiredVersion, KubernetesAPI, KubernetesError
from kvparams_proxy.discovery.object_watcher import ObjectWatcher
from kvparams_proxy.picker.objectives import WatchedObjectives
from tests.support.kubernetes.api_server import FakeAPIServer
from tests.support.processes import Processes, free_ports
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until

_KVPARAMS = str(Path(sys.executable).with_name("kvparams"))
_LABELS = {"prefill": "llama-prefill", "decode": "llama-decode"}
_FLAGS = (
    *("--service-discovery", "k8s", "--k8s-namespace", "default", "--k8s-port", "8000"),
    *("--k8s-label-selector", "environment=router,release=router"),
    *("--prefill-model-labels", "llama-prefill", "--decode-model-labels", "llama-decode"),
    *("--routing-logic", "disaggregated_prefill_orchestrated"),
)
"""As in production-stack's tutorial of disaggregated prefill."""


def put_pod(api: FakeAPIServer, name: str, role: str, port: int, **metadata: Any) -> None:
    """Creates a pod whose engine listens on a port of its own, which an annotation says."""
    labels = {"environment": "router", "release": "router", "model": _LABELS[role]}
    conditions = [{"type": "Ready", "status": "True"}]
    annotations = {"kvparams.io/port": str(port)}
    api.pods.put(
        name,
        labels,
        metadata={"annotations": annotations, **metadata},
        status={"podIP": "127.0.0.1", "phase": "Running", "conditions": conditions},
    )


@dataclass
class Site:
    """A proxy that finds its engines through a Kubernetes API."""

    api: FakeAPIServer
    stub: StubEngines
    url: str
    client: httpx.AsyncClient

    async def complete(self) -> int:
        """Sends a request and returns its status."""
        body = {"model": "stub", "prompt": "hello", "max_tokens": 2}
        return (await self.client.post(f"{self.url}/v1/completions", json=body)).status_code

    async def health(self) -> dict[str, Any]:
        """Returns what /health says."""
        return (await self.client.get(f"{self.url}/health")).json()

    async def is_usable(self) -> bool:
        """Returns whether there is an engine of each role."""
        return (await self.client.get(f"{self.url}/health")).status_code == 200


@asynccontextmanager
async def _site(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *flags: str,
    begin: Callable[[FakeAPIServer], None] = lambda api: None,
) -> AsyncGenerator[Site]:
    async with (
        FakeAPIServer().running() as api,
        await StubEngines.start(prefill=[0, 0], decode=[0, 0]) as stub,
        httpx.AsyncClient(verify=NO_CERTIFICATES, timeout=20.0) as client,
    ):
        monkeypatch.setenv("KUBECONFIG", str(api.write_kubeconfig(tmp_path / "kubeconfig")))
        for number, engine in enumerate(stub.engines):
            put_pod(api, f"{engine.role}-{number}", engine.role, engine.port)
        begin(api)
        (port,) = free_ports(1)
        command = [_KVPARAMS, "proxy", "--host", "127.0.0.1", "--port", str(port), *(flags or _FLAGS)]
        with Processes(tmp_path) as processes:
            ready = [f"http://127.0.0.1:{port}/health"]
            await asyncio.to_thread(processes.start, "proxy", command, ready=ready, ready_s=30.0)
            yield Site(api, stub, f"http://127.0.0.1:{port}", client)


async def test_the_command_line_of_production_stack_works_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _site(tmp_path, monkeypatch) as site:
        assert [await site.complete() for _ in range(8)] == [200] * 8
        assert sorted(engine.counters.requests for engine in site.stub.engines) == [4, 4, 4, 4]
        # A decode pod is deleted: nothing goes there any more.
        site.api.pods.delete("decode-3")
        await until(lambda: _has(site, "decode", 1))
        before = site.stub.engines[3].counters.requests
        assert [await site.complete() for _ in range(4)] == [200] * 4
        assert site.stub.engines[3].counters.requests == before


async def _has(site: Site, role: str, engines: int) -> bool:
    found: dict[str, int] = (await site.health())["roles"][role]
    return found["ready"] == engines


async def test_an_api_that_is_away_or_refuses_costs_no_request_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _site(tmp_path, monkeypatch) as site:
        site.api.status = 403
        site.api.cut_connections()
        await until(lambda: _says(site, "403"), within_s=20.0)
        assert [await site.complete() for _ in range(4)] == [200] * 4
        await site.api.stop()
        site.api.status = None
        await until(lambda: _says(site, "cannot be reached"), within_s=20.0)
        assert [await site.complete() for _ in range(4)] == [200] * 4
        await site.api.start()
        await until(lambda: _says(site, None), within_s=20.0)


async def _says(site: Site, what: str | None) -> bool:
    document = await site.health()
    if what is None:
        return document["status"] == "ok" and "sources" not in document
    return document["status"] == "degraded" and what in json.dumps(document["sources"])


async def test_pods_and_slices_are_found_with_our_own_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    selector = "kubernetes://default?selector=environment%3Drouter"
    flags = ("--discover", selector, "--prefill-labels", "model=llama-prefill", "--decode-labels", "model=llama-decode")
    async with _site(tmp_path, monkeypatch, *flags) as site:
        assert await site.complete() == 200


def _put_pool(api: FakeAPIServer, **labels: str) -> None:
    spec = {"selector": {"matchLabels": labels}, "targetPorts": [{"number": 8000}]}
    api.pools.put("llama", {}, spec=spec)


def _of_pod(site: Site, number: int) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True"}]
    return {
        "metadata": {"annotations": {"kvparams.io/port": str(site.stub.engines[number].port)}},
        "status": {"podIP": "127.0.0.1", "phase": "Running", "conditions": conditions},
    }


async def test_the_pods_of_a_pool_are_found_whatever_becomes_of_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = "kubernetes://default?pool=llama"
    flags = ("--discover", pool, "--prefill-labels", "model=llama-prefill", "--decode-labels", "model=llama-decode")
    async with _site(tmp_path, monkeypatch, *flags, begin=lambda api: _put_pool(api, environment="router")) as site:
        assert await site.complete() == 200
        site.api.pools.put("other", {}, spec={"selector": {"matchLabels": {"environment": "none"}}})
        put_pod(site.api, "prefill-9", "prefill", site.stub.engines[0].port)
        await until(lambda: _has(site, "prefill", 3))
        # The pool selects other pods.
        site.api.pods.put("decode-4", {"environment": "blue", "model": _LABELS["decode"]}, **_of_pod(site, 2))
        site.api.pods.put("prefill-4", {"environment": "blue", "model": _LABELS["prefill"]}, **_of_pod(site, 0))
        _put_pool(site.api, environment="blue")
        await until(lambda: _has(site, "prefill", 1))
        assert await site.complete() == 200
        # Without its pool the fleet stays, and health says why.
        site.api.pools.delete("llama")
        await until(lambda: _says(site, "there is no InferencePool"))
        assert await site.complete() == 200


async def test_objectives_are_followed(api: FakeAPIServer) -> None:
    found = WatchedObjectives("llama", {})
    kubernetes = KubernetesAPI("inferenceobjectives", "")
    refused: list[str] = []
    watcher = ObjectWatcher("test", kubernetes, lambda watched: found.replace(watched.objects.values()), refused.append)
    task = asyncio.create_task(watcher.run())
    try:
        spec = {"poolRef": {"name": "llama"}, "priority": 5}
        api.objectives.put("high", {}, spec=spec)
        await until(lambda: found.priority("high") == 5)
        api.objectives.put("high", {}, spec={**spec, "priority": -1})
        await until(lambda: found.priority("high") == -1)
        api.objectives.delete("high")
        await until(lambda: found.priority("high") is None)
    finally:
        task.cancel()
        await asyncio.wait([task])
    assert not refused


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[FakeAPIServer]:
    """Returns a server with five pods; KUBECONFIG names it, and a file with a token."""
    server = FakeAPIServer()
    async with server.running():
        token = tmp_path / "token"
        token.write_text("first")
        server.token = "first"
        for number in range(5):
            put_pod(server, f"pod-{number}", "prefill", 8000 + number)
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig", token)))
        yield server


def _api(selector: str = "environment=router") -> KubernetesAPI:
    return KubernetesAPI("pods", selector)


async def test_a_list_comes_in_pages(api: FakeAPIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvparams_proxy.discovery.kubernetes_api._PAGE", 2)
    client = _api()
    found = await client.list()
    assert ([each["metadata"]["name"] for each in found.objects], api.lists) == ([f"pod-{n}" for n in range(5)], 3)
    assert found.version == str(api.pods.version)
    other = _api("environment=other")
    assert (await other.list()).objects == []
    await client.close()
    await other.close()


async def test_a_token_that_is_replaced_is_read_again(api: FakeAPIServer, tmp_path: Path) -> None:
    client = _api()
    await client.list()
    api.token = "second"
    with pytest.raises(KubernetesError, match="does not accept the credentials"):
        await client.list()
    (tmp_path / "token").write_text("second")
    assert len((await client.list()).objects) == 5
    await client.close()


async def test_a_watch_goes_on_from_a_version_and_says_when_it_is_too_old(api: FakeAPIServer) -> None:
    client = _api()
    version = (await client.list()).version
    put_pod(api, "pod-9", "decode", 9000)
    api.pods.delete("pod-0")
    events = client.watch(version, 5, 5.0)
    assert [(event.kind, event.object["metadata"]["name"]) for event in [await anext(events), await anext(events)]] == [
        ("ADDED", "pod-9"),
        ("DELETED", "pod-0"),
    ]
    assert (await anext(events)).kind == "BOOKMARK"
    api.pods.others_change()
    api.pods.forget()
    late = client.watch(version, 5, 5.0)
    with pytest.raises(ExpiredVersion):
        await anext(late)
    await events.aclose()
    await client.close()


async def test_an_event_that_is_cut_is_none(api: FakeAPIServer) -> None:
    client = _api()
    version = (await client.list()).version
    for number in range(3):
        put_pod(api, f"new-{number}", "decode", 9000)
    api.cut = 2
    events = [event.kind async for event in client.watch(version, 5, 5.0)]
    assert events == ["ADDED", "ADDED"]
    await client.close()


async def test_a_watch_that_says_nothing_is_lost(api: FakeAPIServer) -> None:
    client = _api()
    version = (await client.list()).version
    api.is_silent = True
    with pytest.raises(KubernetesError, match="the watch was lost"):
        await anext(client.watch(version, 60, 0.3))
    await client.close()


def test_no_credentials_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert "KUBERNETES_SERVICE_HOST" not in os.environ
    with pytest.raises(ConfigError, match="neither a service account nor a kubeconfig"):
        _api()
