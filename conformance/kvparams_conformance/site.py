"""Puts a proxy under test between scripted engines, and asks it as a client."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit

from kvparams_conformance.answers import Carrier, decode_answer, prefill_answer
from kvparams_conformance.client import Received, receive, send_request
from kvparams_conformance.connection import TooLong, WireError
from kvparams_conformance.conversation import Conversation, Reply, Responder, ScriptedAnswer, SeenLeg, shorten
from kvparams_conformance.program import Program, StartFailed
from kvparams_conformance.raw_json import dump
from kvparams_conformance.scripted_engine import MODEL, TAG, ScriptedEngine

__all__ = ["Site", "Trial", "Under"]


@dataclass(frozen=True, slots=True)
class Under:
    """The proxy under test: how it is started, or where it runs."""

    carrier: Carrier
    command: str | None = None
    url: str | None = None
    engine_ports: tuple[int, ...] = ()
    """Ports of prefill0, prefill1, decode0 and decode1 for a proxy that runs already; otherwise free ones."""
    keys: Path | None = None
    """The file of signing keys, for the profile `signed`."""
    audience: str = "pool"
    start_s: float = 20.0
    """The time in which it has to listen."""


class Site:
    """Four engines and a proxy."""

    def __init__(self, under: Under) -> None:
        self.under = under
        self._numbers = itertools.count(int(token_hex(2), 16) % 50_000)
        self._by_tag: dict[bytes, Conversation] = {}
        self._by_transfer: dict[str, Conversation] = {}
        self.prefills = [ScriptedEngine(f"prefill-{number}", "prefill", self._find) for number in range(2)]
        self.decodes = [ScriptedEngine(f"decode-{number}", "decode", self._find) for number in range(2)]
        self.program = Program(under.command or "")
        self._host, self._port = "127.0.0.1", 0

    @property
    def engines(self) -> list[ScriptedEngine]:
        """Returns all engines."""
        return [*self.prefills, *self.decodes]

    @property
    def can_read_logs(self) -> bool:
        """Returns whether the kit sees what the proxy writes to its standard output."""
        return self.under.command is not None

    async def start(self) -> None:
        """Starts the engines and the proxy, and waits until it answers a request.

        Raises:
            StartFailed: it does not listen in time.
        """
        ports = self.under.engine_ports or (0, 0, 0, 0)
        for engine, port in zip(self.engines, ports, strict=True):
            await engine.start(port)
        if self.under.url is not None:
            parts = urlsplit(self.under.url)
            self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        else:
            self._port = await _free_port()
            words = self._words(await _free_port())
            self.program = Program(_fill(self.under.command or "", words))
            await self.program.start({f"KVCONF_{name.upper()}": value for name, value in words.items()})
        until = time.monotonic() + self.under.start_s
        listens = False
        while time.monotonic() < until:
            if self.program.ended is not None:
                raise StartFailed(
                    f"the proxy ended with status {self.program.ended}: {shorten(self.program.output[-600:])}"
                )
            trial = Trial(self)
            reply = await trial.ask(trial.talk(), timeout_s=min(5.0, max(0.2, until - time.monotonic())))
            if reply.status == 200 and trial.talks[0].decodes:
                return
            listens = listens or reply.status != 0
            await asyncio.sleep(0.1)
        if not listens:
            said = shorten(self.program.output[-600:]) if self.can_read_logs else ""
            raise StartFailed(f"the proxy did not answer within {self.under.start_s:.0f} s {said}".rstrip())

    async def stop(self) -> None:
        """Ends everything."""
        await self.program.stop()
        for engine in self.engines:
            await engine.stop()

    def _words(self, spare_port: int) -> dict[str, str]:
        words = {"port": str(self._port), "host": "127.0.0.1", "audience": self.under.audience}
        words |= {"keys": str(self.under.keys or ""), "spare_port": str(spare_port)}
        for engine in self.engines:
            name = engine.name.replace("-", "")
            words |= {name: engine.url, f"{name}_port": str(engine.port)}
        return words

    def _find(self, leg: SeenLeg) -> Conversation | None:
        found = TAG.search(leg.body)
        talk = None if found is None else self._by_tag.get(found[0])
        transfer = leg.transfer_id
        if talk is None and transfer is not None:
            talk = self._by_transfer.get(transfer)
        if talk is not None and transfer is not None:
            self._by_transfer[transfer] = talk
        return talk

    def begin(self, prefill: Responder | None, decode: Responder | None, control: Responder | None) -> Conversation:
        """Registers a conversation of its own tag. A role without a script answers as a conforming engine does."""
        number = next(self._numbers)
        talk = Conversation(f"kvc{token_hex(5)}x", 40_000_00000 + number, _never, _never, _never)
        carrier = self.under.carrier
        talk.prefill = prefill or (lambda leg: prefill_answer(carrier, talk, leg))
        talk.is_aggregated = carrier == "aggregated"
        talk.decode = decode or (prefill if talk.is_aggregated and prefill else decode_answer)
        talk.control = control or (lambda _: ScriptedAnswer(body=b"{}"))
        self._by_tag[talk.tag.encode()] = self._by_tag[str(talk.number).encode()] = talk
        return talk

    async def ask(
        self,
        talk: Conversation,
        body: bytes,
        *,
        path: str,
        headers: Sequence[tuple[str, str]],
        timeout_s: float,
        leave_when: Callable[[Reply], bool] | None,
    ) -> Reply:
        """Sends a request as a client, and reads the answer. `leave_when`: see `Trial.ask`."""
        talk.sent.append(f"POST {path} {' '.join(f'{name}: {value}' for name, value in headers)} {shorten(body)}")
        begun = time.monotonic()
        received = Received()
        try:
            async with asyncio.timeout(timeout_s):
                await self._exchange(talk, body, path, headers, received, leave_when)
        except TimeoutError:
            received.ended = "timeout"
        except TooLong:
            received.ended = "too long"
        except (WireError, OSError) as error:
            received.ended = "cut"
            received.body = received.body or bytearray(str(error).encode())
        finally:
            if received.connection is not None:
                await received.connection.close(reset=leave_when is not None)
        reply = received.reply(time.monotonic() - begun)
        talk.replies.append(reply)
        return reply

    async def _exchange(
        self,
        talk: Conversation,
        body: bytes,
        path: str,
        headers: Sequence[tuple[str, str]],
        received: Received,
        leave_when: Callable[[Reply], bool] | None,
    ) -> None:
        received.connection = await send_request(self._host, self._port, "POST", path, body, headers)
        reading = asyncio.create_task(receive(received.connection, received))
        try:
            while not reading.done():
                if leave_when is not None and leave_when(received.reply(0.0)):
                    return
                watching = asyncio.create_task(talk.wait_for(lambda: False, 0.02))
                await asyncio.wait((reading, watching), return_when=asyncio.FIRST_COMPLETED)
                watching.cancel()
            await reading
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError, WireError, OSError):
                await reading


@dataclass(slots=True)
class Trial:
    """A `Trial` is one check of a proxy at work: its conversations are the evidence."""

    site: Site
    talks: list[Conversation] = field(default_factory=list[Conversation])

    def talk(
        self,
        prefill: Responder | None = None,
        decode: Responder | None = None,
        control: Responder | None = None,
    ) -> Conversation:
        """Begins a conversation, with scripts for the engines."""
        self.talks.append(self.site.begin(prefill, decode, control))
        return self.talks[-1]

    async def ask(
        self,
        talk: Conversation,
        body: bytes | None = None,
        *,
        path: str = "/v1/completions",
        headers: Sequence[tuple[str, str]] = (),
        timeout_s: float = 8.0,
        leave_when: Callable[[Reply], bool] | None = None,
        **members: Any,
    ) -> Reply:
        """Sends a request. Without a body, it is a completion with the tag as its prompt, and `members`.

        `leave_when`: the client closes its connection as soon as this holds of what it has received so far.
        """
        if body is None:
            body = dump({"model": MODEL, "prompt": f"{talk.tag} Who?", "max_tokens": 8, **members})
        return await self.site.ask(talk, body, path=path, headers=headers, timeout_s=timeout_s, leave_when=leave_when)

    def evidence(self) -> tuple[str, str]:
        """Returns what was sent and what was seen."""
        found = [talk.evidence() for talk in self.talks]
        return " | ".join(sent for sent, _ in found if sent), " | ".join(seen for _, seen in found if seen)


def _never(_: SeenLeg) -> ScriptedAnswer:
    raise AssertionError("the script is set when the conversation begins")


def _fill(command: str, words: dict[str, str]) -> str:
    for name, value in words.items():
        command = command.replace(f"{{{name}}}", value)
    return command


async def _free_port() -> int:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port
