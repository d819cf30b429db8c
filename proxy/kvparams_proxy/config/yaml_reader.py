"""Reads YAML as operators write it: objects, lists, text, numbers, true and false, null; nothing else.

PyYAML's `SafeLoader` parses the text; a subclass of it builds plain values. Whatever two readers of YAML could
understand differently (`yes`, `010`, `1:30`, a key that occurs twice) is refused with its line. Anchors, tags and merge
keys are refused, and size, depth and the number of values are bounded, so no text can do harm.

`read_yaml` blocks, for seconds where a file is hostile: a running server calls it in a thread.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple, cast

import yaml
from yaml.reader import ReaderError

from kvparams.errors import printable
from kvparams.settings_model import SettingPath
from kvparams_proxy.config_errors import SECTION_NAME, ConfigError, ConfigProblems

__all__ = ["MAX_YAML_BYTES", "YAMLDocument", "read_yaml"]

MAX_YAML_BYTES: Final = 1 << 20
"""Of one file. A thousand instances need a quarter of it."""
_MAX_VALUES: Final = 50_000
"""Keys included."""
_MAX_SHOWN: Final = 200
"""Characters of what PyYAML says, which may repeat the text."""
_MAX_DEPTH: Final = 16
"""Objects and lists inside each other."""

_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_DECIMAL: Final = re.compile(r"-?(0|[1-9][0-9]{0,17})\.[0-9]{1,18}")
_TAG: Final = "tag:yaml.org,2002:"
_SHARED: Final = "put members that instances share into `defaults`"


class YAMLDocument(NamedTuple):
    """The parsed content of a YAML text."""

    value: object
    lines: Mapping[SettingPath, int]
    """The line of each member (its name) and of each entry of a list."""


def read_yaml(text: str) -> YAMLDocument:
    """Reads one document.

    Raises:
        ConfigError: the text is not YAML, or not plain. All keys that occur twice are named at once.
    """
    try:
        loader = _PlainLoader(text)
        value = loader.read_document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = printable((error.problem or error.context or "it cannot be read")[:_MAX_SHOWN])
        raise _refusal(1 if mark is None else mark.line + 1, f"not valid YAML: {said}") from None
    except ReaderError as error:
        line = text.count("\n", 0, cast("int", error.position)) + 1
        raise _refusal(line, "not valid YAML: it holds a character that YAML does not allow") from None
    loader.repeated_keys.raise_if_any()
    return YAMLDocument(value, loader.lines)


class _PlainLoader(yaml.SafeLoader):
    """A `SafeLoader` that builds plain values only.

    It builds them from the parser's events instead of nodes. A tree of nodes holds hundreds of thousands of objects,
    and Python's garbage collector stops all threads while it looks at them.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lines: dict[SettingPath, int] = {}
        self.repeated_keys = ConfigProblems()
        self._values = 0

    def read_document(self) -> object:
        """Returns the value of the only document; None where there is none."""
        try:
            return self._read_document()
        except ConfigError:
            raise
        except (ValueError, OverflowError):  # PyYAML's own: of a number in a directive, of an escaped character
            raise _refusal(self.line + 1, "not valid YAML: a number or an escape is too large") from None

    def _read_document(self) -> object:
        self._next_event()  # the stream begins
        value = None
        if not self.check_event(yaml.StreamEndEvent):
            self._next_event()  # the document begins
            value = self._read_value(())
            self._next_event()  # and ends
        last = self._next_event()
        if not isinstance(last, yaml.StreamEndEvent):
            raise _refusal(_line(last), "the file has several YAML documents; remove the line ---")
        return value

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:
        """See `yaml.scanner.Scanner`, which looks ahead: each open bracket makes every further token cost more."""
        if self.flow_level >= _MAX_DEPTH:
            raise _refusal(self.line + 1, f"nested deeper than {_MAX_DEPTH} levels")
        super().fetch_flow_collection_start(TokenClass)  # pyright: ignore[reportUnknownMemberType]

    def _read_value(self, path: SettingPath) -> object:
        event = self._next_node()
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if len(path) >= _MAX_DEPTH:
            raise _refusal(_line(event), f"nested deeper than {_MAX_DEPTH} levels")
        if isinstance(event, yaml.MappingStartEvent):
            return self._read_object(path)
        entries: list[object] = []
        while not self.check_event(yaml.SequenceEndEvent):
            here = (*path, len(entries))
            self.lines[here] = _line(cast("yaml.Event", self.peek_event()))  # pyright: ignore[reportUnknownMemberType]
            entries.append(self._read_value(here))
        self._next_event()
        return entries

    def _read_object(self, path: SettingPath) -> dict[str, object]:
        members: dict[str, object] = {}
        while not self.check_event(yaml.MappingEndEvent):
            key = self._next_node()
            if not isinstance(key, yaml.ScalarEvent):
                raise _refusal(_line(key), "a key must be text, not an object or a list")
            if key.value == "<<" and key.implicit[0]:
                raise _refusal(_line(key), f"merge keys (<<) are not supported; {_SHARED}")
            if key.value in members:
                shown = f"the key {key.value[:64]!r}" if path or SECTION_NAME.fullmatch(key.value) else "a key"
                words = f"{shown} appears twice in one object"
                self.repeated_keys.add(f"line {_line(key)}", words)
            here = (*path, key.value)
            self.lines[here] = _line(key)
            members[key.value] = self._read_value(here)
        self._next_event()
        return members

    def _next_node(self) -> yaml.NodeEvent:
        """Returns the beginning of the next value or key. Refuses what is not plain about it."""
        event = cast("yaml.NodeEvent", self._next_event())
        self._values += 1
        if self._values > _MAX_VALUES:
            raise _refusal(_line(event), f"more than {_MAX_VALUES} values")
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _refusal(_line(event), f"anchors and aliases (& and *) are not supported; {_SHARED}")
        if cast("str | None", getattr(event, "tag", None)) is not None:
            raise _refusal(_line(event), "tags (!) are not supported")
        return event

    def _scalar(self, event: yaml.ScalarEvent) -> object:
        text = event.value
        if not event.implicit[0]:  # in quotes, or a block of text
            return text
        tag = cast("str", self.resolve(yaml.ScalarNode, text, event.implicit))  # pyright: ignore[reportUnknownMemberType]
        kind = tag.removeprefix(_TAG)
        if kind == "null":
            return None
        if kind == "bool" and text in ("true", "false"):
            return text == "true"
        if kind == "int" and _INTEGER.fullmatch(text):
            return int(text)
        if kind == "float" and _DECIMAL.fullmatch(text):
            return float(text)
        if kind in ("bool", "int", "float"):
            words = f"{text[:32]!r} has different meanings in different YAML readers; quote it if it is text"
            raise _refusal(_line(event), words)
        return text

    def _next_event(self) -> yaml.Event:
        return cast("yaml.Event", self.get_event())  # pyright: ignore[reportUnknownMemberType]


def _line(event: yaml.Event) -> int:
    return cast("yaml.Mark", event.start_mark).line + 1


def _refusal(line: int, what: str) -> ConfigError:
    return ConfigError((f"line {line}: {what}",))
