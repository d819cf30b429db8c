"""PyYAML's scanner with bounds: no event takes more than some milliseconds to find, whatever the text.

The scanner is written in Python, and one token, a run of comments or a deep nest of brackets costs it a microsecond or
more for each character before it returns. Source: PyYAML 6.0.2 and 6.0.3, reader.py and scanner.py.
"""

import re
from typing import Final, cast

import yaml

from kvparams_proxy.config_errors import ConfigError

__all__ = ["MAX_DEPTH", "BoundedLoader"]

MAX_DEPTH: Final = 16
"""Objects and lists inside each other."""
_LONGEST: Final = 3 << 10
"""Characters, comments not counted, that are read for one event. No value may have more than 2,048."""
_LONGEST_GAP: Final = 256 << 10
"""Characters of comments and empty lines between two tokens."""
_BREAKS: Final = "\r\n\x85\u2028\u2029"
_MARK: Final = "\ufeff"
"""The byte order mark, which takes no column."""
_NO_TOKEN: Final = re.compile(rf"(?: *+(?:#[^\0{_BREAKS}]*+)?+[{_BREAKS}])*+ *+(?:#[^\0{_BREAKS}]*+)?+")
"""Spaces, comments and line breaks."""


class BoundedLoader(yaml.SafeLoader):
    """A `SafeLoader` that refuses what would take long, with a `ConfigError`.

    `begin_event` must be called before each event.
    """

    def __init__(self, text: str) -> None:
        self._left = _LONGEST
        super().__init__(text)

    def begin_event(self) -> None:
        """Allows for the characters of one more event."""
        self._left = _LONGEST

    def peek(self, index: int = 0) -> str:
        """See `yaml.reader.Reader`: looks at a character further on."""
        if index > _LONGEST:
            raise self._refuse(f"a text of more than {_LONGEST} characters")
        try:
            return self.buffer[self.pointer + index]
        except IndexError:
            return cast("str", super().peek(index))  # pyright: ignore[reportUnknownMemberType]

    def forward(self, length: int = 1) -> None:
        """See `yaml.reader.Reader`: passes characters."""
        self._left -= length
        if self._left < 0:
            raise self._refuse(f"a text of more than {_LONGEST} characters")
        super().forward(length)

    def scan_to_next_token(self) -> None:
        """See `yaml.scanner.Scanner`: passes what is no token, here at the speed of a search."""
        if self.index == 0 and self.peek() == _MARK:
            self.forward()
        text, start = self.buffer, self.pointer
        found = _NO_TOKEN.match(text, start, start + _LONGEST_GAP)
        end = start if found is None else found.end()
        if end - start >= _LONGEST_GAP:
            raise self._refuse(f"more than {_LONGEST_GAP} characters of comments or white space")
        breaks = sum(text.count(line_break, start, end) for line_break in _BREAKS) - text.count("\r\n", start, end)
        self.index += end - start
        self.pointer = end
        if breaks:
            self.line += breaks
            last = 1 + max(text.rfind(line_break, start, end) for line_break in _BREAKS)
            self.column = end - last - text.count(_MARK, last, end)
            if not self.flow_level:
                self.allow_simple_key = True
        else:
            self.column += end - start - text.count(_MARK, start, end)

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:
        """See `yaml.scanner.Scanner`: every open bracket makes each further token cost more."""
        if self.flow_level >= MAX_DEPTH:
            raise self._refuse(f"nested deeper than {MAX_DEPTH} levels")
        super().fetch_flow_collection_start(TokenClass)  # pyright: ignore[reportUnknownMemberType]

    def _refuse(self, what: str) -> ConfigError:
        return ConfigError((f"line {self.line + 1}: {what}",))
