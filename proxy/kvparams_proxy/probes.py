"""Asks each engine from time to time whether it is there and which models it serves. Control traffic: httpx."""

import asyncio
import logging
import ssl
from contextlib import suppress
from types import TracebackType
from typing import Final, Self, cast

import httpx

from kvparams_proxy.fleet import Fleet, Member

__all__ = ["Prober"]

_RETRY_S: Final = 0.5
"""How often while an engine is missing: engines that are started together with the proxy are found at once."""
_log = logging.getLogger(__name__)


class Prober:
    """Keeps `Member.ready` and `Member.models` true. Use it as an async context: the first round is done on entry."""

    def __init__(self, fleet: Fleet, every_s: float, tls: ssl.SSLContext | None) -> None:
        self._fleet = fleet
        self._every_s = every_s
        self._client = httpx.AsyncClient(timeout=min(every_s, 5.0), verify=tls or True)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._round()
        self._task = asyncio.create_task(self._rounds())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._client.aclose()

    async def _rounds(self) -> None:
        while True:
            all_ready = all(member.ready for member in self._fleet.members)
            await asyncio.sleep(self._every_s if all_ready else min(self._every_s, _RETRY_S))
            await self._round()

    async def _round(self) -> None:
        await asyncio.gather(*(self._probe(member) for member in self._fleet.members))

    async def _probe(self, member: Member) -> None:
        try:
            answer = await self._client.get(f"{member.instance.url}/v1/models")
            ready = answer.status_code < 500
            models = _models(answer) if answer.status_code == 200 else member.models
        except (httpx.HTTPError, ValueError, RecursionError):
            ready, models = False, member.models
        if ready is not member.ready:
            _log.warning("%s %s is %s", member.instance.role, member.instance.id, "ready" if ready else "not reachable")
        self._fleet.learn(member, ready, models)


def _models(answer: httpx.Response) -> frozenset[str] | None:
    document: object = answer.json()
    data = cast("dict[str, object]", document).get("data") if isinstance(document, dict) else None
    if not isinstance(data, list):
        return None
    entries = [cast("dict[str, object]", e) for e in cast("list[object]", data)[:10_000] if isinstance(e, dict)]
    return frozenset(name for entry in entries if isinstance(name := entry.get("id"), str))
