"""The log lines about requests whose media no encode engine has encoded."""

import logging
from collections.abc import Callable
from typing import Final

__all__ = ["EncodingLog"]

_log: Final = logging.getLogger(__name__)
_EVERY_S: Final = 10.0
_LONGEST_TEXT: Final = 500


class EncodingLog:
    """An `EncodingLog` writes a line from time to time: clients and engines decide how often an encode step fails."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now`: the clock, in seconds."""
        self._now = now
        self._next_s = 0.0
        self._unsaid = 0
        """Requests since the last line that had none."""

    def write(self, request_id: str, problem: str) -> None:
        """Writes why this request had no encodings, if a line is due.

        `problem` is the proxy's own text: an engine's may hold what the client has said.
        """
        now_s = self._now()
        if now_s < self._next_s:
            self._unsaid += 1
            return
        unsaid, self._unsaid, self._next_s = self._unsaid, 0, now_s + _EVERY_S
        said = "no encode engine has encoded its media, so the engine of its prompt does"
        more = f" (and of {unsaid} requests before it)" if unsaid else ""
        _log.warning("request %s: %s%s: %s", request_id, said, more, problem[:_LONGEST_TEXT])
