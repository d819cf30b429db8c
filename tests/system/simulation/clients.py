"""Simulates clients of the proxy, patient, slow and leaving ones; each checks every byte that it gets.

A client that stays gets one answer per request: the right one in full, or an error that says so.
"""

import json
from typing import TYPE_CHECKING, Any

import httptools

from tests.system.simulation import scenario
from tests.system.simulation.language import tokenize
from tests.system.simulation.network import Socket
from tests.system.simulation.verdicts import Reply, judge

if TYPE_CHECKING:
    from tests.system.simulation.world import World

__all__ = ["Client"]

_CLOSING_S = 0.1
"""In that time the proxy closes a connection where it is asked to, or must."""


class Client:
    """One connection: a `network.Peer`."""

    def __init__(self, world: "World", number: int, script: scenario.Client) -> None:
        self.world = world
        self.name = f"client {number}"
        self.script = script
        self.left_at: float | None = None
        """When it left before it had everything."""
        self.done = False
        self.verdicts: list[str] = []
        self._socket: Socket
        self._next = 0
        """The request to send next."""
        self._reply = Reply()
        self._parser = httptools.HttpResponseParser(self)
        self._pieces = 0
        self._touched = 0
        self._slow_until: float | None = None
        self._connected = False
        self._asked_late = False
        """Whether its last request was sent after the proxy had been told to stop."""
        self._closing = False
        """Whether the proxy has been asked to close, and has no reason left not to."""

    # what it does

    def begin(self) -> None:
        """Connect and ask."""
        world = self.world
        socket = world.open(self)
        if socket is None:
            world.note(self.name, "finds nobody there")
            self.done = True
            world.client_done()
            return
        self._socket = socket
        self._socket.high_water = self.script.high_water
        self._connected = True
        world.note(self.name, "connects")
        leave = self.script.leave
        if leave is not None and leave.after_s is not None:
            world.loop.call_later(leave.after_s, self.leave)
        self._ask()

    def _ask(self) -> None:
        asks = self.script.asks
        until = len(asks) if self.script.pipelined else self._next + 1
        closing = None if self.script.closes is None else asks[self.script.closes]
        data = b"".join(_request(ask, closes=ask is closing) for ask in asks[self._next : until])
        first = self._next == 0
        self._asked_late = self.world.stopping
        self._next = until
        self.world.note(self.name, f"sends {', '.join(ask.prompt for ask in asks[until - 1 : until])}")
        leave = self.script.leave
        if first and leave is not None and leave.body is not None:
            self._send(data[: int(len(data) * leave.body)], 0.0)
            self.world.loop.call_later(0.02, self.leave)
            return
        if self.script.garbage:
            data += b"\x16\x03\x01 garbage\r\n\r\n"
        pieces = self.script.pieces
        size = -(-len(data) // pieces)
        apart_s = self.world.random.choice((0.0, 0.0, 0.005))
        for piece in range(pieces):
            self._send(data[piece * size : (piece + 1) * size], piece * apart_s)

    def _send(self, data: bytes, delay_s: float) -> None:
        def send() -> None:
            if not self.done:
                self._socket.arrive(data)

        if delay_s:
            self.world.loop.call_later(delay_s, send)
        else:
            send()

    def leave(self) -> None:
        """Go, whatever is still to come."""
        if self.done:
            return
        self.left_at = self.world.now
        self.world.note(self.name, "leaves")
        self._finish(reset=self.script.leave is not None and self.script.leave.reset)
        self.world.client_left(self)

    def _finish(self, *, reset: bool) -> None:
        self.done = True
        self.world.client_done()
        if reset:
            self._socket.reset()
        else:
            self._socket.end()

    def touched(self, role: str, point: str, *, own: bool) -> None:
        """An engine says where a leg is."""
        leave = self.script.leave
        if (
            leave is None
            or not (own or leave.anyones)
            or leave.point is None
            or leave.point[:2] != (role, point)
            or self.done
            or not self._connected
        ):
            return
        self._touched += 1
        if self._touched != leave.point[2]:
            return
        if leave.when == "before":
            self.leave()
        elif leave.when == "soon":
            self.world.loop.call_soon(self.leave)
        else:
            self.world.after.append(self.leave)

    # what it hears

    def received(self, data: bytes) -> None:
        """See `Peer.received`."""
        if self.done:
            return
        self._pieces += 1
        leave, slow = self.script.leave, self.script.slow
        if slow is not None and self._pieces > slow[0] and self._slow_until is None:
            self._socket.stop_taking()
            if slow[1] is None:
                self._slow_until = float("inf")
            else:
                self._slow_until = self.world.now + slow[1]
                self.world.loop.call_later(slow[1], self._socket.take)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__ or error
            self.world.wrong(f"{self.name} gets what is not HTTP: {cause!r}: {data[:200]!r}")
            self.leave()
            return
        if leave is not None and leave.reply is not None and self._pieces >= leave.reply:
            self.leave()

    def closed(self) -> None:
        """See `Peer.closed`."""
        if self.done:
            return
        self.world.note(self.name, "is cut off")
        slow = self.script.slow
        if not self.script.garbage and not self._closing and (slow is None or slow[1] is not None):
            asked = self.script.asks[: self._next]
            # what is idle is closed, as a request comes
            shed = self.world.stopping or self.world.connections.shed_count
            closing = shed and self.verdicts
            if len(self.verdicts) < len(asked) and not closing:
                self.world.wrong(
                    f"{self.name} is cut off before it has an answer to {asked[len(self.verdicts)].prompt}"
                )
        self.left_at = self.world.now
        self._finish(reset=False)

    def on_header(self, name: bytes, value: bytes) -> None:
        """For httptools."""
        self._reply.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """For httptools."""
        self._reply.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """For httptools."""
        self._reply.body += data

    def on_message_complete(self) -> None:
        """For httptools."""
        reply, self._reply = self._reply, Reply()
        if reply.status == 100 or self.done:
            return
        if self.script.garbage:  # what stands in front of it is answered
            self.world.loop.call_later(_CLOSING_S, self._last)
            return
        if len(self.verdicts) >= self._next:
            self.world.wrong(f"{self.name} gets an answer that it has not asked for")
            return
        ask = self.script.asks[len(self.verdicts)]
        verdict = self._judge(ask, reply)
        self.verdicts.append(verdict)
        self.world.note(self.name, f"has {verdict} for {ask.prompt}")
        if self._asked_late and reply.headers.get(b"connection") != b"close":
            self.world.wrong(f"{self.name} is not told that its connection ends, although the proxy stops")
        self._closing = len(self.verdicts) - 1 == self.script.closes
        if self._closing:
            self.world.loop.call_later(_CLOSING_S, self._last)
        elif len(self.verdicts) < len(self.script.asks):
            if reply.headers.get(b"connection") == b"close":
                self._finish(reset=False)
            elif self._next == len(self.verdicts):
                self.world.loop.call_later(self.world.delay(), self._again)
        else:
            self.world.loop.call_later(self.world.delay(), self._last)

    def _again(self) -> None:
        if not self.done:
            self._ask()

    def _last(self) -> None:
        if not self.done:
            if self.script.garbage:
                self.world.wrong(f"{self.name} has sent garbage, and its connection is kept")
            elif self._closing:
                self.world.wrong(f"{self.name} has asked for its connection to be closed, and it is not")
            self._finish(reset=False)

    # what it thinks of it

    def _judge(self, ask: scenario.Ask, reply: Reply) -> str:
        world = self.world
        verdict, problem = judge(world, ask, reply)
        if problem is not None:
            world.wrong(f"{self.name} gets a wrong answer to {ask.prompt}: {problem}: {reply.status} {reply.body!r}")
        if verdict not in ("whole", "refused") and world.scenario.calm:
            world.wrong(f"{self.name} gets {verdict} for {ask.prompt} although nothing is wrong: {reply.body!r}")
        return verdict


def _request(ask: scenario.Ask, *, closes: bool) -> bytes:
    close = "connection: close\r\n" if closes else ""
    if ask.way in ("health", "models", "metrics"):
        path = {"health": "/health", "models": "/v1/models", "metrics": "/metrics"}[ask.way]
        return f"GET {path} HTTP/1.1\r\nhost: proxy\r\n{close}\r\n".encode()
    body: dict[str, Any] = {"model": "sim", "max_tokens": ask.tokens}
    if ask.chat:
        body["messages"] = [{"role": "user", "content": ask.prompt}]
    else:
        body["prompt"] = tokenize(ask.prompt) if ask.as_ids else ask.prompt
    if ask.stream:
        body["stream"] = True
        if ask.usage:
            body["stream_options"] = {"include_usage": True}
    raw = json.dumps(body).encode() if ask.way != "invalid" else b'{"prompt": '
    lines = [
        f"POST /v1/{'chat/' if ask.chat else ''}completions{'?way=asgi' if ask.way == 'asgi' else ''} HTTP/1.1",
        "host: proxy",
        "content-type: application/json",
        f"content-length: {len(raw)}",
    ]
    if closes:
        lines.append("connection: close")
    if ask.own_id:
        lines.append(f"x-request-id: id-{ask.prompt[:-1]}")
    if ask.way == "asgi" or ask.tokens == 15:
        lines.append("expect: 100-continue")
    return "\r\n".join([*lines, "", ""]).encode() + raw
