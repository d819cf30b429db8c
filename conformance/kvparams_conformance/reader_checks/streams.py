"""Checks of readers of KV events: the frames over ZMQ, and what is known after batches were missed."""

from collections.abc import Sequence
from typing import Any, Final

from kvparams_conformance.checks import Checks, expect
from kvparams_conformance.reader_checks.judging import expect_answer
from kvparams_conformance.reader_site import ReaderTrial

__all__ = ["CHECKS"]

CHECKS: Final = Checks()
_PROFILES: Final = ("events-reader",)
_SEVEN: Final = (7).to_bytes(8, "big")
_END: Final = b"\xff" * 8

Batch = tuple[int, str]
Live = tuple[Batch, Sequence[Batch]]
"""A batch that comes live, and what the publisher can send again at that moment."""


async def _frames(trial: ReaderTrial, frames: Sequence[bytes], *, replayed: bool) -> dict[str, Any]:
    return await trial.ask("frames", frames=[frame.hex() for frame in frames], replayed=replayed)


@CHECKS.add(
    "14.11",
    "live",
    sends="the frames of live messages, and other frames",
    expects="number and payload of the first, `problems` for the others",
    profiles=_PROFILES,
)
async def check_live(trial: ReaderTrial) -> None:
    """Sends frames of a publisher."""
    for topic in (b"", b"kv@pod@m"):
        answer = await _frames(trial, [topic, _SEVEN, b"payload"], replayed=False)
        expect_answer(answer, "sequence", 7, "a live message")
        expect_answer(answer, "payload", b"payload".hex(), "a live message")
    large = (2**64 - 2).to_bytes(8, "big")
    expect_answer(await _frames(trial, [b"", large, b""], replayed=False), "sequence", 2**64 - 2, "the largest number")
    wrong: list[list[bytes]] = [[], [_SEVEN, b""], [b"", b"", _SEVEN, b""], [b"", b"7", b""], [b"", _END, b""]]
    for frames in wrong:
        answer = await _frames(trial, frames, replayed=False)
        expect("problems" in answer, f"{len(frames)} frames were taken for a live message")


@CHECKS.add(
    "14.11",
    "replayed",
    sends="the frames of replayed messages, with a topic or an empty frame in front or without, and the last one",
    expects="number and payload of the first, `end` for the last, `problems` for others",
    profiles=_PROFILES,
)
async def check_replayed(trial: ReaderTrial) -> None:
    """Sends frames of an answer to a request for replay."""
    fronts: list[list[bytes]] = [[], [b""], [b"topic"], [b"", b"topic"], [b"", b""]]
    for front in fronts:
        answer = await _frames(trial, [*front, _SEVEN, b"payload"], replayed=True)
        expect_answer(answer, "sequence", 7, f"{len(front)} frames in front")
        expect_answer(answer, "payload", b"payload".hex(), f"{len(front)} frames in front")
        answer = await _frames(trial, [*front, _END, b""], replayed=True)
        expect_answer(answer, "end", True, f"the end, {len(front)} frames in front")
    wrong: list[list[bytes]] = [[], [_SEVEN], [b"x", b"", _SEVEN, b""], [b""] * 5, [b"", b"", b"1234567", b""]]
    for frames in wrong:
        answer = await _frames(trial, frames, replayed=True)
        expect("problems" in answer, f"{len(frames)} frames were taken for a replayed message")


def _add_stream(requirement: str, name: str, sends: str, live: Sequence[Live], known: Sequence[str]) -> None:
    @CHECKS.add(
        requirement,
        name,
        sends=sends,
        expects=f"the reader knows {', '.join(known)} in the end",
        profiles=_PROFILES,
    )
    async def check(trial: ReaderTrial) -> None:
        told = [
            {"sequence": one[0], "content": one[1], "replay": [list(again) for again in more]} for one, more in live
        ]
        answer = await trial.ask("follow", messages=told)
        expect_answer(answer, "known", list(known), name)


def _batches(first: int, contents: str) -> list[Batch]:
    return [(first + at, content) for at, content in enumerate(contents)]


_ABC: Final = _batches(0, "abc")
_ABCD: Final = _batches(0, "abcd")
_add_stream("14.12", "in-order", "batches 0, 1 and 2", [(one, _ABC) for one in _ABC], "abc")
_add_stream("14.12", "twice", "batches 0, 1, 1 and 2", [(_ABC[at], _ABC) for at in (0, 1, 1, 2)], "abc")
_add_stream(
    "14.12", "gap", "batches 0 and 3; the others can be asked for", [(_ABC[0], _ABC), (_ABCD[3], _ABCD)], "abcd"
)
_add_stream("14.12", "late", "batch 3 first; all can be asked for", [(_ABCD[3], _ABCD)], "abcd")
_add_stream(
    "14.13",
    "restart",
    "batches 0 and 1, and another batch 0",
    [(_ABC[0], _ABC), (_ABC[1], _ABC), ((0, "x"), [(0, "x")])],
    "x",
)
_add_stream(
    "14.13",
    "restart-behind-gap",
    "batches 0 and 1, and 3 of a publisher with another batch 1",
    [(_ABC[0], _ABC), (_ABC[1], _ABC), ((3, "z"), _batches(0, "wxyz"))],
    "wxyz",
)
_add_stream(
    "14.14",
    "forgotten",
    "batches 0, 1 and 5; only 4 and 5 can still be asked for",
    [(_ABC[0], _ABC), (_ABC[1], _ABC), ((5, "f"), _batches(4, "ef"))],
    "ef",
)
_add_stream(
    "14.14",
    "no-replay",
    "batches 0 and 2, and nothing can be asked for",
    [(_ABC[0], []), (_ABC[2], [])],
    "c",
)
