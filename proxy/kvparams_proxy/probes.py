"""Asks each engine from time to time whether it is there and which models it serves. Control traffic: httpx."""

import asyncio
import json
import logging
import ssl
from types import TracebackType
from typing import Final, Self, cast

import httpx

from kvparams_proxy.fleet import Fleet, Member

__all__ = ["Prober"]

_RETRY_S: Final = 0.5
"""How often while an engine is missing: engines that are started together with the proxy are found at once."""
_MAX_BYTES: Final = 4 << 20
"""Of an engine's list of models."""
_log = logging.getLogger(__name__)


class Prober:
    """Keeps `Member.ready` and `Member.models` true. Use it as an async context: the first round is done on entry."""

    def __init__(self, fleet: Fleet, every_s: float, tls: ssl.SSLContext | None) -> None:
        self._fleet = fleet
        self._every_s = every_s
        self._timeout_s = min(every_s, 5.0)
        # As the data path does it: no proxy in between, and the system's trust.
        secure = any(member.instance.url.startswith("https:") for member in fleet.members)
        trust = (tls or ssl.create_default_context()) if secure else False
        self._client = httpx.AsyncClient(timeout=self._timeout_s, verify=trust, trust_env=False)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        members = list(self._fleet.members)
        await asyncio.gather(*(self._probe(member) for member in members))
        apart_s = self._every_s / max(1, len(members))
        self._tasks = [asyncio.create_task(self._follow(m, number * apart_s)) for number, m in enumerate(members)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def _follow(self, member: Member, after_s: float) -> None:
        """Probe one engine for ever. Engines are probed at different moments: a probe costs milliseconds of CPU, and
        all of them together would be felt by the requests that arrive meanwhile."""
        await asyncio.sleep(min(after_s, _RETRY_S) if not member.ready else after_s)
        while True:
            await asyncio.sleep(self._every_s if member.ready else min(self._every_s, _RETRY_S))
            await self._probe(member)

    async def _probe(self, member: Member) -> None:
        try:
            async with (
                asyncio.timeout(self._timeout_s),  # for all of it: httpx's own begins anew with every byte
                self._client.stream("GET", f"{member.instance.url}/v1/models") as answer,
            ):
                ready = answer.status_code < 500
                models = _models(await _text(answer)) if answer.status_code == 200 else member.models
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, RecursionError):
            ready, models = False, member.models
        if ready is not member.ready:
            _log.warning("%s %s is %s", member.instance.role, member.instance.id, "ready" if ready else "not reachable")
        self._fleet.learn(member, ready, models)


async def _text(answer: httpx.Response) -> bytes:
    text = b""
    async for piece in answer.aiter_raw():  # not decoded: nothing else was asked for
        text += piece
        if len(text) > _MAX_BYTES:
            raise ValueError("an engine has no such list of models")
    return text


def _models(text: bytes) -> frozenset[str] | None:
    document: object = json.loads(text)
    data = cast("dict[str, object]", document).get("data") if isinstance(document, dict) else None
    if not isinstance(data, list):
        return None
    entries = [cast("dict[str, object]", e) for e in cast("list[object]", data)[:10_000] if isinstance(e, dict)]
    return frozenset(name for entry in entries if isinstance(name := entry.get("id"), str))
