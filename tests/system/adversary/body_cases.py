"""Defines bodies of bad requests: text that is not plain JSON, members of the wrong kind, and very large bodies.

The proxy refuses every one of them with a message before any engine hears of it. The cases at the end are odd, and
still requests.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from tests.system.adversary.cases import ASKED, STREAM, Act, Case, Expect, Stage, asks
from tests.system.adversary.clients import post

__all__ = ["body_cases"]

MIB: Final = 1 << 20
LARGE: Final = 15 * MIB
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
GENERATE: Final = "/inference/v1/generate"
CHATTED: Final[dict[str, Any]] = {"model": "stub", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


def body_cases() -> list[Case]:
    """Returns all of them."""
    return [*_not_json(), *_not_plain(), *_members(), *_large(), *_broken_off(), *_odd()]


def refused(
    name: str, body: bytes | dict[str, Any], path: str = "/v1/completions", *, status: int = 400, within_s: float = 5.0
) -> Case:
    """Returns a case that is refused and reaches nobody."""
    expect = Expect(frozenset((status,)))
    return Case(f"body: {name}", "body", asks_raw(body, path), expect, within_s=within_s, reaches="nobody")


def served(name: str, body: bytes | dict[str, Any], path: str = "/v1/completions", *, within_s: float = 10.0) -> Case:
    """Returns a case that is answered by an engine."""
    return Case(
        f"body: {name}", "body", asks_raw(body, path), Expect(frozenset((200,))), within_s=within_s, reaches="decode"
    )


def asks_raw(body: bytes | dict[str, Any], path: str) -> Act:
    """Returns a client that sends this body, whatever it is."""

    async def act(stage: Stage) -> None:
        client = await stage.connect()
        await client.send(post(stage.case, body, path))
        await client.read(stage.within_s)

    return act


def with_member(text: bytes) -> bytes:
    """Returns a request with `text` among its members."""
    return b'{"model":"stub","prompt":"x","max_tokens":4,%b}' % text


def _not_json() -> Iterator[Case]:
    for number, text in enumerate(
        (
            b"",
            b" ",
            b"\0",
            b"x",
            b"nul",
            b"{",
            b"}",
            b"{}}",
            b"{}{}",
            b"[",
            b'{"a"}',
            b'{"a":}',
            b'{"a":1,}',
            b'{,"a":1}',
            b'{"a" 1}',
            b"{a:1}",
            b"{'a':1}",
            b'{"a":1;"b":2}',
            b'{"a":01}',
            b'{"a":+1}',
            b'{"a":.5}',
            b'{"a":1.}',
            b'{"a":1e}',
            b'{"a":0x1}',
            b'{"a":1_000}',
            b'{"a":- 1}',
            b'{"a":True}',
            b'{"a":undefined}',
            b'{"a":"\x01"}',
            b'{"a":"\n"}',
            b'{"a":"\\x"}',
            b'{"a":"\\u12"}',
            b'{"a":"\\ud800"}',
            b'{"a":"\\udc00\\ud800"}',
            b'{"a":"\xff"}',
            b'{"a":"\xc3"}',
            b'{"a":"\xed\xa0\x80"}',
            b'{"a":"\xf5\x80\x80\x80"}',
            b'{"a":1}//x',
            b'/**/{"a":1}',
            b'{"a":1}\0',
            b'\xef\xbb\xbf{"a":1}',
            '{"a":1}'.encode("utf-16"),
            '{"a":1}'.encode("utf-16-be"),
            '{"a":1}'.encode("utf-32"),
            b"data: {}\n\n",
            b"--x\r\ncontent-disposition: form-data\r\n\r\n",
            b"model=stub&prompt=x",
        )
    ):
        yield refused(f"no JSON, {number} {text[:24]!r}", text)
        if text.startswith(b'{"a":') and text.endswith(b"}"):
            yield refused(f"a member that is no JSON, {number} {text[:24]!r}", with_member(text[1:-1]))
    for kind in (b"[]", b"null", b"true", b"1", b'"x"', b"[{}]", b'[{"model":"stub","prompt":"x"}]'):
        yield refused(f"no object, {kind!r}", kind)


def _not_plain() -> Iterator[Case]:
    for name, text in (
        ("NaN", b'"temperature":NaN'),
        ("Infinity", b'"temperature":Infinity'),
        ("-Infinity", b'"temperature":-Infinity'),
        ("1e999", b'"temperature":1e999'),
        ("-1E+400", b'"temperature":-1E+400'),
        ("400 digits and a point", b'"temperature":' + b"9" * 400 + b".5"),
        ("two members of one name", b'"prompt":"y"'),
        ("two names, one escaped", b'"pro\\u006dpt":"y"'),
        ("two inside", b'"logit_bias":{"1":1,"1":2}'),
        ("two inside, escaped", b'"logit_bias":{"1":1,"\\u0031":2}'),
        ("two far inside", b'"a":[{"b":[{"c":{"d":1,"d":2}}]}]'),
        ("65 lists", b'"a":' + b"[" * 65 + b"]" * 65),
        ("65 objects", b'"a":' + b'{"a":' * 65 + b"1" + b"}" * 65),
        ("10,000 lists", b'"a":' + b"[" * 10_000 + b"]" * 10_000),
        ("250,000 lists, open", b'"a":' + b"[" * 250_000),
        ("30,000 empty objects", b'"a":[' + b"{}," * 30_000 + b"{}]"),
        ("30,000 empty lists", b'"a":[' + b"[]," * 30_000 + b"[]]"),
        ("300,000 strings", b'"a":[' + b'"",' * 300_000 + b'""]'),
        ("300,000 names", b'"a":{' + b",".join(b'"%d":1' % number for number in range(300_000)) + b"}"),
    ):
        yield refused(name, with_member(text))


def _members() -> Iterator[Case]:
    wrong: tuple[tuple[str, Any], ...] = (
        ("model", 1),
        ("model", []),
        ("model", "x" * 2000),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", {}),
        ("prompt", 1),
        ("prompt", True),
        ("prompt", [1, "x"]),
        ("prompt", ["x", 1]),
        ("prompt", [1.5]),
        ("prompt", [-1]),
        ("prompt", [1 << 32]),
        ("prompt", [1 << 70]),
        ("prompt", [True]),
        ("prompt", [None]),
        ("prompt", [[]]),
        ("prompt", [[1], "x"]),
        ("prompt", [[1], []]),
        ("prompt", [""]),
        ("prompt", ["x"] * 1025),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "4"),
        ("max_tokens", True),
        ("max_tokens", 1 << 31),
        ("max_tokens", 10**40),
        ("max_tokens", []),
        ("min_tokens", -1),
        ("n", 0),
        ("n", 129),
        ("n", "1"),
        ("n", 1.0),
        ("stream", "true"),
        ("stream", 1),
        ("stream", []),
        ("stream_options", []),
        ("stream_options", "x"),
        ("cache_salt", ""),
        ("cache_salt", 1),
        ("cache_salt", "x" * 257),
        ("prompt_cache_key", 1),
        ("echo", "yes"),
    )
    for name, value in wrong:
        said = json.dumps(value)
        yield refused(f"{name} {said[:24]} ({len(said)})", ASKED | {name: value})
    chats: tuple[tuple[str, Any], ...] = (
        ("messages", None),
        ("messages", []),
        ("messages", {}),
        ("messages", "x"),
        ("messages", [1]),
        ("messages", [[]]),
        ("messages", [{}]),
        ("messages", [{"role": 1}]),
        ("messages", [{"role": None, "content": "x"}]),
        ("messages", [{"content": "x"}]),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", "x"),
    )
    for name, value in chats:
        yield refused(f"chat, {name} {json.dumps(value)[:24]}", CHATTED | {name: value}, CHAT)
    bodies: tuple[dict[str, Any], ...] = (
        {"token_ids": []},
        {"token_ids": "x"},
        {"token_ids": [1, "x"]},
        {"token_ids": [-1]},
        {"token_ids": [1], "sampling_params": []},
        {"token_ids": [1], "sampling_params": {"n": 0}},
        {},
    )
    for body in bodies:
        yield refused(f"generate, {json.dumps(body)[:40]}", {"model": "stub", **body}, GENERATE)
    yield refused("no prompt", {"model": "stub"})
    yield refused("an unknown model", ASKED | {"model": "other"}, status=404)


def _large() -> Iterator[Case]:
    """As large as they may be, and as hard to read: each is answered in time."""
    for name, piece, before, after in (
        ("exponents", b"1e1,", b'"a":[', b"1]"),
        ("digits", b"1,", b'"a":[', b"1]"),
        ("long digits", b"1234567890123456789012345678901234567890,", b'"a":[', b"1]"),
        ("points", b"0.5,", b'"a":[', b"1]"),
        ("one number", b"1", b'"a":', b""),
        ("one fraction", b"1", b'"a":0.', b""),
        ("quotes", b'\\"', b'"a":"', b'"'),
        ("backslashes", b"\\\\", b'"a":"', b'"'),
        ("escapes", b"\\u0041", b'"a":"', b'"'),
        ("surrogates", b"\\ud83d\\ude00", b'"a":"', b'"'),
        ("line breaks", b"\\n", b'"a":"', b'"'),
        ("white space", b" ", b'"a":', b"1"),
        ("new lines", b"\n", b'"a":', b"1"),
        ("plain text", b"x", b'"a":"', b'"'),
        ("emoji", "😀".encode(), b'"a":"', b'"'),
        ("literals", b"null,", b'"a":[', b"1]"),
    ):
        text = before + piece * ((LARGE - 200) // len(piece)) + after
        expect = Expect(frozenset((200, 400)))
        act = asks_raw(with_member(text), COMPLETIONS)
        yield Case(f"body: 15 MiB of {name}", "body", act, expect, within_s=20.0, alone=True)
        open_ended = with_member(before + piece * ((LARGE - 200) // len(piece)))[:-1]
        yield replace(refused(f"15 MiB of {name}, not closed", open_ended, within_s=20.0), alone=True)
    yield refused("16 MiB and a byte", b'"' + b"x" * (16 * MIB - 1) + b'"', status=413)
    ids = b'{"model":"stub","max_tokens":4,"prompt":[%b]}'
    yield served("2,000,000 token ids", ids % (b"7," * 1_999_999 + b"7"), within_s=30.0)
    yield refused("3,000,000 token ids", ids % (b"7," * 2_999_999 + b"7"), within_s=30.0)


def _broken_off() -> Iterator[Case]:
    """The client leaves in the middle of the body."""
    raw = json.dumps(ASKED).encode()

    def leaves(sent: int, total: int, how: str) -> Act:
        async def act(stage: Stage) -> None:
            client = await stage.connect()
            await client.send(post(stage.case, (raw + b" " * total)[:sent], length=total))
            if how == "resets":
                client.reset()
            elif how == "closes":
                client.close()
            else:
                client.half_close()
                await client.read(2.0)

        return act

    for sent in (0, 1, 40, 100_000, 10 * MIB):
        for how in ("resets", "closes", "half closes"):
            act = leaves(sent, max(200, sent + 100), how)
            yield Case(
                f"body: {sent} bytes, then it {how}", "body", act, Expect(answers=0), within_s=10.0, reaches="nobody"
            )


def _odd() -> Iterator[Case]:
    for name, text in (
        ("64 lists", b'"a":' + b"[" * 63 + b"]" * 63),
        ("20,000 lists", b'"a":[' + b"[]," * 19_000 + b"[]]"),
        ("a lone zero", b'"a":0'),
        ("-0", b'"a":-0'),
        ("1e308", b'"a":1e308'),
        ("a long integer", b'"a":' + b"7" * 4000),
        ("escaped slashes", b'"a":"\\/\\b\\f\\n\\r\\t"'),
        ("a pair of surrogates", b'"a":"\\ud83d\\ude00"'),
        ("an empty name", b'"":1'),
        ("a name of 60 KB", b'"%b":1' % (b"a" * 60_000)),
        ("__proto__", b'"__proto__":{"x":1}'),
        ("text that looks like members", b'"a":"\\",\\"prompt\\":\\"y\\""'),
        ("a megabyte of text", b'"a":"%b"' % (b"x" * MIB)),
    ):
        yield served(name, with_member(text))
    yield served("white space everywhere", b' \r\n\t{ "model" : "stub" ,\n "prompt" : "x" , "max_tokens" : 4 } \n')
    yield Case("body: a stream", "body", asks(STREAM), Expect(frozenset((200,)), ends="done"), reaches="decode")
    yield served("a chat", CHATTED, CHAT)
    yield served("token ids", ASKED | {"prompt": [1, 2, 3]})
    yield served("several prompts", ASKED | {"prompt": ["x", "y"]})
