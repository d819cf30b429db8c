"""Writes the proxy's own log from a thread: a pipe that nobody reads must not stop the event loop.

A line is text for people or one JSON object. `facts` of a record, as in `log(..., extra={"facts": {...}})`, are members
of the object beside `message`; text has only the message.
"""

import json
import logging
from collections.abc import Mapping
from time import gmtime, strftime
from typing import Final, cast

from kvparams_proxy.telemetry.line_writer import LineWriter

__all__ = ["JSONLogFormatter", "LineWriterHandler", "TextLogFormatter"]

_CLOSE_S: Final = 1.0
"""For what is left at the end; a place that does not take it gets no more."""
_ESCAPES: Final = {number: f"\\x{number:02x}" for number in (*range(32), *range(127, 160)) if number != ord("\t")}
"""A message is one line of text, whatever stands in it."""


class TextLogFormatter(logging.Formatter):
    """Formats a record as text: one line, and a traceback below it if there is one."""

    def __init__(self, origin: str = "") -> None:
        """`origin` names the process, where several write to one destination."""
        super().__init__(f"%(asctime)s %(levelname)s {origin}{' ' if origin else ''}%(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.formatMessage`."""
        record.message = record.message.translate(_ESCAPES)
        return super().formatMessage(record)


class JSONLogFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def __init__(self, origin: str = "") -> None:
        """`origin` names the process, where several write to one destination."""
        super().__init__()
        self._origin = origin

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        second, thousandth = strftime("%Y-%m-%dT%H:%M:%S", gmtime(record.created)), int(record.created % 1 * 1000)
        document: dict[str, object] = {"time": f"{second}.{thousandth:03d}Z", "level": record.levelname}
        if self._origin:
            document["process"] = self._origin
        document |= {"logger": record.name, "message": record.getMessage()}
        facts: object = getattr(record, "facts", None)
        if isinstance(facts, Mapping):
            more = cast("Mapping[str, object]", facts)
            document |= {name: value for name, value in more.items() if name not in document}
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


class LineWriterHandler(logging.Handler):
    """Writes log records through a `LineWriter`. A record that finds no room is dropped and counted there."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer
        self.setFormatter(TextLogFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`. A record that cannot be formatted is named in its place."""
        try:
            text = self.format(record)
        except Exception as error:  # noqa: BLE001  wrong arguments of a log call: `handleError` would write and wait
            unformatted = logging.makeLogRecord(
                {
                    "name": record.name,
                    "levelno": record.levelno,
                    "levelname": record.levelname,
                    "created": record.created,
                    "msg": f"this record cannot be formatted: {error!r}: {record.msg!r}",
                }
            )
            text = self.format(unformatted)
        self._writer.put(text.encode("utf-8", "backslashreplace") + b"\n", 1)

    def close(self) -> None:
        """Writes what is left, for at most a second."""
        self._writer.close(_CLOSE_S)
        super().close()
