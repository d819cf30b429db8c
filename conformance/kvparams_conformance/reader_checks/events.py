"""Checks of readers of KV events: each message becomes the canonical events that the vectors say."""

import struct
import tempfile
from pathlib import Path
from typing import Any, Final, cast

from kvparams_conformance.checks import Checks, expect
from kvparams_conformance.raw_json import dig
from kvparams_conformance.reader_checks.judging import expect_answer, expect_problems, read_vectors
from kvparams_conformance.reader_site import ReaderTrial

__all__ = ["CHECKS"]

CHECKS: Final = Checks()
_PROFILES: Final = ("events-reader",)
_MEANING: Final = {
    "14.1": "messages that are no batch",
    "14.2": "events as maps and as arrays, and batches without a rank",
    "14.3": "hashes as integers, as bytes and as text",
    "14.4": "tokens that do not fit the blocks",
    "14.5": "words for the medium",
    "14.6": "members and entries that are not known",
    "14.7": "batches with events that cannot be used",
    "14.8": "malformed events, and events of unknown types",
    "14.9": "messages in JSON, of TensorRT-LLM and of Dynamo",
}
_SOURCE: Final = {"instance": "engine-a", "sequence": 7}
_MOST_EVENTS: Final = 65_536
_CLEARED: Final = ["AllBlocksCleared"]


def _add_vectors(requirement: str, about: str) -> None:
    @CHECKS.add(
        requirement,
        "vectors",
        sends=f"the vectors of {about}",
        expects="the batches, or the problems, of each",
        profiles=_PROFILES,
    )
    async def check(trial: ReaderTrial) -> None:
        for case in read_vectors("events.json")["cases"]:
            counts = requirement == "14.8" and any("unknown" in batch for batch in case.get("batches", ()))
            if counts or f"1.0#{requirement}" in case["requirements"]:
                await _expect_vector(trial, case)


async def _expect_vector(trial: ReaderTrial, case: dict[str, Any]) -> None:
    message = {name: case[name] for name in ("payload", "text") if name in case}
    answer = await trial.ask("read", form=case["form"], **_SOURCE, **message)
    if case["valid"]:
        expect_answer(answer, "batches", case["batches"], case["name"])
    else:
        expect_problems(answer, case["problems"], case["name"])


for _requirement, _about in _MEANING.items():
    _add_vectors(_requirement, _about)


def _stored(**members: object) -> dict[str, object]:
    whole: dict[str, object] = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None}
    return {**whole, "token_ids": [1], "block_size": 1, **members}


async def _read(trial: ReaderTrial, *events: object) -> dict[str, Any]:
    return await trial.ask("read", form="msgpack", **_SOURCE, payload=_pack([1.5, list(events), 0]).hex())


@CHECKS.add(
    "14.10",
    "most-events",
    sends="65,536 events in a message, and one more",
    expects="the first are read, the others refused as a whole",
    profiles=_PROFILES,
)
async def check_most_events(trial: ReaderTrial) -> None:
    """Sends as many events as there may be."""
    answer = await _read(trial, *[_CLEARED] * _MOST_EVENTS)
    batches: Any = answer.get("batches")
    events = batches[0].get("events", ()) if isinstance(batches, list) and batches else ()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    expect(len(cast("list[object]", events)) == _MOST_EVENTS, f"{len(cast('list[object]', events))} events were read")
    answer = await _read(trial, *[_CLEARED] * (_MOST_EVENTS + 1))
    expect_problems(answer, [{"path": [1], "kind": "length"}], "65,537 events")


@CHECKS.add(
    "14.10",
    "values",
    sends="events with 257 members, with too large a token id, group and block size, and with too long a name",
    expects="each is left out with a problem of its own, and the event beside it is used",
    profiles=_PROFILES,
)
async def check_values(trial: ReaderTrial) -> None:
    """Sends values beyond each bound."""
    cases: list[tuple[dict[str, object], list[object], str]] = [
        ({"type": "Later", **{str(number): 0 for number in range(257)}}, [], "length"),
        (_stored(token_ids=[2**32]), ["token_ids"], "range"),
        (_stored(group_idx=2**31), ["group_idx"], "range"),
        (_stored(block_size=2**24 + 1), ["block_size"], "range"),
        (_stored(medium="m" * 1025), ["medium"], "length"),
    ]
    for event, path, kind in cases:
        answer = await _read(trial, event, _CLEARED)
        batch = {"instance": "engine-a", "rank": 0, "sequence": 7, "time": 1.5, "events": [{"type": "cleared"}]}
        problems = [{"path": [1, 0, *path], "kind": kind}]
        expect_answer(answer, "batches", [{**batch, "malformed": 1, "problems": problems}], f"{path or 'members'}")


@CHECKS.add(
    "14.10",
    "depth",
    sends="a message with 100,000 levels, in MessagePack and in JSON",
    expects="an answer: it is refused, or the event is left out",
    profiles=_PROFILES,
)
async def check_depth(trial: ReaderTrial) -> None:
    """Sends what a recursive reader falls over."""
    levels = 100_000
    deep = b"\x93" + _pack(1.5) + b"\x91" * levels + b"\xc0" + b"\x00"
    text = '[{"event_id": 1, "data": ' + "[" * levels + "]" * levels + "}]"
    for message in ({"form": "msgpack", "payload": deep.hex()}, {"form": "trtllm", "text": text}):
        answer = await trial.ask("read", **_SOURCE, **message)
        expect("problems" in answer or not dig(answer, "batches", 0, "events"), "100,000 levels were read")


@CHECKS.add(
    "14.15",
    "pickle",
    sends="messages that are pickles, which write a file when they are loaded",
    expects="they are refused, and there is no file",
    profiles=_PROFILES,
)
async def check_pickle(trial: ReaderTrial) -> None:
    """Sends code."""
    with tempfile.TemporaryDirectory(prefix="kvparams-conformance-") as folder:
        path = Path(folder) / "ran"
        for payload in (f"cbuiltins\nopen\n(V{path}\nVw\ntR.".encode(), b"\x80\x04" + _call_open(str(path))):
            answer = await trial.ask("read", form="msgpack", **_SOURCE, payload=payload.hex())
            expect(not path.exists(), "the message was run")
            expect_problems(answer, [{"path": [], "kind": "value"}], "a pickle")


def _call_open(path: str) -> bytes:
    """Returns the rest of a pickle of protocol 4 that opens a file for writing."""
    return (
        b"cbuiltins\nopen\n"
        + b"".join(b"X" + struct.pack("<I", len(one)) + one.encode() for one in (path, "w"))
        + b"\x86R."
    )


def _pack(value: object) -> bytes:
    """Returns a value in MessagePack."""
    match value:
        case None:
            return b"\xc0"
        case int():
            return b"\xcf" + struct.pack(">Q", value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            return b"\xdb" + struct.pack(">I", len(value.encode())) + value.encode()
        case list():
            items = cast("list[object]", value)
            return b"\xdd" + struct.pack(">I", len(items)) + b"".join(map(_pack, items))
        case dict():
            members = cast("dict[str, object]", value)
            packed = (_pack(name) + _pack(one) for name, one in members.items())
            return b"\xdf" + struct.pack(">I", len(members)) + b"".join(packed)
        case _:
            raise TypeError(type(value))
