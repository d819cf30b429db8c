"""An open-loop load generator that deals a trace's requests to several proxies in turn, as a load balancer would.

A request is sent at its time, whether or not others were answered, and its clock starts then.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.load_client import Pool, Tally, Target
from benchmarks.load_client import Request as Sent
from benchmarks.replay.trace import Request
from benchmarks.replicas_processes.engines import request_body

__all__ = ["DealtRequest", "LoadGenerator"]

_LATEST_S: Final = 30.0
"""For the last answers, after the last request."""
_FIRST_S: Final = 0.2
_PATH: Final = "/v1/completions"


@dataclass(frozen=True, slots=True)
class DealtRequest:
    """A `DealtRequest` is one request of the trace and the proxy that it was given to."""

    number: int
    at_s: float
    """Seconds after the start of the run."""
    replica: int
    sent: Sent


class LoadGenerator:
    """Sends the requests of a trace to the replicas in rotation."""

    def __init__(self, trace: Sequence[Request], speed: float, answer_tokens: int) -> None:
        """`speed`: how many times as fast as the trace's own times."""
        self.requests: list[DealtRequest] = []
        self.tally = Tally()
        """Of all replicas."""
        self._trace = trace
        self._speed = speed
        self._answer_tokens = answer_tokens
        self._pools: dict[int, Pool] = {}
        self._rotation: list[int] = []
        self._open = 0
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time() + _FIRST_S

    @property
    def now_s(self) -> float:
        """Seconds after the start of the run."""
        return self._loop.time() - self._start_s

    def add(self, replica: int, port: int) -> None:
        """Adds a replica to the rotation."""
        target = Target(port, _PATH, b"", stream=True, events=self._answer_tokens + 1)
        self._pools[replica] = Pool(target, self.tally, self._done)
        self._rotation.append(replica)

    def remove(self, replica: int) -> list[DealtRequest]:
        """Takes a replica out of the rotation, and returns its unanswered requests."""
        self._rotation.remove(replica)
        pool = self._pools[replica]
        return [each for each in self.requests if each.replica == replica and pool.is_open(each.sent)]

    async def run(self) -> None:
        """Sends everything and waits for the answers; what is unanswered after a while is an error."""
        self._start_s = self._loop.time() + _FIRST_S
        try:
            for number, request in enumerate(self._trace):
                at_s = (request.at - self._trace[0].at) / self._speed
                await asyncio.sleep(max(0.0, at_s - self.now_s))
                replica = self._rotation[number % len(self._rotation)]
                pool = self._pools[replica]
                wire = Target(pool.target.port, _PATH, request_body(number, request, self._answer_tokens)).request(0)
                sent = Sent(self._start_s + at_s, wire, measured=True)
                self.requests.append(DealtRequest(number, at_s, replica, sent))
                self._open += 1
                self._ended.clear()
                pool.send(sent)
            if self._open:
                async with asyncio.timeout(_LATEST_S):
                    await self._ended.wait()
        except TimeoutError:
            pass  # each of these is an error that the pool counts
        finally:
            await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    def _done(self, sent: Sent) -> None:
        sent.wire = b""
        self._open -= 1
        if not self._open:
            self._ended.set()
