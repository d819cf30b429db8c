"""Keeps the objects of one Kubernetes API up to date for ever: lists them, follows their changes, and lists them anew.

Whatever fails, the last good set stays. A list that is suddenly empty is believed when a second one, a moment later, is
empty as well.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import aclosing
from typing import Final, NoReturn

from kvparams_proxy.discovery.kubernetes_api import ExpiredVersion, KubernetesAPI, KubernetesError
from kvparams_proxy.discovery.watched_objects import WatchedObjects

__all__ = ["ObjectWatcher"]

_log = logging.getLogger(__name__)

_RELIST_S: Final = 300
"""A watch ends after so long, and everything is listed anew."""
_RELIST_EMPTY_S: Final = 10
"""The same where there is no object at all: an API that was wrong about that is found out soon."""
_SILENCE_S: Final = 90.0
"""The server sends a bookmark every minute; a connection that says nothing for longer is lost."""
_BATCH_S: Final = 0.5
"""Changes within so long are told together."""
_CONFIRM_S: Final = 1.0
"""Between two lists of which the second has to confirm that the first was rightly empty."""
_FIRST_BACKOFF_S: Final = 0.2
_LONGEST_BACKOFF_S: Final = 10.0


class ObjectWatcher:
    """Follows what one `KubernetesAPI` has."""

    def __init__(
        self, name: str, api: KubernetesAPI, changed: Callable[[WatchedObjects], None], failed: Callable[[str], None]
    ) -> None:
        """Creates a watcher; `run` follows.

        Args:
            name: what the log calls it.
            api: is closed when `run` ends.
            changed: is given the objects after every list, and after changes.
            failed: is told why the API cannot be asked.
        """
        self._name = name
        self._api = api
        self._changed = changed
        self._failed = failed
        self.watched: Final = WatchedObjects()
        """The last good set."""
        self._random = random.Random()

    async def run(self) -> NoReturn:
        """Lists and watches for ever."""
        backoff_s = 0.0
        try:
            while True:
                try:
                    await self._list()
                    backoff_s = 0.0
                    await self._follow()
                except ExpiredVersion:
                    continue
                except KubernetesError as error:
                    self._failed(str(error))
                    backoff_s = min(_LONGEST_BACKOFF_S, max(_FIRST_BACKOFF_S, 2 * backoff_s))
                    await asyncio.sleep(backoff_s * self._random.uniform(0.5, 1.0))
        finally:
            await self._api.close()

    async def _list(self) -> None:
        """Lists everything and tells it."""
        found = await self._api.list()
        if not found.objects and len(self.watched):
            await asyncio.sleep(_CONFIRM_S)
            found = await self._api.list()
        self.watched.replace(found.objects, found.version)
        self._changed(self.watched)

    async def _follow(self) -> None:
        """Applies events until it is time to list anew.

        A watch that is cut, or that the server ends, goes on from the last event.
        """
        loop = asyncio.get_running_loop()
        relist_s = _RELIST_S if len(self.watched) else _RELIST_EMPTY_S
        end_s = loop.time() + relist_s * self._random.uniform(0.8, 1.2)
        failures = 0
        while (left_s := end_s - loop.time()) > 0:
            before = self.watched.version
            try:
                await self._watch_once(int(left_s) + 1)
                failures = 0
            except ExpiredVersion:
                raise
            except KubernetesError as error:
                failures = 0 if self.watched.version != before else failures + 1
                if failures > 3:
                    raise
                _log.info("%s: %s; it goes on from the last event", self._name, error)
            if self.watched.version == before:
                await asyncio.sleep(_FIRST_BACKOFF_S * self._random.uniform(0.5, 1.0))

    async def _watch_once(self, seconds: int) -> None:
        loop = asyncio.get_running_loop()
        teller: asyncio.TimerHandle | None = None

        def tell() -> None:
            nonlocal teller
            teller = None
            self._changed(self.watched)

        try:
            async with aclosing(self._api.watch(self.watched.version, seconds, _SILENCE_S)) as events:
                async for event in events:
                    if self.watched.apply(event.kind, event.object) and teller is None:
                        teller = loop.call_later(_BATCH_S, tell)
        finally:
            if teller is not None:
                teller.cancel()
                self._changed(self.watched)
