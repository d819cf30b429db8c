"""Defines a case: what its client does, what its engines do, and the expected result.

The cases of each group are tables in a module of their own: `upstream_cases.py`, `lifecycle_cases.py`.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tests.support.waiting import until
from tests.system.adversary.clients import Client, post
from tests.system.adversary.engines import Script, Seen

__all__ = ["ASKED", "STREAM", "Act", "Case", "Expect", "Group", "Stage", "asks"]

Group = Literal["edge", "body", "upstream", "lifecycle"]

ASKED: Final[dict[str, Any]] = {"model": "stub", "prompt": "x", "max_tokens": 4}
STREAM: Final[dict[str, Any]] = {**ASKED, "stream": True}


@dataclass(slots=True)
class Stage:
    """What a client acts on."""

    port: int
    case: int
    """The number that the case's requests carry: see `engines.trace_of`."""
    within_s: float
    seen: Callable[[str], Sequence[Seen]]
    """The requests of this case that engines of a role have begun to work on."""
    clients: list[Client] = field(default_factory=list[Client])

    async def connect(self, *, buffer_bytes: int | None = None) -> Client:
        """Connects another client; the runner closes it."""
        client = await Client.connect(self.port, buffer_bytes=buffer_bytes)
        self.clients.append(client)
        return client

    async def at_work(self, role: str, number: int = 1) -> None:
        """Waits until engines of a role work on so many requests of this case."""
        await until(lambda: len(self.seen(role)) >= number, self.within_s)

    async def abandoned(self, within_s: float) -> None:
        """Waits until a decode engine has seen its connection close, or the time is over."""
        with suppress(TimeoutError):
            await until(lambda: any(seen.left_s for seen in self.seen("decode")), within_s)


Act = Callable[[Stage], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Expect:
    """What must become of a case. Empty: that is not looked at."""

    statuses: frozenset[int] = frozenset()
    """Every answer has one of these."""
    answers: int | None = 1
    """How many there are; 0: the connection is closed without one. None: either."""
    code: str | None = None
    """A regular expression for the code of the last answer's error, in its JSON or its last event."""
    ends: Literal["done", "error", "cut"] | None = None
    """How a stream ends: with [DONE], with an error event, or not at all."""
    body: bytes | None = None
    """Of the last answer."""
    without: Sequence[bytes] = ()
    """What no answer has in it."""
    closed: bool | None = None
    """Whether the proxy ends the connection."""


@dataclass(frozen=True, slots=True)
class Case:
    """One of them."""

    name: str
    group: Group
    act: Act
    expect: Expect
    prefill: Script | None = None
    """What a prefill engine does for it; None: it answers well."""
    decode: Script | None = None
    within_s: float = 10.0
    """It is over in this time."""
    reaches: Literal["nobody", "anybody", "prefill", "decode"] = "anybody"
    """Which engines may have seen it: `prefill` and `decode` must have."""
    alone: bool = False
    """No other case runs beside it: what it sends late would be an answer to another request of the same connection."""
    aborts_within_s: float | None = None
    """In this time after the client is done, every engine that was at work for it has seen its connection close."""


def asks(body: dict[str, Any] = ASKED, path: str = "/v1/completions", *lines: str) -> Act:
    """Returns a client that asks and reads its answer to the end."""

    async def act(stage: Stage) -> None:
        client = await stage.connect()
        await client.send(post(stage.case, body, path, *lines))
        await client.read(stage.within_s)

    return act
