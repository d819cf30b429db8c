"""Reads single keys from a terminal, and leaves the terminal as it was."""

import os
import select
import termios
import tty
from types import TracebackType
from typing import Self, TextIO

__all__ = ["TerminalKeys"]


class TerminalKeys:
    """A context in which keys come one by one and are not shown."""

    def __init__(self, terminal: TextIO) -> None:
        self._descriptor = terminal.fileno()
        self._before = termios.tcgetattr(self._descriptor)

    def __enter__(self) -> Self:
        tty.setcbreak(self._descriptor)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def read(self, wait_s: float) -> str:
        """Waits for a key. Returns an empty text if none comes in time, and `q` where the terminal is gone."""
        ready, _, _ = select.select([self._descriptor], [], [], wait_s)
        if not ready:
            return ""
        read = os.read(self._descriptor, 64)
        return read.decode("ascii", "ignore")[:1] if read else "q"
