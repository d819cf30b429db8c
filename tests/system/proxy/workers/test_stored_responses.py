"""Tests that every worker finds a stored response that another one's request has made, and a stranger does not."""

import json
from types import SimpleNamespace
from typing import Any, cast

import httpx

from tests.support.proxy.served import Served, serving
from tests.system.proxy.requests.test_agent_apis import RESPONSES, engine

_TIMES = 24
"""Each over a connection of its own. One of two workers gets none of them once in 8 million runs."""


async def statuses(served: Served, response_id: str) -> set[int]:
    found: set[int] = set()
    for _ in range(_TIMES):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}", trust_env=False) as client:
            found.add((await client.get(f"/v1/responses/{response_id}")).status_code)
    return found


async def test_all_workers_find_a_response_and_another_proxy_does_not(scripted: Any) -> None:
    prefill, decode = await scripted(engine), await scripted(engine)
    site = [SimpleNamespace(role=role, url=each.url) for role, each in (("prefill", prefill), ("decode", decode))]
    engines = cast("Any", SimpleNamespace(engines=site))
    async with serving(engines, "--workers", "2") as served, serving(engines) as stranger:
        made = (await served.client.post("/v1/responses", json=RESPONSES)).json()["id"]
        kept: dict[str, Any] = {"id": made, "object": "response", "status": "completed", "output": []}
        decode.models = json.dumps(kept).encode()
        assert await statuses(served, made) == {200}
        assert await statuses(stranger, made) == {404}
