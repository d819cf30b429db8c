"""Defines engines that misbehave: the fault, its stage, the role of the engine, and the client's expected answer."""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from tests.system.adversary.cases import ASKED, STREAM, Case, Expect, asks
from tests.system.adversary.engines import (
    CLOSE,
    DONE,
    EVENT,
    GOOD,
    HALF_CLOSE,
    HOLD,
    NIXL,
    READ,
    RESET,
    WELL,
    Pause,
    Repeat,
    Script,
    chunk,
    chunked,
    head,
    sse,
    whole,
)

__all__ = ["UPSTREAM"]

SECRET: Final = b"10.66.66.66"
"""An address that no client may see."""
BROKEN: Final = frozenset((502, 503))
LATE: Final = frozenset((504,))
OK: Final = frozenset((200,))
PREFILL: Final = json.dumps({**GOOD, "kv_transfer_params": NIXL}).encode()
DECODE: Final = json.dumps(GOOD).encode()
PLAIN: Final = head("200 OK", kind="application/json")[:-2]
"""A head without its end."""


class Who(NamedTuple):
    """Whose answer it is, and what its client asked for."""

    name: str
    role: str
    stream: bool


WHO: Final = (Who("prefill", "prefill", False), Who("decode", "decode", False), Who("stream", "decode", True))


def case(name: str, who: Who, script: Script, expect: Expect, within_s: float = 10.0) -> Case:
    return Case(
        f"{who.name}: {name}",
        "upstream",
        asks(STREAM if who.stream else ASKED),
        expect,
        prefill=script if who.role == "prefill" else None,
        decode=script if who.role == "decode" else None,
        within_s=within_s,
        reaches="prefill" if who.role == "prefill" else "decode",
    )


def failing(who: Who, statuses: frozenset[int] = BROKEN, code: str = "failed") -> Expect:
    return Expect(statuses, code=f"{who.role}_({code})", without=(SECRET, b"Traceback"))


def good(who: Who) -> bytes:
    """An answer that is well, with its length or in chunks."""
    if who.stream:
        return sse(EVENT, EVENT, DONE)
    return whole(PREFILL if who.role == "prefill" else DECODE)


def passed(who: Who) -> Expect:
    return Expect(OK, ends="done" if who.stream else None, without=(SECRET,))


# an answer that ends, breaks off or falls silent at each of its stages


def cut_short() -> Iterator[Case]:
    ends: Mapping[str, Script] = {
        "closes": (CLOSE,),
        "resets": (RESET,),
        "hangs": (HOLD,),
        "half closes": (HALF_CLOSE,),
    }
    for who in WHO:
        answer = good(who)
        body = answer.index(b"\r\n\r\n") + 4
        stages = {
            "at once": 0,
            "in its status line": 10,
            "after its status line": answer.index(b"\r\n") + 2,
            "in a header": 30,
            "before its body": body,
            "at its first byte": body + 1,
            "in its body": body + (len(answer) - body) // 2,
            "before its last byte": len(answer) - 1,
        }
        for stage, at in stages.items():
            for end, steps in ends.items():
                silent = end == "hangs"
                begun = who.stream and at > body + len(chunk(EVENT))
                expect = failing(who, LATE if silent else BROKEN, "timeout" if silent else "failed")
                if begun and stage == "before its last byte":  # of the last chunk: the client has [DONE]
                    expect = passed(who)
                elif begun:
                    expect = Expect(OK, code=expect.code, ends="error")
                yield case(f"{end} {stage}", who, (answer[:at], *steps), expect)


def trickling() -> Iterator[Case]:
    """One byte, or one line, at a time: never silent, and never an answer."""
    for who in WHO:
        rows: dict[str, tuple[bytes, bytes]] = {
            "bytes before a head": (b"", b"H"),
            "a status line": (b"HTTP/1.1 200 ", b"O"),
            "a header": (b"HTTP/1.1 200 OK\r\nx: ", b"y"),
            "headers": (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n"),
            "100 Continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
            "a body": (head("200 OK", "content-length: 100000"), b" "),
            "chunks": (head("200 OK", "transfer-encoding: chunked"), b"1\r\n \r\n"),
            "a chunk's extension": (head("200 OK", "transfer-encoding: chunked") + b"1;x=", b"y"),
        }
        for name, (before, beat) in rows.items():
            broken = name == "bytes before a head"
            expect = failing(who, BROKEN if broken else LATE, "failed" if broken else "timeout")
            yield case(f"{name} that trickles", who, (before, Repeat(beat)), expect)


# HTTP that is none


def framing() -> Iterator[Case]:
    json_head = PLAIN
    rows: dict[str, Script] = {
        "SSH": (b"SSH-2.0-OpenSSH_9\r\n\r\n",),
        "HTTP/0.9": (b"<html></html>", CLOSE),
        "an HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",),
        "every byte": (bytes(range(256)) * 4,),
        "zeros": (bytes(4096),),
        "a request": (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",),
        "a negative length": (json_head + b"content-length: -5\r\n\r\n{}",),
        "a length of letters": (json_head + b"content-length: abc\r\n\r\n{}",),
        "a huge length": (json_head + b"content-length: 99999999999999999999\r\n\r\n{}",),
        "two lengths": (json_head + b"content-length: 5\r\ncontent-length: 9\r\n\r\n{}",),
        "a length and chunks": (json_head + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",),
        "a chunk's size of letters": (head("200 OK", "transfer-encoding: chunked") + b"zz\r\n{}\r\n0\r\n\r\n",),
        "a negative chunk": (head("200 OK", "transfer-encoding: chunked") + b"-2\r\n{}\r\n0\r\n\r\n",),
        "a huge chunk": (head("200 OK", "transfer-encoding: chunked") + b"ffffffffffffffffff\r\n{}",),
        "a chunk without its end": (head("200 OK", "transfer-encoding: chunked") + b"2\r\n{}5\r\nabcde\r\n0\r\n\r\n",),
        "an empty first line": (b"\r\n" * 200_000,),
        "a header without a colon": (json_head + b"nothing\r\ncontent-length: 2\r\n\r\n{}",),
        "a header without a name": (json_head + b": x\r\ncontent-length: 2\r\n\r\n{}",),
        "a NUL in a header": (json_head + b"x: a\0b\r\ncontent-length: 2\r\n\r\n{}",),
        "an endless header": (json_head + b"x: " + b"a" * 300_000 + b"\r\n\r\n",),
        "many headers": (json_head + b"".join(b"x-%d: y\r\n" % n for n in range(20_000)) + b"\r\n",),
        "a long head in one read": (json_head + b"x: %b\r\ncontent-length: 2\r\n\r\n{}" % (b"a" * 70_000),),
        "endless 100 Continue": (b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000,),
        "switching protocols": (
            b"HTTP/1.1 101 X\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\nPRI * HTTP/2.0\r\n\r\n",
        ),
        "status 0": (b"HTTP/1.1 0 X\r\ncontent-length: 0\r\n\r\n",),
        "status 99": (b"HTTP/1.1 099 X\r\ncontent-length: 0\r\n\r\n", HOLD),
        "status 1000": (b"HTTP/1.1 1000 X\r\ncontent-length: 0\r\n\r\n",),
        "no status": (b"HTTP/1.1\r\ncontent-length: 0\r\n\r\n",),
        "HTTP/9.9": (b"HTTP/9.9 200 OK\r\ncontent-length: 0\r\n\r\n",),
        "chunks, then garbage": (chunked(b"{", end=False) + b"garbage\r\n",),
        "endless trailers": (chunked(b"{}", end=False) + b"0\r\n", Repeat(b"x: " + b"y" * 8000 + b"\r\n", 0.0)),
    }
    for who in WHO:
        for name, script in rows.items():
            late = name == "status 99"
            yield case(name, who, script, failing(who, BROKEN | LATE if late else BROKEN, "failed|timeout"))


def framings_that_are_right() -> Iterator[Case]:
    """The control: HTTP/1.1 allows all of these."""
    for who in WHO:
        answer = good(who)
        start, body = answer.split(b"\r\n\r\n", 1)
        plain = DECODE if who.role == "decode" else PREFILL
        kind = b"text/event-stream" if who.stream else b"application/json"
        content = EVENT + DONE if who.stream else plain
        closing = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n" % kind
        rows: dict[str, Script] = {
            "100 Continue first": (b"HTTP/1.1 100 Continue\r\n\r\n", answer),
            "103 Early Hints first": (b"HTTP/1.1 103 X\r\nlink: x\r\n\r\n", answer),
            "byte by byte": (*(answer[at : at + 1] for at in range(len(answer))),),
            "its head in capitals": (
                start.upper().replace(b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK") + b"\r\n\r\n" + body,
            )
            if not who.stream
            else (answer,),
            "no reason": (answer.replace(b"200 OK", b"200", 1),),
            "a strange reason": (answer.replace(b"200 OK", b"200 N\xc3\xb6 / 500 <b>", 1),),
            "HTTP/1.0": (b"HTTP/1.0 200 OK\r\ncontent-type: %b\r\n\r\n" % kind + content, CLOSE),
            "ended by close": (closing + b"connection: close\r\n\r\n" + content, CLOSE),
            "chunks of one byte": (
                closing + b"transfer-encoding: chunked\r\n\r\n",
                b"".join(chunk(bytes((byte,))) for byte in content) + b"0\r\n\r\n",
            ),
            "a trailer": (closing + b"transfer-encoding: chunked\r\n\r\n" + chunk(content) + b"0\r\nx: y\r\n\r\n",),
            "an extension": (
                closing + b"transfer-encoding: chunked\r\n\r\n%x;a=b\r\n%b\r\n0\r\n\r\n" % (len(content), content),
            ),
            "before the body is read": (answer, READ),
            "a slow reader": (Pause(0.3), READ, answer),
            "set-cookie and locations": (
                answer.replace(
                    b"\r\n", b"\r\nset-cookie: a=%b\r\nlocation: http://%b/\r\nserver: x\r\n" % (SECRET, SECRET), 1
                ),
            ),
            "two answers": (answer + whole(b'{"choices":[{"text":"10.66.66.66"}]}'),),
            "another answer later": (answer, Pause(0.2), whole(b'{"choices":[{"text":"10.66.66.66"}]}')),
            "bytes behind the answer": (answer + b"garbage",),
            "an end in a reset": (answer, RESET),
            "an end in a close": (answer, CLOSE),
        }
        for name, script in rows.items():
            yield replace(case(name, who, script, passed(who)), alone=name == "another answer later")


# content


def contents() -> Iterator[Case]:
    bad: dict[str, bytes] = {
        "nothing": b"",
        "no JSON": b"<html>Traceback 10.66.66.66</html>",
        "half of it": DECODE[:-5],
        "more than one": DECODE + DECODE,
        "a list": b"[1,2]",
        "a number": b"7",
        "null": b"null",
        "a string": b'"x"',
        "NaN": DECODE[:-1] + b',"x":NaN}',
        "Infinity": DECODE[:-1] + b',"x":-Infinity}',
        "a byte order mark": b"\xef\xbb\xbf" + DECODE,
        "UTF-16": DECODE.decode().encode("utf-16"),
        "bad UTF-8": DECODE.replace(b'"x"', b'"\xff\xfe"'),
        "deep lists": b'{"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "a control character": DECODE.replace(b'"x"', b'"\x01"'),
        "single quotes": DECODE.replace(b'"', b"'"),
    }
    for who in WHO[:2]:
        for name, body in bad.items():
            yield case(f"{name} for JSON", who, (whole(body),), failing(who))
        many = b'{"choices":[' + b"[]," * 200_000 + b"0]}"
        yield case("many members", who, (whole(many),), Expect(BROKEN), within_s=20.0)
    errors: dict[str, tuple[Any, frozenset[int]]] = {
        "an error without a code": ({"error": {"message": "it failed at 10.66.66.66"}}, frozenset((502,))),
        "an error with code 400": ({"error": {"message": "too long", "code": 400}}, frozenset((400,))),
        "an error with code 500": ({"error": {"message": "Traceback", "code": 500}}, frozenset((502,))),
        "an error that is text": ({"error": "it failed at 10.66.66.66"}, frozenset((502,))),
        "an error of old": ({"object": "error", "message": "it failed", "code": 40303}, frozenset((502,))),
        "an error beside choices": ({**GOOD, "error": {"message": "aborted"}}, frozenset((502,))),
    }
    for who in WHO:
        for name, (document, statuses) in errors.items():
            yield case(
                f"{name} with 200", who, (whole(json.dumps(document).encode()),), Expect(statuses, without=(SECRET,))
            )
    choices: dict[str, Any] = {
        "no choices": {},
        "null choices": {"choices": None},
        "empty choices": {"choices": []},
        "empty choice": {"choices": [{}]},
        "choices of text": {"choices": ["x"]},
        "an object of choices": {"choices": {"0": {}}},
    }
    for name, document in choices.items():
        raw = json.dumps({**{key: value for key, value in GOOD.items() if key != "choices"}, **document}).encode()
        yield case(name, WHO[1], (whole(raw),), failing(WHO[1]))
    private = {
        **GOOD,
        "kv_transfer_params": {"remote_host": "10.66.66.66"},
        "nvext": {"worker_id": {"at": "10.66.66.66"}},
    }
    private |= {"id": "cmpl-10.66.66.66:8000", "system_fingerprint": "10.66.66.66"}
    yield case("addresses", WHO[1], (whole(json.dumps(private).encode()),), passed(WHO[1]))
    for name, lines, body in (
        ("gzip", ("content-encoding: gzip",), gzip.compress(DECODE)),
        ("gzip that is none", ("content-encoding: gzip",), b"\x1f\x8b" + b"\0" * 100),
        ("a bomb", ("content-encoding: gzip",), gzip.compress(b" " * (64 << 20))),
    ):
        for who in WHO:
            yield case(name, who, (whole(body, "200 OK", *lines),), failing(who))
    for kind in ("text/html", "text/event-stream", "application/x-ndjson", None):
        yield case(f"JSON as {kind}", WHO[1], (whole(DECODE, kind=kind),), passed(WHO[1]))


def handoffs() -> Iterator[Case]:
    """What prefill says of its KV: a decode engine is told nothing that it must not be."""
    bad: dict[str, Any] = {
        "null": None,
        "a list": [],
        "a text": "x",
        "a number": 7,
        "empty": {},
        "without a host": {key: value for key, value in NIXL.items() if key != "remote_host"},
        "of another host": {**NIXL, "remote_host": "10.66.66.66"},
        "of a host that is a list": {**NIXL, "remote_host": ["127.0.0.1"]},
        "of no port": {**NIXL, "remote_port": 0},
        "of a port that is text": {**NIXL, "remote_port": "x"},
        "of a huge port": {**NIXL, "remote_port": 1 << 70},
        "of deep blocks": {**NIXL, "remote_block_ids": [[[[[1]]]]]},
        "that steer": {**NIXL, "do_remote_prefill": "yes", "remote_url": "http://10.66.66.66/"},
    }
    who = WHO[0]
    for stream in (False, True):
        for name, params in bad.items():
            raw = json.dumps({**GOOD, "kv_transfer_params": params}).encode()
            expect = Expect(frozenset((200, 502)), without=(SECRET,))
            yield Case(
                f"KV params: {name}{', streamed' * stream}",
                "upstream",
                asks(STREAM if stream else ASKED),
                expect,
                prefill=(whole(raw),),
                reaches="prefill",
            )
    raw = json.dumps(GOOD).encode()
    yield case("no KV params", who, (whole(raw),), Expect(frozenset((200, 502))))
    doubled = PREFILL[:-1] + b',"kv_transfer_params":{"remote_host":"10.66.66.66"}}'
    yield case("KV params twice", who, (whole(doubled),), Expect(frozenset((200, 502)), without=(SECRET,)))


# refusals


def statuses() -> Iterator[Case]:
    openai = b'{"error":{"message":"prompt is too long","type":"BadRequestError","param":"prompt","code":400}}'
    bodies: dict[str, bytes] = {
        "an error": openai,
        "HTML": b"<html>Traceback (most recent call last) 10.66.66.66</html>",
        "nothing": b"",
        "a huge error": b'{"error":{"message":"%b"}}' % (b"10.66.66.66 " * 100_000),
        "a hostile error": b'{"error":{"message":{"a":["10.66.66.66"]},"type":7,"param":["x"],"code":{"a":1}}}',
        "a bomb": b'{"error":' + b"[" * 300_000 + b"]" * 300_000 + b"}",
    }
    passing = (400, 404, 408, 409, 413, 422)
    for who in WHO:
        for status in passing:
            for name in ("an error", "HTML"):
                expect = Expect(frozenset((status,)), without=(SECRET, b"Traceback"))
                yield case(f"{status} with {name}", who, (whole(bodies[name], f"{status} X"),), expect)
        for name in ("nothing", "a huge error", "a hostile error", "a bomb"):
            expect = Expect(frozenset((400,)), without=(SECRET, b"Traceback"))
            yield case(f"400 with {name}", who, (whole(bodies[name], "400 X"),), expect)
        for status in (401, 403):  # the proxy has no credentials of its own to be wrong: they are the client's
            yield case(
                f"{status}",
                who,
                (whole(openai, f"{status} X"),),
                Expect(frozenset((502,)), code=f"{who.role}_unauthorized"),
            )
        for status in (500, 501, 502, 504, 507, 599):
            yield case(f"{status}", who, (whole(bodies["HTML"], f"{status} X"),), failing(who, frozenset((502,))))
        for status in (204, 205, 206, 300, 301, 304, 307):
            script = (b"HTTP/1.1 %d X\r\nlocation: http://10.66.66.66/\r\ncontent-length: 0\r\n\r\n" % status,)
            yield case(f"{status}", who, script, failing(who, frozenset((502,))))
        for status in (204, 304):  # no body, whatever the framing says
            script = (b"HTTP/1.1 %d X\r\ntransfer-encoding: chunked\r\n\r\n" % status,)
            yield case(f"{status}, chunked", who, script, failing(who, frozenset((502,))))
        for status in (429, 503):
            for after in ("", "1", "0", "-5", "1e9", "999999999999", "Wed, 21 Oct 2026 07:28:00 GMT", "x" * 1000):
                lines = (f"retry-after: {after}",) if after else ()
                expect = Expect(frozenset((status,)), without=(SECRET,))
                said = f"Retry-After {after[:20]}" if after else "no Retry-After"
                yield case(f"{status}, {said}", who, (whole(openai, f"{status} X", *lines),), expect)


# streams


def streams() -> Iterator[Case]:
    who = WHO[2]
    late = failing(who, LATE, "timeout")
    broken = failing(who)
    given_up = failing(who, BROKEN | LATE, "failed|timeout")  # whichever limit is reached first
    midway = Expect(OK, code="decode_failed", ends="error", without=(SECRET,))
    midway_late = Expect(OK, code="decode_timeout", ends="error")
    done = Expect(OK, ends="done", without=(SECRET, b"BEHIND"))
    error = b'data: {"error":{"message":"it failed at 10.66.66.66","code":500}}\n\n'
    crlf = EVENT.replace(b"\n", b"\r\n")
    behind = b'data: {"choices":[{"index":0,"text":"BEHIND"}]}\n\n'
    start = head("200 OK", "transfer-encoding: chunked", kind="text/event-stream")
    fill = b'data: {"choices":[{"index":0,"text":"%b"}]}\n\n'
    long = fill % (b"y" * (1000 << 10))
    beats: dict[str, bytes] = {
        "comments": b": beat\n\n",
        "empty events": b"data:\n\n",
        "events without data": b"event: ping\nid: 7\nretry: 1\n\n",
        "blank lines": b"\r\n",
        "empty objects": b"data: {}\n\n",
        "empty choices": b'data: {"choices":[]}\n\n',
        "an event that never ends": b"data: x",
    }
    for name, beat in beats.items():
        yield case(f"only {name}", who, (start, Repeat(chunk(beat))), late)
        yield case(f"{name} midway", who, (start + chunk(EVENT), Repeat(chunk(beat))), midway_late)
        flood = chunk(beat * (200_000 // len(beat)))
        yield case(
            f"a flood of {name}", who, (start, Repeat(flood, 0.0)), failing(who, BROKEN | LATE, "failed|timeout")
        )
    rows: dict[str, tuple[Script, Expect]] = {
        "no event": ((sse(),), broken),
        "only [DONE]": ((sse(DONE),), broken),
        "no [DONE]": ((sse(EVENT, EVENT),), midway),
        "no blank line at the end": ((sse(EVENT, DONE[:-1]),), done),
        "no line end at the end": ((sse(EVENT, DONE[:-2]),), done),
        "CR LF": ((sse(crlf, crlf, DONE.replace(b"\n", b"\r\n")),), done),
        "CR": ((sse(EVENT.replace(b"\n", b"\r"), DONE.replace(b"\n", b"\r")),), broken),
        "a byte order mark": ((sse(b"\xef\xbb\xbf" + EVENT, DONE),), done),
        "no space behind data": ((sse(EVENT.replace(b"data: ", b"data:"), b"data:[DONE]\n\n"),), done),
        "one byte at a time": ((start, *(chunk(bytes((byte,))) for byte in EVENT + DONE), b"0\r\n\r\n"), done),
        "events over two chunks": ((sse(EVENT[:20], EVENT[20:] + EVENT[:20], EVENT[20:], DONE),), done),
        "events in one chunk": ((sse(EVENT * 500 + DONE),), done),
        "JSON over many lines": (
            (sse(b'data: {"choices":\ndata: [{"index":0,\ndata: "text":"x"}]}\n\n', DONE),),
            done,
        ),
        "an error first": ((sse(error),), failing(who, frozenset((502,)))),
        "an error midway": ((sse(EVENT, error, DONE),), midway),
        "an error and [DONE]": ((sse(error, DONE),), failing(who, frozenset((502,)))),
        "an error of 400 first": (
            (sse(b'data: {"error":{"message":"bad","code":400}}\n\n'),),
            Expect(frozenset((400,))),
        ),
        "half an event at the end": ((sse(EVENT, EVENT[:30]),), midway),
        "half an event first": ((sse(EVENT[:30]),), broken),
        "no JSON first": ((sse(b"data: {nonsense\n\n", EVENT, DONE),), broken),
        "no JSON midway": ((sse(EVENT, b"data: {nonsense\n\n", DONE),), Expect(OK)),
        "bad UTF-8": ((sse(b'data: {"choices":[{"text":"\xff"}]}\n\n', DONE),), broken),
        "NaN": ((sse(b'data: {"choices":[{"logprob":NaN}]}\n\n', DONE),), broken),
        "choices that are text": ((sse(b'data: {"choices":["x"]}\n\n', DONE),), Expect(frozenset((200, 502)))),
        "addresses": (
            (
                sse(
                    b'data: {"id":"cmpl-10.66.66.66:1","kv_transfer_params":{"remote_host":"10.66.66.66"},'
                    b'"choices":[{"text":"x"}]}\n\n',
                    b'data: {"id":"x","choices":[{"text":"x","remote_host":"10.66.66.66"}]}\n\n',
                    DONE,
                ),
            ),
            done,
        ),
        "data behind [DONE]": ((sse(EVENT, DONE, behind),), done),
        "data behind [DONE], at once": ((sse(EVENT + DONE + behind),), done),
        "data behind [DONE], for ever": ((start + chunk(EVENT + DONE), Repeat(chunk(behind))), done),
        "an error behind [DONE]": ((sse(EVENT + DONE + error),), done),
        "[DONE] and no end": ((start + chunk(EVENT + DONE), HOLD), done),
        "[DONE] and blank lines": ((start + chunk(EVENT + DONE), Repeat(chunk(b"\n"))), done),
        "[DONE] and a close": ((start + chunk(EVENT + DONE), CLOSE), done),
        "[DONE] and a reset": ((start + chunk(EVENT + DONE), Pause(0.2), RESET), done),
        "[DONE] and garbage": ((start + chunk(EVENT + DONE) + b"zz\r\n",), done),
        "[DONE] twice": ((sse(EVENT, DONE, DONE),), done),
        "an event of 1,000 KiB": ((sse(long, DONE),), done),
        "an event of 1,000 KiB in small pieces": (
            (
                start,
                *(chunk(long[at : at + 60_000]) for at in range(0, len(long), 60_000)),
                chunk(DONE) + b"0\r\n\r\n",
            ),
            done,
        ),
        "an event of 2 MiB": ((sse(fill % (b"y" * (2 << 20)), DONE),), given_up),
        "an event of 20 MiB": ((sse(fill % (b"y" * (20 << 20)), DONE),), given_up),
        "an event of 20 MiB midway": (
            (sse(EVENT, fill % (b"y" * (20 << 20)), DONE),),
            Expect(OK, code="decode_(failed|timeout)", ends="error"),
        ),
        "an event without end": ((start + b"ffffffff\r\n", Repeat(b"y" * 100_000, 0.0)), given_up),
        "an event of many parts": ((sse(b'data: {"choices":[{"x":[%b0]}]}\n\n' % (b"[]," * 500_000), DONE),), broken),
        "many events that must be looked at": (
            (sse(EVENT, b'data: {"error":0}\n\n' * 13_000, DONE),),
            Expect(OK | BROKEN),
        ),
        "many events": ((sse(EVENT, *[EVENT * 2000] * 5, DONE),), done),
        "only roles": (
            (start, Repeat(chunk(b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'))),
            midway_late,
        ),
        "a document": ((whole(DECODE),), broken),
        "an error document": ((whole(b'{"error":{"message":"too long","code":400}}'),), Expect(frozenset((400,)))),
        "events as JSON": ((chunked(EVENT, DONE),), broken),
        "events as text/plain": ((sse(EVENT, DONE, kind="text/plain"),), broken),
        "a type in capitals": ((sse(EVENT, DONE, kind="TEXT/Event-Stream"),), done),
        "a reset midway": ((start + chunk(EVENT), Pause(0.2), RESET), midway),
        "silence midway": ((start + chunk(EVENT), HOLD), midway_late),
        "a stream with a length": ((whole(EVENT + DONE, kind="text/event-stream"),), done),
        "a stream with too long a length": (
            (head("200 OK", "content-length: 100000", kind="text/event-stream") + EVENT, Pause(0.2), CLOSE),
            midway,
        ),
        "slow, but never silent": (
            (start, *(step for _ in range(4) for step in (chunk(EVENT), Pause(0.7))), chunk(DONE) + b"0\r\n\r\n"),
            done,
        ),
    }
    for name, (script, expect) in rows.items():
        yield case(name, who, script, expect)


def reading() -> Iterator[Case]:
    """Engines that do not read what they are sent."""
    big = {**ASKED, "prompt": "x" * (4 << 20)}
    for name, script, expect in (
        ("never reads", (HOLD, READ), failing(WHO[0], LATE, "timeout")),
        ("reads late", (Pause(0.5), READ, WELL), Expect(OK)),
        ("answers before it reads", (whole(PREFILL), READ), Expect(OK)),
        ("refuses before it reads, and closes", (whole(b"", "413 X"), CLOSE, READ), Expect(frozenset((413, 502)))),
        ("closes before it reads", (CLOSE, READ), failing(WHO[0])),
        ("resets before it reads", (RESET, READ), failing(WHO[0])),
    ):
        yield Case(f"4 MiB: {name}", "upstream", asks(big), expect, prefill=script, reaches="prefill")


UPSTREAM: Final[Sequence[Case]] = (
    *cut_short(),
    *trickling(),
    *framing(),
    *framings_that_are_right(),
    *contents(),
    *handoffs(),
    *statuses(),
    *streams(),
    *reading(),
)
