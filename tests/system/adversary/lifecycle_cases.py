"""Defines clients that leave, fall silent or read nothing, at each stage of their request; their work must end."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tests.system.adversary.cases import ASKED, STREAM, Act, Case, Expect, Stage
from tests.system.adversary.clients import Client, post
from tests.system.adversary.engines import DONE, EVENT, HOLD, Pause, Repeat, Script, chunk, chunked, head, sse, whole
from tests.system.adversary.upstream_cases import DECODE, PREFILL

__all__ = ["LIFECYCLE"]

OK: Final = frozenset((200,))
NOTHING: Final = Expect(answers=0)
EVENTS: Final[Script] = (head("200 OK", "transfer-encoding: chunked", kind="text/event-stream"), Repeat(chunk(EVENT)))
BIG: Final = b'data: {"choices":[{"index":0,"text":"%b"}]}\n\n' % (b"y" * 60_000)
LONG: Final[Script] = (
    head("200 OK", "transfer-encoding: chunked", kind="text/event-stream"),
    Repeat(chunk(BIG), 0.0),
)
"""More than all the buffers between a decode engine and a client hold."""
WHOLE: Final[Script] = (whole(b'{"choices":[{"index":0,"text":"%b"}]}' % (b"y" * (8 << 20))),)

Leave = Callable[[Client, Stage], Awaitable[None]]


async def close(client: Client, stage: Stage) -> None:
    client.close()


async def reset(client: Client, stage: Stage) -> None:
    client.reset()


async def half_close(client: Client, stage: Stage) -> None:
    """A client that sends no more is gone, as far as uvicorn tells: nothing else is said over this connection."""
    client.half_close()
    await client.read(stage.within_s)


LEAVES: Final[Mapping[str, Leave]] = {"closes": close, "resets": reset, "half closes": half_close}


class Moment(NamedTuple):
    """When a client leaves."""

    name: str
    sent: float
    """How much of its request it has sent: a share of its bytes."""
    read: int | None = None
    """How much of its answer it has read; None: it has waited until its engine was at work."""
    prefill: Script | None = None
    decode: Script | None = None
    expect: Expect = NOTHING
    stream: bool | None = None
    """Which of the two it asks for; None: each."""


MOMENTS: Final = (
    Moment("at once", 0.0),
    Moment("in its request line", 0.03),
    Moment("in its headers", 0.3),
    Moment("before its body", 0.999),
    Moment("while prefill is silent", 1.0, prefill=(HOLD,)),
    Moment("while prefill's head trickles", 1.0, prefill=(b"HTTP/1.1 200 OK\r\nx: ", Repeat(b"y"))),
    Moment("while prefill's body trickles", 1.0, prefill=(head("200 OK", "content-length: 1000"), Repeat(b" "))),
    Moment("while decode is silent", 1.0, decode=(HOLD,)),
    Moment("while decode's head trickles", 1.0, decode=(b"HTTP/1.1 200 OK\r\nx: ", Repeat(b"y"))),
    Moment(
        "while decode's body trickles", 1.0, decode=(head("200 OK", "content-length: 1000"), Repeat(b" ")), stream=False
    ),
    Moment("while decode comments", 1.0, decode=(EVENTS[0], Repeat(chunk(b": beat\n\n"))), stream=True),
    Moment("in its stream", 1.0, 500, decode=EVENTS, expect=Expect(OK, ends="cut"), stream=True),
    Moment("in a long stream", 1.0, 500_000, decode=LONG, expect=Expect(OK, ends="cut"), stream=True),
)


def leaving() -> Iterator[Case]:
    for moment in MOMENTS:
        for stream in (False, True) if moment.stream is None else (moment.stream,):
            for how, leave in LEAVES.items():
                if how == "half closes" and moment.sent < 1:
                    continue  # of an edge, not of a life
                works = moment.prefill or moment.decode
                yield Case(
                    f"{how} {moment.name}{', streamed' * stream}",
                    "lifecycle",
                    _leaves(moment, leave, STREAM if stream else ASKED),
                    moment.expect,
                    prefill=moment.prefill,
                    decode=moment.decode,
                    reaches="anybody" if works else "nobody",
                    aborts_within_s=1.0 if works else None,
                )


def _leaves(moment: Moment, leave: Leave, body: dict[str, Any]) -> Act:
    async def act(stage: Stage) -> None:
        client = await stage.connect()
        raw = post(stage.case, body)
        await client.send(raw[: int(len(raw) * moment.sent)])
        if moment.read is not None:
            await client.read(stage.within_s, bytes_at_least=moment.read)
        elif moment.prefill or moment.decode:
            await stage.at_work("prefill" if moment.prefill else "decode")
        await leave(client, stage)

    return act


def behind_an_answer() -> Iterator[Case]:
    """It has everything: nothing is wrong with a client that leaves then."""
    for stream in (False, True):
        for how, leave in LEAVES.items():

            async def act(stage: Stage, leave: Leave = leave, stream: bool = stream) -> None:
                client = await stage.connect()
                await client.send(post(stage.case, STREAM if stream else ASKED))
                await client.read(stage.within_s)
                await leave(client, stage)

            expect = Expect(OK, ends="done" if stream else None)
            yield Case(f"{how} behind its answer{', streamed' * stream}", "lifecycle", act, expect, reaches="decode")


def taking_nothing() -> Iterator[Case]:
    """A client that takes nothing of what it is given is dropped when its time is over; a slow one is not."""

    async def never(stage: Stage) -> None:
        client = await stage.connect(buffer_bytes=4096)
        await client.send(post(stage.case, STREAM))
        await stage.abandoned(8.0)

    yield Case(
        "a stream is never read",
        "lifecycle",
        never,
        Expect(answers=None),
        decode=LONG,
        within_s=9.0,
        reaches="decode",
        aborts_within_s=1.0,
    )

    for pause_s in (0.5, 2.0):

        async def slow(stage: Stage, pause_s: float = pause_s) -> None:
            client = await stage.connect(buffer_bytes=32_768)
            await client.send(post(stage.case, STREAM))
            await client.read(stage.within_s, bytes_at_least=10_000)
            await asyncio.sleep(pause_s)
            await client.read(stage.within_s)

        script = (sse(*[BIG] * 60, DONE),)
        expect = Expect(OK, ends="done")
        yield Case(f"a stream is not read for {pause_s} s", "lifecycle", slow, expect, decode=script, reaches="decode")

    async def whole_slowly(stage: Stage) -> None:
        client = await stage.connect(buffer_bytes=32_768)
        await client.send(post(stage.case, ASKED))
        await asyncio.sleep(1.0)
        await client.read(stage.within_s)

    yield Case("an answer of 8 MiB is read late", "lifecycle", whole_slowly, Expect(OK), decode=WHOLE, reaches="decode")


def one_connection() -> Iterator[Case]:
    """What one request does to the next on the same connection."""
    rows: dict[str, tuple[Script | None, Script | None, bool, Expect]] = {
        "an answer": (None, None, False, Expect(OK, answers=3)),
        "a stream": (None, None, True, Expect(OK, answers=3, ends="done")),
        "a refusal": (
            (whole(b'{"error":{"message":"no","code":400}}', "400 X"),),
            None,
            False,
            Expect(frozenset((400,)), answers=3),
        ),
        "a bad gateway": ((whole(b"no"),), None, True, Expect(frozenset((502,)), answers=3)),
        "an error event": (None, (sse(EVENT),), True, Expect(OK, answers=3, ends="error")),
        "a document for a stream": (None, (whole(DECODE),), True, Expect(frozenset((502,)), answers=3)),
        "a stream with data behind it": (None, (sse(EVENT, DONE, EVENT),), True, Expect(OK, answers=3, ends="done")),
    }
    for name, (prefill, decode, stream, expect) in rows.items():
        for how in ("one after the other", "at once"):

            async def act(stage: Stage, how: str = how, stream: bool = stream) -> None:
                client = await stage.connect()
                raw = post(stage.case, STREAM if stream else ASKED)
                if how == "at once":
                    await client.send(raw * 3)
                    await client.read(stage.within_s, answers=3)
                    return
                for number in range(3):
                    await client.send(raw)
                    await client.read(stage.within_s, answers=number + 1)

            yield Case(f"{name}, three times {how}", "lifecycle", act, expect, prefill=prefill, decode=decode)

    for stream in (False, True):

        async def act_and_leave(stage: Stage, stream: bool = stream) -> None:
            client = await stage.connect()
            await client.send(post(stage.case, STREAM if stream else ASKED) * 5)
            await stage.at_work("prefill")
            client.reset()

        yield Case(
            f"five at once, and a reset{', streamed' * stream}",
            "lifecycle",
            act_and_leave,
            NOTHING,
            prefill=(HOLD,),
            aborts_within_s=4.0,  # nothing is read while a further request waits, so only time-outs end the first
            reaches="prefill",
        )


def many() -> Iterator[Case]:
    """Twenty connections of one client that does the same on each."""
    for how, leave in (("close", close), ("reset", reset)):
        for name, prefill, decode in (
            ("prefill", (HOLD,), None),
            ("decode", None, (HOLD,)),
            ("a stream", None, EVENTS),
        ):

            async def act(stage: Stage, leave: Leave = leave, prefill: Script | None = prefill) -> None:
                clients = [await stage.connect() for _ in range(20)]
                for client in clients:
                    await client.send(post(stage.case, STREAM))
                await stage.at_work("decode" if prefill is None else "prefill", 20)
                for client in clients:
                    await leave(client, stage)

            yield Case(
                f"twenty {how} during {name}",
                "lifecycle",
                act,
                Expect(answers=None),
                prefill=prefill,
                decode=decode,
                aborts_within_s=1.0,
            )


def paces() -> Iterator[Case]:
    """Requests and answers that are slow, and come to their end."""
    for piece, every_s in ((1, 0.002), (7, 0.01), (100, 0.2)):

        async def act(stage: Stage, piece: int = piece, every_s: float = every_s) -> None:
            client = await stage.connect()
            await client.send(post(stage.case, STREAM), piece=piece, every_s=every_s)
            await client.read(stage.within_s)

        yield Case(f"a request in pieces of {piece}", "lifecycle", act, Expect(OK, ends="done"), reaches="decode")
    for name, script in {
        "prefill takes a second": (Pause(1.0), whole(PREFILL)),
        "prefill's body takes a second": (head("200 OK", f"content-length: {len(PREFILL)}"), Pause(1.0), PREFILL),
    }.items():
        yield Case(name, "lifecycle", _reads(STREAM), Expect(OK, ends="done"), prefill=script, reaches="decode")
    for name, slow in {
        "decode takes a second": (Pause(1.0), sse(EVENT, DONE)),
        "decode pauses between events": (
            EVENTS[0],
            chunk(EVENT),
            Pause(1.0),
            chunk(EVENT),
            Pause(1.0),
            chunk(DONE) + b"0\r\n\r\n",
        ),
        "decode comments while it computes": (
            EVENTS[0],
            Repeat(chunk(b": beat\n\n"), 0.1, 10),
            chunk(EVENT),
            chunk(DONE) + b"0\r\n\r\n",
        ),
    }.items():
        yield Case(name, "lifecycle", _reads(STREAM), Expect(OK, ends="done"), decode=slow, reaches="decode")
    yield Case(
        "decode's answer takes a second",
        "lifecycle",
        _reads(ASKED),
        Expect(OK),
        reaches="decode",
        decode=(chunked(DECODE[:20], end=False), Pause(1.0), chunk(DECODE[20:]) + b"0\r\n\r\n"),
    )


def _reads(body: dict[str, Any]) -> Act:
    async def act(stage: Stage) -> None:
        client = await stage.connect()
        await client.send(post(stage.case, body))
        await client.read(stage.within_s)

    return act


LIFECYCLE: Final[Sequence[Case]] = (
    *leaving(),
    *behind_an_answer(),
    *taking_nothing(),
    *one_connection(),
    *many(),
    *paces(),
)
