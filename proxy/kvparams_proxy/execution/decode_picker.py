"""Defers the choice of a decode engine to an external endpoint picker. Without its answer the proxy chooses itself."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol, get_args

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvparams.instances import Instance
from kvparams_proxy.fleet.endpoint_names import EndpointNames

__all__ = ["DecodePicker", "DecodeQuestion", "ExternalDecodePicker"]

_log: Final = logging.getLogger(__name__)
_MOST_AT_ONCE: Final = 1024
"""Questions at once: a picker that hangs does not fill the memory with bodies."""
_SAY_AGAIN_S: Final = 10.0
Result = Literal["followed", "timeout", "unreachable", "refused", "format", "unlisted", "crowded"]


class DecodeQuestion(NamedTuple):
    """A request whose decode instance is to be chosen."""

    path: str
    request_id: str
    body: bytes
    candidates: Sequence[Instance]


class DecodePicker(Protocol):
    """Chooses decode instances."""

    def ask(self, question: DecodeQuestion, answered: Callable[[Instance | None], None]) -> None:
        """Asks, and calls `answered` once, later, with one of the candidates, or None where the choice is free."""
        ...


class ExternalDecodePicker(Collector):
    """Asks a picker over gRPC, and counts what comes of it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: Any, endpoints: EndpointNames) -> None:
        """`client` is a `kvparams_proxy.ext_proc.client.PickerClient`, whose library is optional."""
        self._loop = loop
        self._client = client
        self._endpoints = endpoints
        self._tasks: set[asyncio.Task[None]] = set()
        self._said_s = -_SAY_AGAIN_S
        self.results: Final[Counter[Result]] = Counter()

    def ask(self, question: DecodeQuestion, answered: Callable[[Instance | None], None]) -> None:
        """See `DecodePicker.ask`."""
        if len(self._tasks) >= _MOST_AT_ONCE:
            self.results["crowded"] += 1
            self._loop.call_soon(answered, None)
            return
        task = self._loop.create_task(self._ask(question, answered))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends what still runs."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._client.close()

    def collect(self) -> Iterable[Metric]:
        """Collects the metrics for the registry."""
        family = CounterMetricFamily(
            "kvparams_proxy_decode_picks",
            "Choices of decode engines that an external picker was asked for: followed, or why the proxy chose itself.",
            labels=["result"],
        )
        for result in get_args(Result):
            family.add_metric([result], self.results[result])
        yield family

    async def _ask(self, question: DecodeQuestion, answered: Callable[[Instance | None], None]) -> None:
        from kvparams_proxy.ext_proc.client import PickerFailed, PickerQuestion

        named: dict[str, Instance] = {}
        for each in question.candidates:
            if endpoint := self._endpoints.endpoint(each):
                named.setdefault(endpoint, each)  # of data-parallel ranks behind one URL, the least busy
        chosen: Instance | None = None
        try:
            asked = PickerQuestion(question.path, question.request_id, (question.body,), tuple(named))
            found: list[str] = await self._client.ask(asked)
            chosen = next((named[each] for each in found if each in named), None)
            self.results["unlisted" if chosen is None else "followed"] += 1
        except PickerFailed as error:
            self.results[error.reason] += 1
            self._say(error)
        except Exception as error:  # noqa: BLE001  whatever it is, the request goes on without the picker
            self.results["unreachable"] += 1
            self._say(error)
        answered(chosen)

    def _say(self, error: Exception) -> None:
        """Logs a failure, from time to time."""
        now_s = self._loop.time()
        if now_s - self._said_s >= _SAY_AGAIN_S:
            self._said_s = now_s
            _log.warning("the decode picker has named no engine (%s); the proxy chooses itself", str(error)[:300])
