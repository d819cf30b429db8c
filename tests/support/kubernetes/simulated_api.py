"""Simulates a Kubernetes API server for `KubernetesProvider` without a network, in virtual time, with random faults."""

import asyncio
from collections.abc import AsyncGenerator
from random import Random
from typing import Final

from kvparams_proxy.discovery.kubernetes_api import ExpiredVersion, KubernetesError, ListResult, WatchEvent
from tests.support.kubernetes.object_history import Gone, ObjectHistory

__all__ = ["SimulatedAPI"]

_POLL_S: Final = 0.02
_PAGE: Final = 3


class SimulatedAPI:
    """Has the methods of `KubernetesAPI`."""

    namespace: Final = "default"

    def __init__(self, history: ObjectHistory, selector: str, die: Random) -> None:
        self.history = history
        self.selector = selector
        self.is_away = False
        """Nothing is answered, and watches are cut."""
        self.is_forbidden = False
        self.is_next_empty = False
        """The next list is wrongly empty, unless the last one was: a provider believes the second."""
        self.cut_chance = 0.0
        """Of each event: that the watch is cut before it."""
        self.repeat_chance = 0.0
        """Of each event: that it comes twice."""
        self._die = die
        self._was_empty = False

    async def close(self) -> None:
        """Ends nothing."""

    async def list(self) -> ListResult:
        """See `KubernetesAPI.list`. The history may change between pages."""
        await self._answer()
        is_empty, self.is_next_empty = self.is_next_empty and not self._was_empty, False
        self._was_empty = is_empty
        if is_empty:
            return ListResult([], str(self.history.version))
        objects: list[object] = []
        token = ""
        while True:
            try:
                page = self.history.page(self.selector, _PAGE, token)
            except Gone:
                raise ExpiredVersion("the page is too old") from None
            objects += page.objects
            token = page.token
            if not token:
                return ListResult(objects, str(page.version))  # pyright: ignore[reportArgumentType]
            await self._answer()

    async def watch(self, version: str, seconds: int, silence_s: float) -> AsyncGenerator[WatchEvent]:
        """See `KubernetesAPI.watch`."""
        await self._answer()
        loop = asyncio.get_running_loop()
        end_s, seen = loop.time() + seconds, int(version)
        while loop.time() < end_s:
            try:
                changes = list(self.history.since(seen, self.selector))
            except Gone:
                raise ExpiredVersion("the version is too old") from None
            for change in changes:
                if self._die.random() < self.cut_chance:
                    raise KubernetesError("cut")
                for _ in range(2 if self._die.random() < self.repeat_chance else 1):
                    yield WatchEvent(change.kind, change.object)
                seen = change.version
            if not changes and self._die.random() < 0.05:
                seen = max(seen, self.history.version)
                yield WatchEvent("BOOKMARK", {"metadata": {"resourceVersion": str(seen)}})
            await asyncio.sleep(_POLL_S)
            self._refuse()

    async def _answer(self) -> None:
        await asyncio.sleep(self._die.uniform(0.001, 0.05))
        self._refuse()

    def _refuse(self) -> None:
        if self.is_away:
            raise KubernetesError("the API server cannot be reached: refused")
        if self.is_forbidden:
            raise KubernetesError("the API server refuses (403)")
