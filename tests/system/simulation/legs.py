"""Holds an engine's work: its KV, its requests, and the connections that they came on.

A leg ends once, and its end is reported to the world.
"""

from typing import TYPE_CHECKING, Any, cast

from tests.system.simulation.answers import Do, Steps
from tests.system.simulation.network import Socket

if TYPE_CHECKING:
    import asyncio

    from tests.system.simulation.engines import Engine

__all__ = ["Held", "Leg", "Link"]


class Held:
    """KV of one prompt, kept for one transfer."""

    __slots__ = ("answered", "claims", "ids", "key", "name", "prompt", "releases", "state", "transfer")

    def __init__(self, key: str, transfer: str, prompt: str, ids: list[int]) -> None:
        self.key = key
        self.transfer = transfer
        self.prompt = prompt
        self.ids = ids
        self.state = "held"
        """Then `fetched`, `freed` by an abort, `released`, or `lost` with its engine."""
        self.answered = False
        """Whether the proxy has been told of it."""
        self.claims = 0
        """Legs that named it; one that was lost on its way counts, as the proxy cannot tell."""
        self.releases = 0
        """Of these, legs that only gave it back."""


class Leg:
    """One request that an engine is working on."""

    def __init__(self, link: "Link", kind: str, prompt: str, body: dict[str, Any], request: str) -> None:
        self.link = link
        self.kind = kind
        self.prompt = prompt
        self.body = body
        self.raw = b""
        """The same, as it came."""
        self.request = request
        self.held: Held | None = None
        self.begun = link.engine.world.now
        self.over = False
        self.deaf = False
        """Whether the proxy did not read what was sent last."""
        self.timer: asyncio.TimerHandle | None = None
        self.steps: Steps | None = None

    def go(self) -> None:
        """Take steps until there is something to wait for."""
        link = self.link
        engine = link.engine
        world = engine.world
        steps = cast("Steps", self.steps)
        while not self.over:
            if engine.thaws > world.now:
                self.timer = world.loop.call_at(engine.thaws, self.go)
                return
            step = next(steps, None)
            if step is None:
                self.finish("answered")
                link.rest()
            elif isinstance(step, float):
                if step > 0:
                    self.timer = world.loop.call_later(step, self.go)
                    return
            elif isinstance(step, bytes):
                self.deaf = link.socket.is_closing()
                link.socket.arrive(step)
                while world.after:
                    world.after.pop()()
            elif step is Do.STALL:
                return
            elif step is Do.CRASH:
                engine.crash(0.3)
            else:
                self.finish("cut")
                link.hang_up(reset=step is Do.RESET)

    def finish(self, how: str) -> None:
        """It is over, for the engine."""
        if self.over:
            return
        self.over = True
        if self.timer is not None:
            self.timer.cancel()
        self.link.leg = None
        engine = self.link.engine
        engine.legs.pop(self, None)
        engine.world.note(engine.name, f"{self.kind} of {self.prompt} {how}")
        if how in ("cut", "crashed"):
            engine.world.leg_cut(self)
        if how != "crashed" and self.held is not None and self.held.state == "held" and self.kind != "prefill":
            self.held.state = "freed" if self.kind == "decode" else "released"


class Link:
    """One connection, from the engine's side."""

    def __init__(self, engine: "Engine", socket: Socket) -> None:
        self.engine = engine
        self.socket = socket
        self.number = next(engine.world.link_numbers)
        self.leg: Leg | None = None
        self.over = False
        self.spoken = False
        self.served = 0
        """Requests."""
        self._buffer = b""
        self._idle: asyncio.TimerHandle | None = None

    def received(self, data: bytes) -> None:
        """The proxy has written."""
        if self.over:
            self.engine.world.lost(data)
            return
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        world = self.engine.world
        if self.spoken:
            world.wrong(f"{self.engine.name} is sent a request on a connection on which it has spoken unasked")
        if self.leg is not None:
            world.wrong(f"{self.engine.name} is sent a request while another runs on that connection")
            return
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        length = int(headers.get("content-length", "0"))
        if len(rest) < length:
            return
        if len(rest) > length:
            world.wrong(f"{self.engine.name} is sent more than a request")
        self._buffer = b""
        self.served += 1
        self.engine.serve(self, lines[0], headers, rest)

    def speak(self) -> None:
        """Say something that nobody has asked for, where it cannot be taken for an answer."""
        idle = not self.socket.is_closing() and not getattr(self.socket.protocol, "busy", True)
        if not self.over and self.leg is None and idle:
            self.engine.world.note(self.engine.name, f"speaks unasked on connection {self.number}")
            self.spoken = True
            self.socket.arrive(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")

    def closed(self) -> None:
        """The proxy has closed, at least its way: an abort of what runs. An engine's server then closes, too."""
        if not self.over:
            self._leave()
            if self.leg is not None:
                self.leg.finish("aborted")
            if self.engine.thaws <= self.engine.world.now:
                self.socket.end()

    def hang_up(self, *, reset: bool) -> None:
        """Close it."""
        if self.over:
            return
        self._leave()
        if self.leg is not None:
            self.leg.finish("cut")
        if reset:
            self.socket.reset()
        else:
            self.socket.end()

    def rest(self) -> None:
        """Nothing runs; after a while an engine closes."""
        if not self.over:
            idle_s = self.engine.world.scenario.engine_idle_s
            if self.engine.world.fault(self.engine.name, "idle", ("speaks",)):
                self.engine.world.loop.call_soon(self.speak)
            self._idle = self.engine.world.loop.call_later(idle_s, lambda: self.hang_up(reset=False))

    def _leave(self) -> None:
        self.over = True
        self.engine.links.pop(self, None)
        if self._idle is not None:
            self._idle.cancel()
