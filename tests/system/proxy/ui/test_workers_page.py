"""Tests that the live page of a proxy with several workers shows the requests of all of them."""

import os
import signal
from pathlib import Path
from typing import Any

import httpx

from tests.support.proxy.served import Served, serving
from tests.support.stub_engine import StubEngines
from tests.support.waiting import until

TOKEN = "viewer-token"
HEADERS = {"authorization": f"Bearer {TOKEN}"}
BODY = {"model": "stub", "prompt": "x", "max_tokens": 2}
OK = 'kvparams_proxy_requests_total{outcome="ok"}'


def workers_of(served: Served) -> list[int]:
    pid = served.process.pid
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def ask(served: Served, number: int) -> None:
    for _ in range(number):  # a connection each, so that all workers get some
        async with httpx.AsyncClient(trust_env=False) as client:
            got = await client.post(f"http://127.0.0.1:{served.port}/v1/completions", json=BODY)
            assert got.status_code == 200


async def state(served: Served) -> dict[str, Any]:
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        return (await client.get(f"http://127.0.0.1:{served.port}/ui/state", headers=HEADERS)).json()


async def test_requests_of_all_workers_are_shown_and_those_of_a_killed_one_count(
    stub: StubEngines, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    flags = ("--workers", "2", "--viewer-token-file", str(token), "--log-requests", "off")
    async with serving(stub, *flags) as served:
        await ask(served, 24)

        async def counts_are(wanted: int) -> bool:
            snapshot = await state(served)
            return snapshot["workers"] == 2 and snapshot["counters"][OK] == wanted

        await until(lambda: counts_are(24), 10.0)
        snapshot = await state(served)
        assert snapshot["sampled"] == 24
        assert len({row["id"] for row in snapshot["requests"]["recent"]}) == 16
        legs = snapshot["columns"].index("legs")
        assert sum(row[legs] for row in snapshot["engines"]) == 48
        assert await served.metric(OK) == 24  # from now on the supervisor has the counts of both
        assert snapshot["exchange"]["alive"] == 1
        os.kill(workers_of(served)[0], signal.SIGKILL)

        async def is_complete() -> bool:
            try:
                snapshot = await state(served)
            except httpx.TransportError:  # it was to answer
                return False
            found = snapshot["counters"][OK]
            return snapshot["workers"] == 2 and found == 24 and sum(row[legs] for row in snapshot["engines"]) == 48

        await until(is_complete, 15.0)
        assert await served.metric(OK) == 24
