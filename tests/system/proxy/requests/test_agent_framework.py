"""Tests that an agent of Pydantic AI, a framework from PyPI, runs unchanged: it is told our URL and a key, and no more.

The framework speaks with the Python packages of OpenAI (chats, responses) and Anthropic (messages). Each conversation
has a call of a tool in it. The engines are scripted; the proxy is real and splits every request.
"""

import asyncio
import json
import os
import sys
from typing import Any

import pytest

from tests.support.proxy.fixtures import StartProxy
from tests.support.proxy.tool_calling import ANSWER, CITY, ToolCallingEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODELS = {"chat": "openai-chat:stub", "responses": "openai-responses:stub", "messages": "anthropic:stub"}
"""What the framework calls a model that is asked through this API."""


async def run_agents(url: str, *models: str) -> tuple[int, list[dict[str, Any]], str]:
    """Returns the exit status of the program with these agents, what it has written, and its errors."""
    places = {"OPENAI_BASE_URL": f"{url}/v1", "ANTHROPIC_BASE_URL": url, "PYTHONPATH": os.pathsep.join(sys.path)}
    keys = {"OPENAI_API_KEY": "key", "ANTHROPIC_API_KEY": "key", "NO_PROXY": "*"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.proxy.weather_agent", *models),
        env={**os.environ, **places, **keys},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(250):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, [json.loads(line) for line in out.splitlines()], err.decode()


async def test_conversations_with_a_tool_run_over_both_legs(scripted: Any, proxy: StartProxy) -> None:
    engines = {role: ToolCallingEngine(role) for role in ("prefill", "decode")}
    urls = {role: [(await scripted(engine)).url] for role, engine in engines.items()}
    running = await proxy(urls["prefill"], urls["decode"])
    status, written, err = await run_agents(f"http://127.0.0.1:{running.port}", *MODELS.values())
    assert status == 0, err
    counts = {"requests": 2, "input": 2 * 40, "cached": 2 * 16}  # the cached tokens are those that prefill found
    twice = [{"output": ANSWER, "asked": [CITY] * times, **counts} for times in (1, 2)]
    assert written == twice * len(MODELS)
    assert engines["prefill"].legs == [api for api in MODELS for _ in range(4)]
    assert engines["decode"].legs == [leg for api in MODELS for leg in (api, api, f"{api} stream", f"{api} stream")]
    assert await running.metric("kvparams_proxy_in_flight") == 0


async def test_an_engine_that_gets_no_kv_of_a_prefill_does_not_answer(scripted: Any) -> None:
    """The control: asked without our proxy, the decode engine refuses."""
    engine = ToolCallingEngine("decode")
    status, written, err = await run_agents((await scripted(engine)).url, MODELS["messages"])
    assert (status, written) == (1, [])
    assert "status_code: 500" in err
    assert engine.legs
