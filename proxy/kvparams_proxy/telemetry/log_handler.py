"""Writes the proxy's own log from a thread: a pipe that nobody reads must not stop the event loop."""

import logging
from typing import Final

from kvparams_proxy.telemetry.line_writer import LineWriter

__all__ = ["LineWriterHandler"]

_FORMAT: Final = "%(asctime)s %(levelname)s {origin}%(name)s: %(message)s"
_CLOSE_S: Final = 1.0
"""For what is left at the end; a place that does not take it gets no more."""


class LineWriterHandler(logging.Handler):
    """Writes log records through a `LineWriter`. A record that finds no room is dropped and counted there."""

    def __init__(self, writer: LineWriter, origin: str = "") -> None:
        """`origin` is put into each line, where several processes write to one destination."""
        super().__init__()
        self._writer = writer
        self.setFormatter(logging.Formatter(_FORMAT.format(origin=f"{origin} " if origin else "")))

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`. A record that cannot be formatted is named in its place."""
        try:
            text = self.format(record)
        except Exception as error:  # noqa: BLE001  wrong arguments of a log call: `handleError` would write and wait
            text = f"{record.levelname} {record.name}: this record cannot be formatted: {error!r}: {record.msg!r}"
        self._writer.put(text.encode("utf-8", "backslashreplace") + b"\n", 1)

    def close(self) -> None:
        """Writes what is left, for at most a second."""
        self._writer.close(_CLOSE_S)
        super().close()
