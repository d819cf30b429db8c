"""Defines malformed HTTP/1.1 requests, and how the proxy must answer.

Sources: RFC 9110 and RFC 9112; the sections are named beside the tables.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from tests.system.adversary.cases import ASKED, Act, Case, Expect, Stage
from tests.system.adversary.clients import post
from tests.system.adversary.engines import trace_of

__all__ = ["edge_cases"]

BODY: Final = b'{"model":"stub","prompt":"x","max_tokens":4}'
PATH: Final = "/v1/completions"
KIB: Final = 1024
NOBODY: Final = "nobody"
Part = bytes | Callable[[int], bytes]
"""What is sent: bytes, or made from the number of the case."""


def head(case: int, *lines: str, start: str = f"POST {PATH} HTTP/1.1", host: str | None = "host: proxy") -> bytes:
    """Returns the head of a request that names its case; `lines` are its other headers."""
    given = (start, *(() if host is None else (host,)), f"traceparent: {trace_of(case)}", *lines)
    return "\r\n".join(given).encode("latin-1") + b"\r\n\r\n"


def typed(case: int, *lines: str, length: int | None = len(BODY), start: str = f"POST {PATH} HTTP/1.1") -> bytes:
    """Returns the head of a JSON request; `length` is its Content-Length, None for none."""
    framing = () if length is None else (f"content-length: {length}",)
    return head(case, "content-type: application/json", *framing, *lines, start=start)


def sends(*parts: Part, answers: int = 1, piece: int | None = None, every_s: float = 0.0, wait_s: float = 0.0) -> Act:
    """Returns a client that sends `parts` one after the other, each bytes or made from the case's number, and reads.

    `wait_s` goes by between the parts, so that each comes in a packet of its own.
    """

    async def act(stage: Stage) -> None:
        client = await stage.connect()
        for number, part in enumerate(parts):
            if number and wait_s:
                await client.read(wait_s, answers=answers)
            data = part if isinstance(part, bytes) else part(stage.case)
            await client.send(data, piece=piece, every_s=every_s)
        await client.read(stage.within_s - 1, answers=answers)
        await client.read(0.3, answers=answers + 1)  # neither a further answer nor the connection's end is missed

    return act


def refused(name: str, act: Act, *statuses: int, within_s: float = 5.0, answers: int | None = 1) -> Case:
    """Returns a case that is answered with one of `statuses` and reaches no engine, after which the connection ends."""
    expect = Expect(frozenset(statuses), answers=answers, closed=True)
    return Case(f"edge: {name}", "edge", act, expect, within_s=within_s, reaches=NOBODY)


def declined(name: str, act: Act, *statuses: int) -> Case:
    """Returns a case that is refused as by `refused`; what was read completely need not end the connection."""
    return replace(refused(name, act, *statuses), expect=Expect(frozenset(statuses)))


def served(name: str, act: Act, *, answers: int = 1, within_s: float = 10.0, ends: bool = False) -> Case:
    """Returns a case that is answered 200 by engines."""
    expect = Expect(frozenset((200,)), answers=answers, ends="done" if ends else None)
    return Case(f"edge: {name}", "edge", act, expect, within_s=within_s, reaches="decode")


def answered(name: str, act: Act, status: int, *, answers: int = 1) -> Case:
    """Returns a case that is answered by the proxy itself."""
    expect = Expect(frozenset((status,)), answers=answers)
    return Case(f"edge: {name}", "edge", act, expect, within_s=5.0, reaches=NOBODY)


def edge_cases() -> list[Case]:
    """Returns all of them."""
    return [
        *_start_lines(),
        *_hosts(),
        *_framing(),
        *_lengths(),
        *_expectations(),
        *_upgrades(),
        *_sizes(),
        *_chunks(),
        *_types(),
        *_pipelines(),
        *_paths(),
        *_paces(),
    ]


def _start_lines() -> Iterator[Case]:
    """RFC 9112, section 3."""
    for version in (
        "HTTP/2.0",
        "HTTP/3.0",
        "HTTP/0.9",
        "HTTP/1.2",
        "HTTP/9.9",
        "HTTP/1",
        "HTTP/1.10",
        "http/1.1",
        "HTTX/1.1",
    ):
        start = f"POST {PATH} {version}"
        yield refused(f"version {version}", sends(lambda n, s=start: typed(n, start=s) + BODY), 400, 505)
    for start in (
        f"POST\t{PATH}\tHTTP/1.1",
        f"POST {PATH} HTTP/1.1 x",
        f"POST {PATH} x HTTP/1.1",
        f" POST {PATH} HTTP/1.1",
        f"PO ST {PATH} HTTP/1.1",
        f"PÖST {PATH} HTTP/1.1",
        f"post {PATH} HTTP/1.1",
        f"POST{PATH} HTTP/1.1",
        f"POST {PATH}\0 HTTP/1.1",
        f"POST {PATH}",
        "POST HTTP/1.1",
        "GET",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "PRI * HTTP/2.0\r\n\r\nSM",
        "CONNECT engine:8000 HTTP/1.1",
        "CONNECT proxy:80 HTTP/1.1",
        "EHLO proxy",
        "*1\r\n$4\r\nPING",
    ):
        act = sends(lambda n, s=start: typed(n, start=s) + BODY)
        yield refused(f"start line {start[:40]!r}", act, 400, 404, 405, 505)
    absolute = f"POST http://proxy{PATH} HTTP/1.1"
    yield served("an absolute target", sends(lambda n: typed(n, start=absolute) + BODY))
    yield served("a target with a query", sends(lambda n: typed(n, start=f"POST {PATH}?x=1 HTTP/1.1") + BODY))
    yield served("two spaces", sends(lambda n: typed(n, start=f"POST  {PATH} HTTP/1.1") + BODY))
    yield served("empty lines before the request", sends(lambda n: b"\r\n\r\n" + typed(n) + BODY))
    old = f"POST {PATH} HTTP/1.0"
    yield served("HTTP/1.0", sends(lambda n: typed(n, start=old) + BODY))
    yield served(
        "HTTP/1.0 without a host", sends(lambda n: typed(n, start=old).replace(b"host: proxy\r\n", b"") + BODY)
    )


def _hosts() -> Iterator[Case]:
    """RFC 9112, section 3.2: no Host header, several and an invalid one are answered 400."""

    def given(*hosts: str) -> Act:
        lines = ("content-type: application/json", f"content-length: {len(BODY)}", *(f"host: {each}" for each in hosts))
        return sends(lambda n: head(n, *lines, host=None) + BODY)

    yield refused("no host", given(), 400)
    for hosts in (("a", "a"), ("a", "b"), ("a", ""), ("", ""), ("a", "b", "c")):
        yield refused(f"hosts {hosts}", given(*hosts), 400)
    for bad in (
        "a b",
        "a/b",
        "http://a",
        "a@b",
        "<x>",
        "[::1",
        "::1]",
        "a:b",
        "a:80:80",
        "a?b",
        "a#b",
        'a"b',
        "a\\b",
        "a,b c",
        "é",
    ):
        yield refused(f"host {bad!r}", given(bad), 400)
    for good in ("proxy", "proxy:8100", "127.0.0.1", "[::1]:8100", "", "a.b-c_d~e", "xn--bcher-kva.example:1"):
        yield served(f"host {good!r}", given(good))


def _framing() -> Iterator[Case]:
    """RFC 9112, section 6.1: what is not exactly `chunked` is not understood, and never guessed at."""
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    for coding in (
        "gzip, chunked",
        "chunked, gzip",
        "chunked, chunked",
        "identity",
        "xchunked",
        "chunkedx",
        "chunked;q=1",
        "deflate",
        ", chunked",
        "chunked,",
        '"chunked"',
        "chunked\x0b",
        "\x0bchunked",
    ):
        act = sends(lambda n, c=coding: typed(n, f"transfer-encoding: {c}", length=None) + chunked)
        yield refused(f"transfer-encoding {coding!r}", act, 400, 501)
    doubled = ("transfer-encoding: chunked", "transfer-encoding: gzip")
    yield refused("two transfer-encodings", sends(lambda n: typed(n, *doubled, length=None) + chunked), 400, 501)
    yield refused(
        "two transfer-encodings, turned", sends(lambda n: typed(n, *doubled[::-1], length=None) + chunked), 400, 501
    )
    both = ("transfer-encoding: chunked",)
    yield refused("length and chunks", sends(lambda n: typed(n, *both, length=6) + chunked), 400)
    yield refused("length of all and chunks", sends(lambda n: typed(n, *both) + chunked), 400)
    yield refused(
        "chunks in HTTP/1.0",
        sends(lambda n: typed(n, *both, length=None, start=f"POST {PATH} HTTP/1.0") + chunked),
        400,
    )
    for line in (
        "transfer-encoding : chunked",
        " transfer-encoding: chunked",
        "transfer-encoding: chunked\r\n folded",
        "transfer\x00-encoding: chunked",
        ": x",
        "x\x01: y",
        "no colon",
        "x: \x00",
        "x: a\rb",
    ):
        act = sends(lambda n, given=line: typed(n, given, length=None) + chunked)
        yield refused(f"header {line!r}", act, 400, 501)
    for good in ("chunked", "Chunked", "CHUNKED", " chunked "):
        yield served(
            f"transfer-encoding {good!r}",
            sends(lambda n, c=good: typed(n, f"transfer-encoding: {c}", length=None) + chunked),
        )
    # Classic smuggling: what one reader takes for the body, another takes for a request.
    inner = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
    yield refused("smuggled behind chunks", sends(lambda n: typed(n, *both, length=4) + b"0\r\n\r\n" + inner), 400)
    yield refused("smuggled behind a length", sends(lambda n: typed(n, "content-length: 0") + inner), 400)


def _lengths() -> Iterator[Case]:
    """RFC 9112, section 6.3."""
    for bad in (
        "-1",
        "+5",
        "0x10",
        "5 5",
        "5, 5",
        "5,6",
        "1e3",
        "",
        "five",
        "18446744073709551616",
        "9" * 40,
        "5;",
        "5.0",
    ):
        lines = ("content-type: application/json", f"content-length: {bad}")
        yield refused(f"content-length {bad!r}", sends(lambda n, given=lines: head(n, *given) + BODY), 400, 413)
    for two in (("44", "45"), ("44", "44"), ("0", "44")):
        lines = ("content-type: application/json", *(f"content-length: {each}" for each in two))
        yield refused(f"content-lengths {two}", sends(lambda n, given=lines: head(n, *given) + BODY), 400)
    for length in (16 * KIB * KIB + 1, 99_000_000, 1 << 40, (1 << 63) - 1):
        yield refused(
            f"a body of {length}, refused at its head", sends(lambda n, size=length: typed(n, length=size)), 413
        )
        expecting = sends(lambda n, size=length: typed(n, "expect: 100-continue", length=size))
        yield refused(f"a body of {length} that waits for 100", expecting, 413)
    yield answered("an empty body", sends(lambda n: typed(n, length=0)), 400)
    yield answered("no length", sends(lambda n: typed(n, length=None)), 400)


def _expectations() -> Iterator[Case]:
    """RFC 9110, section 10.1.1."""
    yield served("100-continue, sent at once", sends(lambda n: typed(n, "expect: 100-continue") + BODY))
    yield served("100-continue, waited for", sends(lambda n: typed(n, "Expect: 100-Continue"), BODY, wait_s=0.2))
    for other in ("200-ok", "100-continue, 200-ok", "x"):
        yield refused(f"expect {other}", sends(lambda n, e=other: typed(n, f"expect: {e}") + BODY), 417)


def _upgrades() -> Iterator[Case]:
    """RFC 9110, section 7.8: an upgrade may be ignored; the body is then the request's own."""
    for protocol in ("h2c", "websocket", "TLS/1.0", "h2c, websocket", "foo"):
        lines = (
            "connection: Upgrade, HTTP2-Settings",
            f"upgrade: {protocol}",
            "http2-settings: AAMAAABkAARAAAAAAAIAAAAA",
        )
        for how, act in (
            ("in one packet", sends(lambda n, given=lines: typed(n, *given) + BODY)),
            ("in two", sends(lambda n, given=lines: typed(n, *given), BODY, wait_s=0.1)),
            ("byte by byte", sends(lambda n, given=lines: typed(n, *given) + BODY, piece=7)),
        ):
            yield served(f"upgrade {protocol}, body {how}", act)
    lines = ("connection: upgrade", "upgrade: h2c")
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    yield served(
        "upgrade and chunks",
        sends(lambda n: typed(n, *lines, "transfer-encoding: chunked", length=None), chunked, wait_s=0.1),
    )
    yield served(
        "upgrade and 100-continue", sends(lambda n: typed(n, *lines, "expect: 100-continue"), BODY, wait_s=0.1)
    )
    yield served("upgrade on a kept connection", sends(lambda n: (typed(n, *lines) + BODY) * 3, answers=3), answers=3)
    yield served("upgrade without connection", sends(lambda n: typed(n, "upgrade: h2c") + BODY))
    yield served("connection without upgrade", sends(lambda n: typed(n, "connection: upgrade") + BODY))
    yield served(
        "connection: close, upgrade", sends(lambda n: typed(n, "connection: close, upgrade", "upgrade: h2c") + BODY)
    )
    inner = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 44\r\n\r\n"
        + BODY
    )
    hidden = sends(lambda n: typed(n, *lines, length=len(inner)), inner, wait_s=0.1)
    expect = Expect(frozenset((400,)), answers=1)
    yield Case("edge: a request in the body of an upgrade", "edge", hidden, expect, within_s=5.0, reaches=NOBODY)
    yield answered("an upgrade of /health", sends(lambda n: head(n, *lines, start="GET /health HTTP/1.1")), 200)


def _sizes() -> Iterator[Case]:
    """The head has 64 KiB, however it comes."""
    kinds: dict[str, Callable[[int], str]] = {
        "a header": lambda size: f"x: {'a' * size}",
        "many headers": lambda size: "\r\n".join(["x: y"] * (size // 6)),
        "a header's name": lambda size: f"{'a' * size}: x",
    }
    for where, make in kinds.items():
        for size, statuses in ((32 * KIB, (200,)), (60 * KIB, (200,)), (66 * KIB, (431,)), (200 * KIB, (431,))):
            for pace, piece in (("at once", None), ("in pieces", 4096), ("in odd pieces", 65_521)):
                line = make(size)
                act = sends(lambda n, given=line: typed(n, given) + BODY, piece=piece)
                name = f"{where} of {size // KIB} KiB {pace}"
                yield served(name, act) if statuses == (200,) else refused(name, act, *statuses)
    for size, statuses in ((32 * KIB, (404,)), (200 * KIB, (431,))):
        start = f"GET /{'a' * size} HTTP/1.1"
        act = sends(lambda n, given=start: head(n, start=given))
        yield (
            answered(f"a target of {size // KIB} KiB", act, 404)
            if statuses == (404,)
            else refused(f"a target of {size // KIB} KiB", act, 431)
        )


def _chunks() -> Iterator[Case]:
    """RFC 9112, section 7.1."""

    def chunks(*parts: bytes, **how: float) -> Act:
        body = b"".join(parts)
        piece = int(how.get("piece", 0)) or None
        return sends(lambda n: typed(n, "transfer-encoding: chunked", length=None) + body, piece=piece)

    whole = b"%x\r\n%b\r\n" % (len(BODY), BODY)
    end = b"0\r\n\r\n"
    single = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
    yield served("chunks of one byte", chunks(single, end))
    yield served("chunks of one byte, byte by byte", chunks(single, end, piece=1))
    yield served("a chunk extension", chunks(b"%x;a=b\r\n%b\r\n" % (len(BODY), BODY), end))
    yield served("trailers", chunks(whole, b"0\r\nx: y\r\nhost: other\r\n\r\n"))
    yield served("a size with zeros", chunks(b"0000%x\r\n%b\r\n" % (len(BODY), BODY), end))
    for size in (130 * KIB, 200 * KIB, 1024 * KIB):
        extension = b"%x;%b\r\n" % (len(BODY), b"a" * size)
        yield refused(f"a chunk extension of {size // KIB} KiB", chunks(extension, BODY, b"\r\n", end), 431)
        yield refused(f"a trailer of {size // KIB} KiB", chunks(whole, b"0\r\nx: ", b"a" * size, b"\r\n\r\n"), 431)
        small = b"".join(b"1;%b\r\n%c\r\n" % (b"a" * 30_000, byte) for byte in BODY[: size // 20_000])
        yield refused(f"{size // KIB} KiB of extensions of many chunks", chunks(small, single, end), 431)
    for bad in (
        b"x\r\n",
        b"-1\r\n",
        b"\r\n",
        b" 5\r\n",
        b"0x5\r\n",
        b"fffffffffffffffff\r\n",
        b"5",
        b"+5\r\n",
        b"5\rx",
        b"5 5\r\n",
        b"5\n",
    ):
        yield refused(
            f"a chunk size {bad!r}", chunks(bad, BODY, b"\r\n", end, b"\r\n" * 4, b"x" * 40), 400, answers=None
        )
    yield refused("a chunk longer than it says", chunks(b"5\r\n", BODY, b"\r\n", end), 400)
    yield refused("garbage behind a chunk", chunks(whole[:-2], b"xx", end), 400)
    yield declined("16 MiB and more in chunks", chunks(*([b"40000\r\n", b" " * 0x40000, b"\r\n"] * 65), end), 413)


def _types() -> Iterator[Case]:
    """vLLM 0.32.0 takes nothing but JSON (entrypoints/openai/utils.py, validate_json_request)."""
    for media in (
        "text/plain",
        "text/plain;charset=UTF-8",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/jsonx",
        "application/json-patch+json",
        "text/json",
        "json",
        "",
        "application/json, text/plain",
    ):
        lines = (f"content-type: {media}", f"content-length: {len(BODY)}")
        yield declined(f"type {media!r}", sends(lambda n, given=lines: head(n, *given) + BODY), 415)
    yield declined("no type", sends(lambda n: head(n, f"content-length: {len(BODY)}") + BODY), 415)
    for media in (
        "application/json",
        "application/json; charset=utf-8",
        "Application/JSON",
        "application/json;charset=x",
    ):
        lines = (f"content-type: {media}", f"content-length: {len(BODY)}")
        yield served(f"type {media!r}", sends(lambda n, given=lines: head(n, *given) + BODY))
    for coding in ("gzip", "br", "deflate", "zstd", "gzip, identity"):
        yield declined(
            f"content-encoding {coding}", sends(lambda n, c=coding: typed(n, f"content-encoding: {c}") + BODY), 415
        )
    yield served("content-encoding identity", sends(lambda n: typed(n, "content-encoding: identity") + BODY))


def _pipelines() -> Iterator[Case]:
    """RFC 9112, section 9.3.2: answers come in the order of the requests."""
    yield served("two requests in one packet", sends(lambda n: post(n, ASKED) * 2, answers=2), answers=2)
    yield served("ten requests in one packet", sends(lambda n: post(n, ASKED) * 10, answers=10), answers=10)
    yield served("ten requests byte by byte", sends(lambda n: post(n, ASKED) * 10, answers=10, piece=3), answers=10)
    health = head(0, start="GET /health HTTP/1.1")
    yield answered("200 requests of /health", sends(health * 200, answers=200), 200, answers=200)

    async def flood(stage: Stage) -> None:
        client = await stage.connect()
        await client.send(b"GET /health HTTP/1.1\r\nhost:\r\n\r\n" * 20_000)
        await client.read(stage.within_s - 1, answers=20_000)

    yield Case(
        "edge: 20,000 requests of /health",
        "edge",
        flood,
        Expect(frozenset((200,)), answers=None),
        within_s=20.0,
        reaches=NOBODY,
    )
    yield refused("garbage and a request", sends(lambda n: b"\x16\x03garbage\r\n\r\n" + post(n, ASKED)), 400)
    closing = sends(lambda n: post(n, ASKED, PATH, "connection: close") + post(n, ASKED), answers=2)
    yield Case(
        "edge: a request behind the last one",
        "edge",
        closing,
        Expect(frozenset((200,)), answers=1, closed=True),
        within_s=6.0,
    )


def _paths() -> Iterator[Case]:
    for method, path, status in (
        ("GET", PATH, 405),
        ("PUT", PATH, 405),
        ("DELETE", PATH, 405),
        ("POST", "/health", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/", 404),
        ("GET", "/admin/instances", 404),
        ("GET", "/v1/completions/", 404),
        ("GET", "//v1/models", 404),
        ("GET", "/v1/../v1/models", 404),
        ("GET", "/%2e%2e/v1/models", 404),
        ("GET", "/v1/models%00", 404),
        ("GET", "/%ff", 404),
        ("GET", "/health/nobody", 404),
        ("OPTIONS", PATH, 405),
        ("TRACE", "/health", 405),
        ("GET", "/v1/models", 200),
        ("GET", "/health", 200),
        ("GET", "/health/decode", 200),
        ("HEAD", "/health", 200),
    ):
        start = f"{method} {path} HTTP/1.1"
        if method == "HEAD":
            continue  # its answer has no body, and the client here does not know
        yield answered(f"{method} {path}", sends(lambda n, s=start: head(n, start=s)), status)


def _paces() -> Iterator[Case]:
    """A request has 20 s for its head and 60 s for all of it; the cases here are well within, at an odd pace."""
    for piece in (1, 2, 13, 64):
        yield served(f"pieces of {piece}", sends(lambda n: post(n, ASKED), piece=piece))
    yield served("the head, then the body", sends(typed, BODY, wait_s=0.3))
    yield served("two halves of the body", sends(lambda n: typed(n) + BODY[:9], BODY[9:], wait_s=0.3))
