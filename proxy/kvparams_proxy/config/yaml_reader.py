"""YAML as operators write it, read plainly: objects, lists, text, numbers, true and false, null; nothing else.

The document is built from the parser's events, not by its constructors: no tag, no anchor, no merge can do anything
here, depth and number of values are bounded, and the work can be done in slices. The one rule: what two readers of YAML
could understand differently (`yes`, `010`, `1:30`, a key that stands twice) is refused, with its line.
"""

import re
from collections.abc import Generator
from typing import Final, cast

import yaml
from yaml.reader import ReaderError

from kvparams_proxy.config.yaml_loader import MAX_DEPTH, BoundedLoader
from kvparams_proxy.config_errors import ConfigError, ConfigProblems

__all__ = ["MAX_YAML_BYTES", "read_yaml"]

MAX_YAML_BYTES: Final = 1 << 20
"""Of one file. A thousand instances need a quarter of it."""
_MAX_VALUES: Final = 50_000
"""Keys included."""

_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_DECIMAL: Final = re.compile(r"-?(0|[1-9][0-9]{0,17})\.[0-9]{1,18}")
_TAG: Final = "tag:yaml.org,2002:"

_Container = dict[str, object] | list[object]


class _OpenContainer:
    """A container that has begun and not ended."""

    __slots__ = ("container", "key", "seen")

    def __init__(self, container: _Container) -> None:
        self.container = container
        self.key: str | None = None
        """In an object: the key whose value comes next."""
        self.seen = set[str]()


def read_yaml(text: str) -> Generator[None, None, object]:
    """Read one document, yielding now and then; its value is what the generator returns.

    Raises:
        ConfigError: it is not YAML, or not plain. All keys that stand twice are named at once.
    """
    problems = ConfigProblems()
    try:
        document = yield from _build(BoundedLoader(text), problems)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}" if mark is not None else ""
        problems.add(where, f"not valid YAML: {error.problem or error.context or 'it cannot be read'}")
        document = None
    except ReaderError as error:
        line = text.count("\n", 0, cast("int", error.position)) + 1
        problems.add(f"line {line}", "not valid YAML: it holds a character that YAML does not allow")
        document = None
    problems.raise_if_any()
    return document


def _build(loader: BoundedLoader, problems: ConfigProblems) -> Generator[None, None, object]:
    stack: list[_OpenContainer] = []
    root: object = None
    values = documents = 0
    while loader.check_event():
        event = cast("yaml.Event", loader.get_event())  # pyright: ignore[reportUnknownMemberType]
        yield
        loader.begin_event()
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise _refuse(event, "one document is read, not several; take out the line ---")
            continue
        if isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            stack.pop()
            continue
        if not isinstance(event, yaml.NodeEvent):
            continue
        values += 1
        if values > _MAX_VALUES:
            raise _refuse(event, f"more than {_MAX_VALUES} values")
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _refuse(event, "anchors and aliases (& and *) are not read; what instances share goes to `defaults`")
        if cast("str | None", getattr(event, "tag", None)) is not None:
            raise _refuse(event, "tags (!) are not read")
        value: object
        if isinstance(event, yaml.ScalarEvent):
            if stack and isinstance(stack[-1].container, dict) and stack[-1].key is None:
                _take_key(stack[-1], event, problems)
                continue
            value = _scalar(loader, event)
        else:
            value = dict[str, object]() if isinstance(event, yaml.MappingStartEvent) else list[object]()
            if stack and isinstance(stack[-1].container, dict) and stack[-1].key is None:
                raise _refuse(event, "a key is text, not an object or a list")
        if stack:
            _put(stack[-1], value)
        else:
            root = value
        if isinstance(value, dict | list):
            if len(stack) >= MAX_DEPTH:
                raise _refuse(event, f"nested deeper than {MAX_DEPTH} levels")
            stack.append(_OpenContainer(cast("_Container", value)))
    return root


def _take_key(parent: _OpenContainer, event: yaml.ScalarEvent, problems: ConfigProblems) -> None:
    key = event.value
    if key == "<<" and event.implicit[0]:
        raise _refuse(event, "merge keys (<<) are not read; what instances share goes to `defaults`")
    if key in parent.seen:
        problems.add(_line(event), f"the key {key[:64]!r} stands twice in one object")
    parent.seen.add(key)
    parent.key = key


def _put(parent: _OpenContainer, value: object) -> None:
    if isinstance(parent.container, list):
        parent.container.append(value)
    elif parent.key is not None:
        parent.container[parent.key] = value
        parent.key = None


def _scalar(loader: yaml.SafeLoader, event: yaml.ScalarEvent) -> object:
    text = event.value
    if not event.implicit[0]:  # in quotes
        return text
    tag = cast("str", loader.resolve(yaml.ScalarNode, text, event.implicit))  # pyright: ignore[reportUnknownMemberType]
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
        raise _refuse(event, f"{text[:32]!r} means different things to different readers; quote it if it is text")
    return text


def _line(event: yaml.Event) -> str:
    return "" if event.start_mark is None else f"line {event.start_mark.line + 1}"


def _refuse(event: yaml.Event, what: str) -> ConfigError:
    line = _line(event)
    return ConfigError((f"{line}: {what}" if line else what,))
