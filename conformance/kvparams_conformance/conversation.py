"""Records what one check sends to a proxy, and everything that the scripted engines see of it."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from kvparams_conformance.connection import Head

__all__ = ["Conversation", "Reply", "Responder", "Role", "ScriptedAnswer", "SeenLeg", "shorten"]

Role = Literal["prefill", "decode"]
_MAX_LEGS: Final = 64
"""More legs of one request are a flood: they are refused, and the check fails."""


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """A `ScriptedAnswer` is what a scripted engine answers to a leg."""

    status: int = 200
    body: bytes = b""
    content_type: str = "application/json"
    wait_s: float = 0.0
    """How long the engine computes before the first byte."""
    parts: tuple[bytes | float, ...] = ()
    """In place of `body`: parts of a chunked answer, and seconds of silence between them."""
    end: Literal["whole", "cut", "hang", "close", "flood"] = "whole"
    """`cut` closes before the end of the answer, `close` before its first byte; `hang` never goes on after what is
    sent; `flood` sends bytes until the proxy closes the connection, up to a bound."""


@dataclass(slots=True)
class SeenLeg:
    """A `SeenLeg` is one request that an engine has received."""

    engine: str
    role: Role
    path: str
    head: Head
    body: bytes
    at_s: float
    order: int
    left_s: float | None = None
    """When the proxy closed the connection before the answer was complete."""

    @property
    def json(self) -> dict[str, Any]:
        """Returns the body as JSON, {} if it is none."""
        with suppress(ValueError, RecursionError):
            found = json.loads(self.body)
            if isinstance(found, dict):
                return cast("dict[str, Any]", found)
        return {}

    @property
    def carrier(self) -> dict[str, Any]:
        """Returns the member `kv_transfer_params`, {} if there is none."""
        found = self.json.get("kv_transfer_params")
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

    @property
    def document(self) -> dict[str, Any]:
        """Returns the document, {} if there is none. One that is text is read, too: check 2.1 alone judges that."""
        found: object = self.carrier.get("kvparams")
        if isinstance(found, str):
            with suppress(ValueError):
                found = json.loads(found)
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

    @property
    def transfer_id(self) -> str | None:
        """Returns the id of the document's transfer."""
        transfer = self.document.get("transfer")
        found = cast("dict[str, Any]", transfer).get("id") if isinstance(transfer, dict) else None
        return found if isinstance(found, str) else None

    def describe(self) -> str:
        """Returns one line of evidence."""
        left = "" if self.left_s is None else f", closed by the proxy after {self.left_s - self.at_s:.2f} s"
        return f"{self.engine} {self.path} {shorten(self.body)}{left}"


@dataclass(frozen=True, slots=True)
class Reply:
    """A `Reply` is what the client has received."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    ended: Literal["whole", "cut", "timeout", "too long"]
    seconds: float

    @property
    def json(self) -> dict[str, Any]:
        """Returns the body as JSON, {} if it is none."""
        with suppress(ValueError, RecursionError):
            found = json.loads(self.body)
            if isinstance(found, dict):
                return cast("dict[str, Any]", found)
        return {}

    @property
    def events(self) -> list[str]:
        """Returns the data of the events of a stream."""
        lines = self.body.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")
        return [line[5:].strip() for line in lines if line.startswith("data:")]

    def get(self, name: str) -> str | None:
        """Returns the value of the first header of this name."""
        return next((value for found, value in self.headers if found == name), None)

    def describe(self) -> str:
        """Returns one line of evidence."""
        return f"client {self.status} {shorten(self.body)}{'' if self.ended == 'whole' else f' ({self.ended})'}"


Responder = Callable[[SeenLeg], ScriptedAnswer]


@dataclass(slots=True)
class Conversation:
    """A `Conversation` is one request of a client, or several of the same tag, with its legs and answers."""

    tag: str
    number: int
    prefill: Responder
    decode: Responder
    control: Responder
    legs: list[SeenLeg] = field(default_factory=list[SeenLeg])
    sent: list[str] = field(default_factory=list[str])
    replies: list[Reply] = field(default_factory=list[Reply])
    flooded: bool = False
    is_aggregated: bool = False
    """Whether one leg is both prefill and decode, and answered as decode's script says."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, leg: SeenLeg) -> bool:
        """Records a leg. Returns False if there are too many."""
        if len(self.legs) >= _MAX_LEGS:
            self.flooded = True
            return False
        self.legs.append(leg)
        self.notify()
        return True

    def notify(self) -> None:
        """Wakes what waits for a change."""
        self._changed.set()

    def respond(self, leg: SeenLeg) -> ScriptedAnswer:
        """Returns what the script answers to a leg."""
        if leg.path == "/v1/kvparams":
            return self.control(leg)
        return self.prefill(leg) if leg.role == "prefill" else self.decode(leg)

    def of(self, role: Role) -> list[SeenLeg]:
        """Returns the generating legs of a role."""
        of_role = (leg for leg in self.legs if self.is_aggregated or leg.role == role)
        return [leg for leg in of_role if leg.path != "/v1/kvparams"]

    @property
    def prefills(self) -> list[SeenLeg]:
        """Returns the prefill legs."""
        return self.of("prefill")

    @property
    def decodes(self) -> list[SeenLeg]:
        """Returns the decode legs."""
        return self.of("decode")

    @property
    def controls(self) -> list[SeenLeg]:
        """Returns the legs to `/v1/kvparams`."""
        return [leg for leg in self.legs if leg.path == "/v1/kvparams"]

    async def wait_for(self, is_met: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until a condition on the recorded legs is met. Returns False after the time limit."""
        until = time.monotonic() + timeout_s
        while not is_met():
            self._changed.clear()
            left = until - time.monotonic()
            if left <= 0:
                return False
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        return True

    def evidence(self) -> tuple[str, str]:
        """Returns what was sent, and what was seen."""
        seen = [leg.describe() for leg in self.legs] + [reply.describe() for reply in self.replies]
        return " | ".join(self.sent), " | ".join(seen)


def shorten(data: bytes | str | Mapping[str, object], limit: int = 600) -> str:
    """Returns printable text of at most `limit` characters."""
    if isinstance(data, Mapping):
        data = json.dumps(data)
    text = data.decode("utf-8", "backslashreplace") if isinstance(data, bytes) else data
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[: limit * 2])
    return text if len(text) <= limit else f"{text[:limit]}…"
