"""Mutates JSON in its values, in its syntax, and in its bytes."""

import json
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

__all__ = ["EVIL", "spoiled_json"]

EVIL = "evil-7f3c.example"
"""Stands where an address may stand."""
MOST_BYTES = 1 << 16
NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.5, -0.0, 1e308, "", "x", EVIL, [], {}, [[]], [None], {"": None}),
    *(2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**40),
    *("1.0", "1.10000", "a" * 300, "\ud800", "\u0000", "é", "\U0001f600", "__proto__", "{}", "[1]", "null", "-1"),
    *([[1, [2, [3]]]], {"remote_host": EVIL, "remote_port": 1}, [1] * 300, "sha256:" + "0" * 64),
]
RAW = (
    b"NaN",
    b"Infinity",
    b"1e999",
    b"-",
    b"01",
    b"\xff",
    b"\x00",
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b",",
    b":",
    b"\xef\xbb\xbf",
)


def spoiled_json(dice: random.Random, corpus: Sequence[bytes]) -> bytes:
    """One of the corpus, changed; at most 64 KiB."""
    base = dice.choice(corpus)
    try:
        tree = [json.loads(base)]
    except (ValueError, RecursionError):
        return spoiled_bytes(dice, base, corpus)
    for _ in range(dice.choice((1, 1, 2, 3, 6))):
        _change(dice, tree, corpus)
    try:
        text = _written(dice, tree[0] if tree else None)
    except (ValueError, RecursionError):
        return base
    if dice.random() < 0.3:
        text = spoiled_bytes(dice, text, corpus)
    return text[:MOST_BYTES]


def spoiled_bytes(dice: random.Random, base: bytes, corpus: Sequence[bytes]) -> bytes:
    """Bytes flipped, cut, doubled; pieces of others, and what JSON has no room for."""
    found = bytearray(base)
    for _ in range(dice.randint(1, 3)):
        at = dice.randrange(len(found) + 1)
        match dice.randrange(7):
            case 0 if at < len(found):
                found[at] = dice.randrange(256)
            case 1:
                del found[at : at + dice.randint(1, 8)]
            case 2:
                found[at:at] = found[at : at + dice.randint(1, 60)]
            case 3:
                found[at:at] = dice.choice(RAW)
            case 4:
                other = dice.choice(corpus)
                begin = dice.randrange(len(other) + 1)
                found[at : at + dice.randint(0, 9)] = other[begin : begin + dice.randint(1, 80)]
            case 5:
                found[at:at] = dice.choice((b"[", b'{"x":', b'"', b"\\u00")) * dice.choice((1, 3, 70, 5000))
            case _:
                del found[at:]
    return bytes(found[:MOST_BYTES])


def _nodes(tree: Any) -> list[tuple[Any, Any]]:
    """Every place of a value: what holds it, and under which name or number."""
    found: list[tuple[Any, Any]] = []
    open_: list[Any] = [tree]
    while open_ and len(found) < 3000:
        holder = open_.pop()
        keys: list[Any] = list(range(len(cast("list[Any]", holder)))) if isinstance(holder, list) else list(holder)
        for key in keys:
            inner = cast("Any", holder)[key]
            found.append((cast("Any", holder), key))
            if isinstance(inner, list | dict):
                open_.append(cast("Any", inner))
    return found


def _change(dice: random.Random, tree: list[Any], corpus: Sequence[bytes]) -> None:
    nodes = _nodes(tree)
    if not nodes:
        return
    holder, key = dice.choice(nodes)
    value = holder[key]
    named = isinstance(holder, dict)
    match dice.randrange(11):
        case 0 | 1:
            holder[key] = dice.choice(NASTY)
        case 2 if holder is not tree:
            del holder[key]
        case 3:
            other = _other(dice, corpus)
            if other is not None:
                holder[key] = other
        case 4 if named:
            del holder[key]
            holder[_name(dice, str(key), corpus)] = value
        case 5 if named:
            holder[_name(dice, str(key), corpus)] = value
        case 6:
            holder[key] = dice.choice(([value], {"x": value}, {str(key): value}, [value, value]))
        case 7:
            with suppress(ValueError, RecursionError):
                holder[key] = json.dumps(value)  # JSON inside of text
        case 8 if isinstance(value, list):
            holder[key] = (cast("list[Any]", value) * dice.choice((2, 30)))[:2000]
        case 9 if type(value) is int:
            holder[key] = value + dice.choice((-1, 1, 2**31, -(2**63), 2**63))
        case 10 if isinstance(value, str):
            at = dice.randrange(len(value) + 1)
            holder[key] = (
                value[:at] + dice.choice(("", " ", "\u0000", "é", "/", ":", ".", "x" * 200, value)) + value[at:]
            )
        case _:
            holder[key] = dice.choice(NASTY)


def _other(dice: random.Random, corpus: Sequence[bytes]) -> Any:
    try:
        nodes = _nodes([json.loads(dice.choice(corpus))])
    except (ValueError, RecursionError):
        return None
    holder, key = dice.choice(nodes)
    return json.loads(json.dumps(holder[key]))


def _name(dice: random.Random, name: str, corpus: Sequence[bytes]) -> str:
    match dice.randrange(4):
        case 0:
            return dice.choice((name.upper(), name.title(), name + " ", "@" + name, name.replace("_", "-"), ""))
        case 1:
            return dice.choice((name[:-1], name * 2, "x" * 300, "\u0130", "\ud800"))
        case _:
            try:
                named = [key for _, key in _nodes([json.loads(dice.choice(corpus))]) if isinstance(key, str)]
            except (ValueError, RecursionError):
                return "x"
            return dice.choice(named or ["x"])


def _written(dice: random.Random, value: Any) -> bytes:
    style = dice.choice(((",", ":"), (", ", ": "), (" ,\n", "\t: ")))
    text = json.dumps(value, ensure_ascii=dice.random() < 0.5, separators=style)
    raw = text.encode("utf-8", "surrogatepass")
    if dice.random() < 0.1 and raw.startswith(b"{") and (end := raw.find(b",")) > 0:  # its first member twice
        raw = raw[: end + 1] + raw[1:]
    if dice.random() < 0.1 and (at := raw.find(b'"')) >= 0 and at + 1 < len(raw) and 0x60 < raw[at + 1] < 0x7B:
        raw = raw[: at + 1] + b"\\u%04x" % raw[at + 1] + raw[at + 2 :]
    return raw
