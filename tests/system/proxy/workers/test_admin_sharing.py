"""Tests that changes through the admin API of one worker are passed on to the others, or refused."""

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from kvparams_proxy.config.settings import Settings
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.secret import Secret
from kvparams_proxy.server.app import create_app
from kvparams_proxy.worker_identity import WorkerIdentity
from kvparams_proxy.workers.admin_writes import AdminWrite
from kvparams_proxy.workers.worker_link import WorkerLink

NEW: dict[str, Any] = {"id": "d0", "url": "http://127.0.0.1:1", "role": "decode"}


class Others:
    """The other workers."""

    def __init__(self) -> None:
        self.heard: list[AdminWrite] = []
        self.error: ProxyError | None = None

    async def written(self, write: AdminWrite) -> None:
        self.heard.append(write)
        if self.error is not None:
            raise self.error


@pytest.fixture
def link(tmp_path: Path) -> WorkerLink:
    ours, theirs = socket.socketpair()
    with ours:
        return WorkerLink(theirs, WorkerIdentity(1, 2, 1, tmp_path))


@pytest.fixture
async def admin(link: WorkerLink) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(Settings((), admin_token=Secret("token"), log_requests="off"), worker=link)
    async with app.router.lifespan_context(app) as state:

        async def served(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "state": dict(state or {})}, receive, send)

        headers = {"authorization": "Bearer token"}
        transport = httpx.ASGITransport(served)
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy", headers=headers) as client:
            yield client
    await link.close()


async def test_others_hear_of_changes_and_of_nothing_else(link: WorkerLink, admin: httpx.AsyncClient) -> None:
    others = link.admin_writes = Others()
    assert (await admin.get("/admin/instances")).status_code == 200
    assert (await admin.post("/admin/explain-route", json={})).status_code == 400
    assert (await admin.post("/admin/instances", json={"id": "d0"})).status_code == 400
    assert others.heard == []
    request = admin.build_request("POST", "/admin/instances?x=1", json=NEW)
    assert (await admin.send(request)).status_code == 201
    assert (await admin.post("/admin/instances/d0/drain")).status_code == 200
    assert (await admin.delete("/admin/instances/d0")).status_code == 200
    assert others.heard == [
        AdminWrite("POST", "/admin/instances?x=1", request.content),
        AdminWrite("POST", "/admin/instances/d0/drain", b""),
        AdminWrite("DELETE", "/admin/instances/d0", b""),
    ]


async def test_what_others_cannot_take_is_answered(link: WorkerLink, admin: httpx.AsyncClient) -> None:
    others = link.admin_writes = Others()
    others.error = ProxyError(503, "service_unavailable", "a worker does not answer", code="worker_missing")
    got = await admin.post("/admin/instances", json=NEW)
    assert (got.status_code, got.json()["error"]["code"]) == (503, "worker_missing")


async def test_without_others_to_hear_of_them_changes_are_refused(admin: httpx.AsyncClient) -> None:
    got = await admin.post("/admin/instances", json=NEW)
    assert (got.status_code, got.json()["error"]["code"]) == (409, "several_workers")
    assert (await admin.get("/admin/instances")).json()["data"] == []
