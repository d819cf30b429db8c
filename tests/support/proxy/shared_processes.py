"""Starts proxies as processes that share a fleet of stub engines, and sends requests to them."""

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from kvparams.signing.keyring import SigningKey, SigningKeyring
from kvparams.signing.keyring_file import create_keyring
from tests.support import stub_engine
from tests.support.processes import Processes, free_ports

__all__ = ["SharedProcesses"]

_KVPARAMS: Final = str(Path(sys.executable).with_name("kvparams"))


class SharedProcesses:
    """Stub engines, and proxies that meet on one server."""

    def __init__(self, processes: Processes, folder: Path, share: str, proxies: int, *options: str) -> None:
        """Starts everything.

        Args:
            processes: who ends it.
            folder: for keys and logs.
            share: the URL where the proxies meet.
            proxies: how many there are.
            options: further ones of each proxy.
        """
        self.processes = processes
        self.folder = folder
        self._share = share
        self._options = options
        self.keys = folder / "keys.json"
        if not self.keys.exists():
            create_keyring(self.keys, SigningKeyring([SigningKey.new(int(time.time()) - 60)]))
        ports = free_ports(4)
        self.engines = [f"http://127.0.0.1:{port}" for port in ports]
        stubs = [
            text
            for role, port in zip(("--prefill", "--prefill", "--decode", "--decode"), ports, strict=True)
            for text in (role, str(port))
        ]
        processes.start("stub", [sys.executable, stub_engine.__file__, *stubs], ready=[self.engines[0] + "/health"])
        self.ports: list[int] = []
        self.pids: list[int] = []
        for _ in range(proxies):
            self.start()

    def start(self, *options: str) -> int:
        """Starts another proxy, and returns its place."""
        (port,) = free_ports(1)
        number = len(self.ports)
        roles = ("--prefill", "--prefill", "--decode", "--decode")
        engines = [text for role, url in zip(roles, self.engines, strict=True) for text in (role, url)]
        command = [_KVPARAMS, "proxy", "--port", str(port), *engines, "--connector", "nixl", "--share", self._share]
        command += ["--share-keys", str(self.keys), "--log-requests", "off", *self._options, *options]
        self.pids.append(self.processes.start(f"proxy-{number}", command, ready=[f"http://127.0.0.1:{port}/health"]))
        self.ports.append(port)
        return number

    def log(self, number: int) -> str:
        """Returns what a proxy has logged."""
        return (self.folder / f"proxy-{number}.log").read_text()

    def health(self, number: int) -> tuple[int, dict[str, Any]]:
        """Returns the status and the document of `/health`."""
        answer = httpx.get(f"http://127.0.0.1:{self.ports[number]}/health", timeout=5.0)
        return answer.status_code, json.loads(answer.text)

    def alive(self, number: int) -> int:
        """Returns how many others a proxy knows to live; -1 where it cannot reach any."""
        others = self.health(number)[1]["other_proxies"]
        return others["alive"] if others["reachable"] else -1

    def metric(self, number: int, name: str) -> float:
        """Returns the sum of all samples of a metric."""
        text = httpx.get(f"http://127.0.0.1:{self.ports[number]}/metrics", timeout=5.0).text
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M))

    async def ask(self, count: int, to: Sequence[int], prompt: Sequence[int] = range(1000)) -> list[float]:
        """Sends requests to proxies in turn, eight at a time, and returns how long each took.

        Raises:
            AssertionError: one was not answered 200 with text.
        """
        gate = asyncio.Semaphore(8)
        body = {"model": "stub", "max_tokens": 4, "prompt": list(prompt)}

        async def one(client: httpx.AsyncClient, number: int) -> float:
            async with gate:
                began = time.monotonic()
                port = self.ports[to[number % len(to)]]
                answer = await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["text"]
                return time.monotonic() - began

        async with httpx.AsyncClient(timeout=30.0) as client:
            return list(await asyncio.gather(*(one(client, number) for number in range(count))))

    def kill(self, number: int) -> None:
        """Ends a proxy without a chance to say goodbye."""
        os.kill(self.pids[number], signal.SIGKILL)
