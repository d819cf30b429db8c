"""Starts the program under test, keeps a bounded part of its output, and leaves nothing of it running."""

import asyncio
import os
import shlex
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["Program", "StartFailed"]

_MAX_OUTPUT_BYTES: Final = 4 << 20
_MAX_LINE_BYTES: Final = 32 << 20
_READ_BYTES: Final = 64 << 10
_TERM_S: Final = 3.0


class StartFailed(Exception):
    """The program under test cannot be started, or does not listen in time."""


class Program:
    """A process of its own session, with everything that it starts."""

    def __init__(self, command: str, *, answers_lines: bool = False) -> None:
        """`answers_lines`: the program reads lines, and answers each with one; its errors alone are its output."""
        self._command = command
        self._answers_lines = answers_lines
        self._process: asyncio.subprocess.Process | None = None
        self._output = bytearray()
        self._reading: asyncio.Task[None] | None = None

    async def start(self, variables: Mapping[str, str]) -> None:
        """Starts the program. `variables` are set in its environment.

        Raises:
            StartFailed: there is no such program.
        """
        try:
            self._process = await asyncio.create_subprocess_exec(
                *shlex.split(self._command),
                stdin=asyncio.subprocess.PIPE if self._answers_lines else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE if self._answers_lines else asyncio.subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
                start_new_session=True,
                limit=_MAX_LINE_BYTES,
            )
        except (OSError, ValueError) as error:
            raise StartFailed(f"the command cannot be started: {error}") from None
        said = self._process.stderr if self._answers_lines else self._process.stdout
        assert said is not None
        self._reading = asyncio.create_task(self._read(said))

    async def ask(self, line: bytes) -> bytes:
        """Sends a line, and returns the line that the program answers; empty if it has ended.

        Raises:
            ValueError: the line is too long.
            OSError: the program reads no more.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + b"\n")
        await self._process.stdin.drain()
        return await self._process.stdout.readline()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(_READ_BYTES):
            room = _MAX_OUTPUT_BYTES - len(self._output)
            self._output += data[: max(room, 0)]

    @property
    def output(self) -> str:
        """Returns what the program has written, up to a bound."""
        return self._output.decode("utf-8", "replace")

    @property
    def is_output_whole(self) -> bool:
        """Returns whether that is all that it has written."""
        return len(self._output) < _MAX_OUTPUT_BYTES

    @property
    def ended(self) -> int | None:
        """Returns the exit status of a program that has ended."""
        return None if self._process is None else self._process.returncode

    async def wait(self) -> int | None:
        """Waits until the program has ended, and returns its exit status."""
        return None if self._process is None else await self._process.wait()

    async def stop(self) -> None:
        """Ends the program and all its descendants, by force after a few seconds."""
        process = self._process
        if process is None:
            return
        family = descendants(process.pid)
        for number in (signal.SIGTERM, signal.SIGKILL):
            family |= descendants(process.pid)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            for pid in family if number == signal.SIGKILL else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _TERM_S)
        if self._reading is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._reading, 1.0)
            self._reading.cancel()


def descendants(root: int) -> set[int]:
    """Returns the processes that a process has started, directly or not. Empty where there is no /proc."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}
