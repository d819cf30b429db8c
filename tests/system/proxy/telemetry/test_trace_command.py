"""Tests `kvparams trace`: where the time of one request went."""

import asyncio
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvparams.cli import main
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.secret import Secret
from kvparams_proxy.telemetry.recent_requests import RecentRequests
from kvparams_proxy.telemetry.request_record import RefusedRequest
from tests.support.proxy.served import serving
from tests.support.proxy.stage import BODY, StartStage
from tests.support.stub_engine import StubEngines

TOKEN = "token-of-the-admin"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


async def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = await asyncio.to_thread(main, ["trace", *argv])
    said = capsys.readouterr()
    return status, said.out, said.err


async def test_each_state_is_a_bar_and_every_leg_names_its_engine(
    stage: StartStage, token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = await stage(admin_token=Secret(TOKEN))
    client = found.running.client
    answer = await client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    assert answer.status_code == 200
    url = f"http://127.0.0.1:{found.running.port}"
    status, out, err = await run(capsys, "mine", url, "--admin-token-file", str(token))
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "mine  /v1/completions  ok (200)"
    assert "model: stub" in lines[1]
    rows = {line[:13].strip(): line for line in lines[4:]}
    assert list(rows) == ["reading", "prefill", "handoff", "first token", "decode"]
    assert re.search(r"^prefill +prefill-\d +[\d.]+ ms +[\d.]+ ms  +█", rows["prefill"])
    assert re.search(r"^first token +decode-\d +[\d.]+ ms +[\d.]+ ms  +█", rows["first token"])
    assert "Who is there" not in out
    shown = await client.get("/admin/requests/mine", headers={"authorization": f"Bearer {TOKEN}"})
    status, out, _ = await run(capsys, "mine", url, "--admin-token-file", str(token), "--json")
    document = json.loads(out)
    assert (status, document) == (0, shown.json())
    states = document["states"]
    assert [one["state"] for one in states][-1] == "done"
    for one, after in pairwise(states):
        assert one["start_ms"] + one["duration_ms"] == pytest.approx(after["start_ms"], abs=0.002)
    assert sum(one["duration_ms"] for one in states) == pytest.approx(document["total_ms"], abs=0.01)
    status, out, _ = await run(capsys, document["transfer_ids"][0], url, "--admin-token-file", str(token))
    assert (status, out.splitlines()[0]) == (0, lines[0])


async def test_who_is_not_known_or_may_not_ask_is_told_so(
    stage: StartStage, token: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = await stage(admin_token=Secret(TOKEN))
    url = f"http://127.0.0.1:{found.running.port}"
    status, out, err = await run(capsys, "a b", url, "--admin-token-file", str(token))
    assert (status, out) == (1, "")
    assert "no request with this id is among the last 512" in err
    wrong = tmp_path / "wrong"
    wrong.write_text("another")
    wrong.chmod(0o600)
    status, _, err = await run(capsys, "x", url, "--admin-token-file", str(wrong))
    assert status == 1
    assert "401" in err
    status, _, err = await run(capsys, "x", "127.0.0.1", "--admin-token-file", str(token))
    assert (status, err) == (2, "kvparams trace: URL must be http://host:port or https://host:port\n")


@pytest.mark.slow
async def test_the_worker_that_knows_a_request_is_found(stub: StubEngines, token: Path) -> None:
    flags = ("--workers", "2", "--log-requests", "off", "--startup-check", "off", "--admin-token-file", str(token))
    async with serving(stub, *flags) as served:
        for number in range(4):
            headers = {"x-request-id": f"r-{number}", "connection": "close"}
            answer = await served.client.post("/v1/completions", json={**BODY, "prompt": "x"}, headers=headers)
            assert answer.status_code == 200
        for id, status in (*((f"r-{number}", 0) for number in range(4)), ("nobody", 1)):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvparams", "trace", id, f"http://127.0.0.1:{served.port}"),
                *("--admin-token-file", str(token)),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, _ = await process.communicate()
            assert process.returncode == status
            assert out.decode().startswith(f"{id}  /v1/completions  ok (200)") is (status == 0)


class Life:
    """The part of a life cycle that is kept."""

    def __init__(self, outcome: str, spent_s: float) -> None:
        self.spans = (("created", "", 0.0), ("done", "", spent_s))
        self.outcome = outcome


class Account:
    """The part of a `RequestRecord` that is kept."""

    trace_context, further_transfers, endpoint, route, decision = None, None, "/v1/completions", (), None
    stream, status, code, prompt_tokens, cached_tokens, completion_tokens = False, 200, None, 1, None, 2
    retries, answer_bytes, ended_s = 0, 10, 5.0

    def __init__(self, id: str, outcome: str = "ok", spent_s: float = 1.0) -> None:
        self.lifecycle = Life(outcome, spent_s)
        facts = {"request_id": id, "transfer_id": f"t-{id}", "tenant": "", "model": None, "token_ids": None}
        self.facts = type("Facts", (), facts)


def test_the_last_requests_are_found_and_for_longer_those_that_failed_or_were_slow() -> None:
    requests = RecentRequests()
    ended: list[Any] = [Account("bad", "failed"), Account("slow", spent_s=9.0)]
    ended += [Account(f"r{number}", spent_s=0.5 + number / 1000) for number in range(1000)]
    for account in ended:
        requests.ended(account)
    requests.refused(RefusedRequest("turned away", "", ProxyError(400, "invalid_request_error", "no")))
    found = [requests.find(id) for id in ("r999", "t-r999", "bad", "slow", "r0", "turned away", "0" * 32)]
    assert [each and each.request_id for each in found] == ["r999", "r999", "bad", "slow", None, None, None]
