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
from kvparams_proxy.secret import Secret
from kvparams_proxy.telemetry.request_history import RequestHistory
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
    assert "no request with this id is among the last 1024" in err
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


def test_only_the_last_requests_are_kept() -> None:
    class Life:
        spans = (("created", "", 0.0), ("done", "", 1.0))
        outcome = "ok"

    class Account:
        lifecycle, trace_context, further_transfers, endpoint = Life(), None, None, "/v1/completions"
        stream, status, code, prompt_tokens, cached_tokens, completion_tokens = False, 200, None, 1, None, 2
        retries, answer_bytes, ended_s = 0, 10, 5.0

        def __init__(self, id: str) -> None:
            self.facts = type("Facts", (), {"request_id": id, "transfer_id": f"t-{id}", "tenant": "", "model": None})

    history = RequestHistory(3)
    accounts: list[Any] = [Account(f"r{number}") for number in range(5)]
    for account in (*accounts, accounts[2]):
        history.ended(account)
    assert [history.find(f"r{number}") is not None for number in range(5)] == [False, False, True, True, True]
    found = history.find("t-r4")
    assert found is not None
    assert found.request_id == "r4"
    assert history.find("0" * 32) is None
