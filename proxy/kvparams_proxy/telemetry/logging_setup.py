"""Sets up the log of a process: the same for the proxy, its workers, a sidecar and a picker."""

import logging
import os
from enum import StrEnum
from typing import Final

from kvparams_proxy.telemetry.line_writer import LineWriter
from kvparams_proxy.telemetry.log_handler import JSONLogFormatter, LineWriterHandler, TextLogFormatter

__all__ = ["LogFormat", "LogLevel", "is_json", "set_up_logging"]

_STDERR: Final = 2
_OURS: Final = ("kvparams", "kvparams_proxy", "kvparams_connectors")


class LogLevel(StrEnum):
    """The least severe records that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


class LogFormat(StrEnum):
    """The form of the lines."""

    AUTO = "auto"
    """Text on a terminal, otherwise JSON."""
    TEXT = "text"
    JSON = "json"


def is_json(form: str) -> bool:
    """Returns whether lines on stderr are JSON in this form."""
    if form != LogFormat.AUTO:
        return form == LogFormat.JSON
    try:
        return not os.isatty(_STDERR)
    except OSError:
        return True


def set_up_logging(level: str = LogLevel.INFO, form: str = LogFormat.AUTO, origin: str = "") -> None:
    """Has log records written to stderr. A second call changes what the first one has set up.

    Where the program that embeds the proxy has set up handlers of its own, only levels are set.

    Args:
        level: of this project's own records; those of libraries are written from WARNING on, or from this level on if
            it is higher.
        form: see `LogFormat`.
        origin: the name of this process, where several write to one destination.
    """
    root = logging.getLogger()
    handler = next((one for one in root.handlers if isinstance(one, LineWriterHandler)), None)
    if handler is None and not root.handlers:
        handler = LineWriterHandler(LineWriter(_STDERR))
        root.addHandler(handler)
    if handler is not None:
        handler.setFormatter(JSONLogFormatter(origin) if is_json(form) else TextLogFormatter(origin))
    number = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(number, logging.WARNING))
    for name in _OURS:
        logging.getLogger(name).setLevel(number)
