"""Runs cases against a proxy in a process of its own, some side by side, and reports each difference."""

import asyncio
import os
import re
import sys
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import httpx

from demo.client import NO_CERTIFICATES
from demo.processes import Processes, Server, free_port
from tests.support.proxy.metrics import metric_becomes
from tests.support.waiting import until
from tests.system.adversary.cases import Case, Expect, Stage
from tests.system.adversary.clients import Answer, Client
from tests.system.adversary.engines import Engine, Script, Seen

__all__ = ["FLAGS", "SERVED", "Arena", "Result", "Usage"]

LANES: Final = 24
"""Cases at a time."""
FLAGS: Final = (
    *("--prefill-timeout", "1.5", "--decode-timeout", "1.5", "--client-timeout", "3"),
    *("--retries", "1", "--probe", "1", "--log-requests", "off", "--connector", "nixl", "--startup-check", "off"),
)
"""Of the proxy: time-outs that cases hit, and one more attempt."""
SERVED: Final = (sys.executable, str(Path(__file__).with_name("served.py")))
LATE_S: Final = 1.0
"""What a busy machine may add to a case's time."""


class Usage(NamedTuple):
    """What the proxy's process holds."""

    rss_kib: int
    descriptors: int


@dataclass(slots=True)
class Result:
    """What became of a case."""

    case: Case
    took_s: float
    clients: list[Client]
    problems: list[str] = field(default_factory=list[str])

    @property
    def answers(self) -> list[Answer]:
        """Those of all its connections."""
        return [answer for client in self.clients for answer in client.answers]

    def __str__(self) -> str:
        got = ", ".join(f"{a.status} {a.code or ''}{'' if a.complete else ' (cut)'}" for a in self.answers) or "nothing"
        return f"{self.case.name}: {'; '.join(self.problems) or 'well'} (got {got} in {self.took_s:.1f} s)"


class Arena:
    """Two engines of each role and a proxy before them. Make it with `running`."""

    def __init__(self, server: Server, engines: Sequence[Engine], scripts: dict[tuple[int, str], Script]) -> None:
        self.server = server
        self.port: Final = int(server.url.rsplit(":", 1)[1])
        self.engines = engines
        self._scripts = scripts
        self._cases = 0

    @classmethod
    @asynccontextmanager
    async def running(
        cls, logs: Path, command: Sequence[str] = SERVED, flags: Sequence[str] = (), ready: int = 4
    ) -> "AsyncGenerator[Arena]":
        """Starts the engines in this loop and the proxy as a process.

        Args:
            logs: a directory for what the proxy writes.
            command: what starts it: it takes the flags of `kvparams proxy`.
            flags: beside `FLAGS`, and after them.
            ready: how many engines it uses.
        """
        scripts: dict[tuple[int, str], Script] = {}
        engines = [Engine(role, lambda case, role: scripts.get((case, role))) for role in ("prefill", "decode") * 2]
        for engine in engines:
            await engine.start()
        port = free_port()
        named = [f"--{engine.role}={engine.url}" for engine in engines]
        with Processes(logs) as processes:
            server = processes.start("proxy", *command, *named, *FLAGS, *flags, "--port", str(port), port=port)
            try:
                await asyncio.to_thread(processes.wait_ready, server)
                arena = cls(server, engines, scripts)
                await arena.until_ready(ready)
                yield arena
            finally:
                await asyncio.to_thread(processes.stop, server)
                for engine in engines:
                    await engine.stop()

    # what the proxy says of itself

    async def until_ready(self, engines: int) -> None:
        """Waits until so many engines may be chosen."""
        await metric_becomes(self, "kvparams_proxy_ready", lambda value: value >= engines, 30.0)

    async def metric(self, name: str) -> float:
        """Returns the sum of the series whose line in /metrics begins so."""
        async with httpx.AsyncClient(timeout=20, trust_env=False, verify=NO_CERTIFICATES) as client:
            text = (await client.get(f"{self.server.url}/metrics")).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    async def settled(self, within_s: float = 15.0) -> dict[str, float]:
        """Waits until nothing is under way; what is not zero then, by name."""
        names = (
            "in_flight",
            "requests_pending",
            "requests_prefilling",
            "requests_decoding",
            "leases",
            "releases_running",
        )
        left: dict[str, float] = dict.fromkeys(names, 1.0)

        async def is_idle() -> bool:
            nonlocal left
            values = {name: await self.metric(f"kvparams_proxy_{name}") for name in names}
            left = {name: value for name, value in values.items() if value}
            return not left

        with suppress(TimeoutError):
            await until(is_idle, within_s, pause_s=0.1)
        return left

    def usage(self) -> Usage:
        """What the proxy's process holds now."""
        pid = self.server.process.pid
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return Usage(pages * os.sysconf("SC_PAGE_SIZE") >> 10, len(os.listdir(f"/proc/{pid}/fd")))

    # cases

    async def run(self, cases: Iterable[Case], lanes: int = LANES) -> list[Result]:
        """Runs them, so many at a time, and last those that run alone; what became of each."""
        waiting = asyncio.Semaphore(lanes)

        async def one(case: Case) -> Result:
            async with waiting:
                return await self._run(case)

        given = list(cases)
        results = list(await asyncio.gather(*(one(case) for case in given if not case.alone)))
        for case in given:
            if case.alone:
                results.append(await self._run(case))
                await until(lambda: not self._works(self._cases), case.within_s)  # its scripts go on for a while
        return results

    async def _run(self, case: Case) -> Result:
        self._cases += 1
        number = self._cases
        for role, script in (("prefill", case.prefill), ("decode", case.decode)):
            if script is not None:
                self._scripts[number, role] = script
        stage = Stage(
            self.port, number, case.within_s, lambda role: [seen for seen in self._seen(number) if seen.role == role]
        )
        began = time.monotonic()
        problems: list[str] = []
        try:
            async with asyncio.timeout(case.within_s + LATE_S):
                await case.act(stage)
        except TimeoutError:
            problems.append(f"it took longer than {case.within_s:g} s")
        except OSError as error:
            problems.append(f"its client failed: {error!r}")
        result = Result(case, time.monotonic() - began, stage.clients, problems)
        if result.took_s > case.within_s and not problems:
            problems.append(f"it took longer than {case.within_s:g} s")
        problems += _wrong(case.expect, result)
        problems += await self._reached(case, number)
        for client in stage.clients:
            client.close()
        return result

    async def _reached(self, case: Case, number: int) -> list[str]:
        """What is wrong with what engines saw."""
        if case.aborts_within_s is not None:
            try:
                await until(lambda: not self._works(number), case.aborts_within_s + LATE_S)
            except TimeoutError:
                return ["an engine goes on for nobody"]
        roles = {seen.role for seen in self._seen(number)}
        if case.reaches == "nobody" and roles:
            return [f"it reached {sorted(roles)}"]
        if case.reaches in ("prefill", "decode") and case.reaches not in roles:
            return [f"it did not reach {case.reaches}"]
        return []

    def _works(self, number: int) -> bool:
        return any(number in engine.running for engine in self.engines)

    def _seen(self, number: int) -> list[Seen]:
        return [seen for engine in self.engines for seen in engine.seen if seen.case == number and not seen.release]

    def unknown(self) -> int:
        """How many requests engines saw that name no case: nobody has sent them."""
        return sum(seen.case is None and not seen.release for engine in self.engines for seen in engine.seen)


def _wrong(expect: Expect, result: Result) -> list[str]:
    answers = result.answers
    found: list[str] = [f"no HTTP: {client.broken}" for client in result.clients if client.broken]
    if expect.answers is not None and len(answers) != expect.answers:
        found.append(f"{len(answers)} answers, not {expect.answers}")
    if expect.statuses and not {answer.status for answer in answers} <= expect.statuses:
        found.append(f"not one of {sorted(expect.statuses)}")
    if expect.closed is not None and any(client.closed is not expect.closed for client in result.clients):
        found.append("the connection is open" if expect.closed else "the connection is closed")
    for text in expect.without:
        if any(text in answer.body for answer in answers):
            found.append(f"{text!r} is in it")
    if not answers:
        return found
    last = answers[-1]
    if expect.code is not None and re.fullmatch(expect.code, last.code or "") is None:
        found.append(f"the code is {last.code}, not {expect.code}")
    if expect.body is not None and last.body != expect.body:
        found.append(f"the body is {last.body[:200]!r}")
    ends = None if not last.is_stream else "done" if last.done else "error" if last.code else "cut"
    if expect.ends is not None and ends != expect.ends:
        found.append(f"the stream ends with {ends}, not {expect.ends}")
    return found
