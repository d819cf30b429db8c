"""Tests that nothing secret gets into the log of a process: canaries are planted, and engines fail in many ways."""

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.proxy.acting import Actor
from tests.support.waiting import until

PROMPT, KEY, TOKEN, REQUEST = "canary-prompt", "canary-engine-key", "canary-admin-token", "request-17"
IDS = [90_017, 90_023, 90_041, 90_053]


@pytest.mark.parametrize("form", ["json", "text"])
async def test_no_line_has_a_prompt_a_key_a_token_id_or_an_address(tmp_path: Path, form: str) -> None:
    engines = [Actor("prefill"), Actor("decode")]
    for actor in engines:
        await actor.begin()
    for name, text in (("key", KEY), ("token", TOKEN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    urls = [engine.url for engine in engines]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvparams", "proxy", "--port", "0", "--connector", "store", "--log-level", "debug"),
        *("--prefill", urls[0], "--decode", urls[1], "--decode", "gone=http://127.0.0.1:1", "--probe", "0.2"),
        *("--engine-key-file", str(tmp_path / "key"), "--admin-token-file", str(tmp_path / "token")),
        *("--log-format", form, "--log-requests", str(tmp_path / "requests")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    reading = asyncio.create_task(process.stderr.read())
    try:
        async with asyncio.timeout(60):
            found = re.search(r"http://127\.0\.0\.1:\d+", (await process.stdout.readline()).decode())
            assert found is not None
            async with httpx.AsyncClient(base_url=found[0], timeout=20, trust_env=False) as client:

                async def is_ready() -> bool:
                    return (await client.get("/health")).status_code == 200

                await until(is_ready, 30.0)
                for fault in (None, "500", "garbage", "not http", "reset"):
                    if fault is not None:
                        engines[0].fails(fault)
                    for prompt in (PROMPT, IDS):
                        body = {"model": "stub", "prompt": prompt, "max_tokens": 4}
                        await client.post("/v1/completions", json=body, headers={"x-request-id": REQUEST})
                await client.get("/admin/instances", headers={"authorization": f"Bearer {TOKEN}"})
                await client.get("/admin/instances", headers={"authorization": f"Bearer {KEY}-not"})
                await client.post("/admin/instances/gone/drain", headers={"authorization": f"Bearer {TOKEN}"})
            process.terminate()
            log = (await reading).decode()
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        for actor in engines:
            actor.end()
    for canary in (PROMPT, KEY, TOKEN, *map(str, IDS), "oops", *(url.removeprefix("http://") for url in urls)):
        assert canary not in log, canary
    assert "127.0.0.1" not in log
    assert f"request {REQUEST} (" in log, "the control: a client's own name for its request may be there"
    lines = [json.loads(line) for line in log.splitlines()] if form == "json" else []
    events = {line.get("event") for line in lines}
    if form == "json":
        assert {"engine_joined", "engine_state"} <= events
        assert {"probe", "operator", "breaker"} <= {line.get("evidence") for line in lines}
        assert {line["process"] for line in lines if "process" in line} == set()
    else:
        assert "is not ready (probe)" in log
