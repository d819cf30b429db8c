"""Asks a reader under test: a program that gets one question a line, in JSON, and answers each with one line."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, Final, cast

from kvparams_conformance.checks import CheckFailed, NotJudged
from kvparams_conformance.conversation import shorten
from kvparams_conformance.program import Program, StartFailed
from kvparams_conformance.raw_json import dump

__all__ = ["Reader", "ReaderTrial", "same_value"]

ANSWER_S: Final = 5.0
"""The time in which a question is answered."""
_STARTS: Final = 4
"""How often the program is started, if it ends or does not answer."""


class Reader:
    """The program under test. It is started anew after it has ended, or has not answered in time."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._program: Program | None = None
        self._starts = 0

    async def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a question.

        Raises:
            CheckFailed: there is none in time, or it is no object in JSON.
            StartFailed: the program cannot be started, or ends again and again.
        """
        program = await self._running()
        try:
            async with asyncio.timeout(ANSWER_S):
                line = await program.ask(dump(question))
        except asyncio.CancelledError:  # the check has ended; a late answer would be taken for the next one's
            self._starts -= 1  # which is no fault of the program
            await self.stop()
            raise
        except TimeoutError:
            await self.stop()
            raise CheckFailed(f"the program did not answer within {ANSWER_S:.0f} s") from None
        except ValueError:
            await self.stop()
            raise CheckFailed("the program answers a line that is too long") from None
        except OSError:  # it reads no more
            line = b""
        if not line.endswith(b"\n"):
            await self.stop()
            raise CheckFailed(f"the program ended with status {program.ended}: {shorten(program.output[-300:])}")
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise CheckFailed(f"the answer is no object in JSON: {shorten(line, 200)}")
        return cast("dict[str, Any]", found)

    async def _running(self) -> Program:
        if self._program is None:
            self._starts += 1
            if self._starts > _STARTS:
                raise StartFailed("the program ended, or did not answer, again and again")
            program = Program(self._command, answers_lines=True)
            await program.start({})
            self._program = program
        return self._program

    async def stop(self) -> None:
        """Ends the program."""
        if self._program is not None:
            await self._program.stop()
            self._program = None


@dataclass(slots=True)
class ReaderTrial:
    """A `ReaderTrial` is one check of a reader at work."""

    reader: Reader
    sent: list[str] = field(default_factory=list[str])
    seen: list[str] = field(default_factory=list[str])

    async def ask(self, what: str, **members: Any) -> dict[str, Any]:
        """Asks one question, and records it and its answer.

        Raises:
            NotJudged: the program answers that it does not know the dialect, the form or the question.
        """
        question = {"do": what, **{name: value for name, value in members.items() if value is not None}}
        self.sent = [shorten(dump(question), 300)]
        self.seen = []
        answer = await self.reader.ask(question)
        self.seen = [shorten(dump(answer), 300)]
        if "unknown" in answer:
            raise NotJudged(f"the program does not know {answer['unknown']!s:.100}")
        return answer

    def evidence(self) -> tuple[str, str]:
        """Returns the last question, and its answer."""
        return " ".join(self.sent), " ".join(self.seen)


def same_value(wanted: object, told: object) -> bool:
    """Returns whether two values are one value in JSON.

    Truth values, integers and text differ. Where a double is wanted, 1 is 1.0.
    """
    if isinstance(wanted, float):
        return isinstance(told, int | float) and not isinstance(told, bool) and wanted == told
    if isinstance(wanted, dict) and isinstance(told, dict):
        left, right = cast("dict[str, object]", wanted), cast("dict[str, object]", told)
        return left.keys() == right.keys() and all(same_value(left[name], right[name]) for name in left)
    if isinstance(wanted, list) and isinstance(told, list):
        first, second = cast("list[object]", wanted), cast("list[object]", told)
        return len(first) == len(second) and all(map(same_value, first, second))
    return isinstance(wanted, bool) is isinstance(told, bool) and not isinstance(told, float) and wanted == told
