"""Tests streams of real engines that break and continue on another engine, with answers equal to one engine's.

Requests of all kinds are sent, and streams break in the middle of a byte sequence. A request that cannot be continued
ends with an error that says so.
"""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import httpx
import pytest

from demo.client import new_client
from demo.processes import Processes, free_port
from tests.system.chaos.cutting import cutting
from tests.system.differential.comparing import Seen, difference, taken_in
from tests.system.differential.generator import CHAT, COMPLETIONS, JSON, Case, lanes

CACHE = ("--page-tokens", "16", "--blocks", "8192")
"""As in the differential test: a page has as many tokens as a block, so that both find equally much cached."""
LIKELY = 0.25
"""So many streams break; of those that go on, so many break again. Few enough that the breakers of all three decode
engines are never open at once: then nobody is there to go on."""
STATEFUL = (
    "logprobs",
    "top_logprobs",
    "echo",
    "stop",
    "tools",
    "response_format",
    "structured_outputs",
    "presence_penalty",
    "frequency_penalty",
)
"""Members that say more than text, or whose effect depends on more than the token ids before it."""
LIMIT: JSON = {"max_tokens": 30}
"""Where a request names no limit, an engine has its own, which nobody else knows."""
BYTES = 5_000
"""Up to here; longer than most answers are."""


@asynccontextmanager
async def servers(logs: Path, store: Path, after: Callable[[], int | None]) -> AsyncGenerator[tuple[str, str]]:
    """The URLs of one engine alone, and of a proxy before engines whose streams are cut."""
    url = f"file://{store}?size=256MiB"
    with Processes(logs) as processes:
        single = processes.engine("single", "both", None, *CACHE)
        prefill = processes.engine("p0", "prefill", url, *CACHE)
        decode = [processes.engine(f"d{number}", "decode", url, *CACHE) for number in range(3)]
        await asyncio.to_thread(processes.wait_ready, single, prefill, *decode)
        ports = [int(server.url.rpartition(":")[2]) for server in decode]
        async with AsyncExitStack() as relays:
            fronts = [await relays.enter_async_context(cutting(port, after)) for port in ports]
            port = free_port()
            command = [sys.executable, "-m", "kvparams", "proxy", "--connector", "store", "--port", str(port)]
            command += ["--continuation", "--retries", "20", "--prefill", prefill.url]
            for front in fronts:
                command += ["--decode", f"http://127.0.0.1:{front}"]
            proxy = processes.start("proxy", *command, port=port)
            await asyncio.to_thread(processes.wait_ready, proxy)
            yield single.url, proxy.url
            await asyncio.to_thread(processes.stop, proxy)


async def both(client: httpx.AsyncClient, single: str, proxy: str, case: Case) -> tuple[Case, Seen, Seen, str]:
    answers = [await client.post(url + case.path, json=case.body) for url in (single, proxy)]
    one, other = [taken_in(got.status_code, got.headers["content-type"], got.text) for got in answers]
    return case, one, other, answers[1].text


def broken_off(text: str) -> bool:
    """Whether the stream says that it has failed."""
    events = [event for event in text.split("\n\n") if event]
    return '"error"' in events[-1] and "data: [DONE]" not in events


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1800)
async def test_nobody_can_tell_a_stream_that_was_continued(
    tmp_path: Path, store: Path, effort: Callable[[int, int], int], record: Callable[[dict[str, object]], None]
) -> None:
    draw, cuts = random.Random(2), 0

    def after() -> int | None:
        nonlocal cuts
        if draw.random() >= LIKELY:
            return None
        cuts += 1
        return draw.randrange(150, BYTES)

    asked = [
        [streamed(case, plain=at % 3 > 0) for at, case in enumerate(lane) if case.expected == "answer"]
        for lane in lanes(3, effort(240, 4_000), (COMPLETIONS, CHAT))
    ]
    async with servers(tmp_path, store, after) as (single, proxy), new_client() as client:

        async def run(lane: list[Case]) -> list[tuple[Case, Seen, Seen, str]]:
            return [await both(client, single, proxy, case) for case in lane]

        found = [each for lane in await asyncio.gather(*map(run, asked)) for each in lane]
        counted = (await client.get(f"{proxy}/metrics")).text
    name = "kvparams_proxy_continuations_total "
    continued = next(float(line.split()[1]) for line in counted.splitlines() if line.startswith(name))
    failed = [(case, text) for case, _, _, text in found if broken_off(text)]
    wrong = [
        f"{case.path} {case.body}\n{words}"
        for case, one, other, text in found
        if not broken_off(text) and (words := difference(case, one, other)) is not None
    ]
    innocent = [(case.body, text) for case, text in failed if could_go_on(case, text)]
    kinds = Counter("broken off" if broken_off(text) else "whole" for *_, text in found)
    record({"streams": len(found), "cut": cuts, "continued": continued, "different": len(wrong), **kinds})
    assert not wrong, f"{len(wrong)} of {len(found)} differ, the first:\n{wrong[0]}"
    assert not innocent, f"{len(innocent)} broke off, the first:\n{innocent[0][0]}\n{innocent[0][1]}"
    assert continued > len(found) / 50  # the control: streams did break and go on ...
    assert failed  # ... and those that cannot, did not


def streamed(case: Case, *, plain: bool) -> Case:
    """The case as a stream; `plain`: without what cannot be continued."""
    body = LIMIT | case.body | {"stream": True}
    names = (*STATEFUL, "tool_choice", "n") if plain else ()
    return replace(case, body={name: value for name, value in body.items() if name not in names})


def could_go_on(case: Case, text: str) -> bool:
    """Whether each event of this answer follows from the token ids before it, and there is only one answer. A chat of
    which nothing has been said yet cannot be told from one that reasons."""
    body = case.body
    prompts = body.get("prompt")
    several = isinstance(prompts, list) and not isinstance(cast("list[object]", prompts)[0], int)
    if several and len(cast("list[object]", prompts)) > 1:
        return False
    if case.path == CHAT and text.count("\n\n") == 2:  # the role, the error
        return False
    if type(body.get("logprobs")) is int:  # 0 too
        return False
    return body.get("n", 1) == 1 and not any(body.get(name) for name in STATEFUL)
