"""Reads modes: those of the fleet file (`modes`), of the admin API and of `--mode`.

    modes:
      - {use: aggregated, when: {max_tokens: 256}, priority: 1}
      - {use: prefill_then_decode}

The one rule: as for entries, all or nothing, and everything wrong is said at once.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, cast

from kvparams.errors import PluginError
from kvparams.routing.managers import factory
from kvparams.routing.managers.mode_selector import ActiveManager, ManagerMode, ModeCondition, ModeSelector
from kvparams_proxy.config_errors import ConfigProblems

__all__ = ["MAX_MODES", "mode_document", "parse_mode_flag", "parse_modes"]

MAX_MODES: Final = 64
_MEMBERS: Final = ("use", "when", "priority", "options")
_WORDS: Final = ("model", "endpoint", "tenant", "session")
_CONDITIONS: Final = ("model", "min_tokens", "max_tokens", "stream", "endpoint", "tenant", "session")
_MOST: Final = 1 << 53
_WHOLE: Final = re.compile(r"[0-9]{1,18}")


def parse_modes(document: object, where: str, problems: ConfigProblems) -> tuple[ManagerMode, ...]:
    """Check a list of modes. Empty if it cannot be used: that never is."""
    if not isinstance(document, list) or not 0 < len(cast("list[object]", document)) <= MAX_MODES:
        problems.add(where, f"must be a list of 1 to {MAX_MODES}, each an object with {', '.join(_MEMBERS)}")
        return ()
    items = cast("list[object]", document)
    found: list[ActiveManager] = []
    for number, item in enumerate(items):
        mode = _mode(item, f"{where}[{number}]", problems)
        if mode is not None:
            found += _made(mode, f"{where}[{number}]", problems)
    if len(found) != len(items):
        return ()
    try:
        ModeSelector(found)
    except ValueError as error:
        problems.add(where, str(error))
    return tuple(each.mode for each in found)


def parse_mode_flag(text: str) -> ManagerMode:
    """The mode of `NAME` or `NAME,OPTION=VALUE,...`, for every request.

    Raises:
        ValueError: there is no such manager, or no such option of it; the message says what there is.
    """
    name, *pairs = text.split(",")
    options: dict[str, object] = {}
    for pair in pairs:
        option, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair[:64]!r} must be OPTION=VALUE")
        known = {"true": True, "false": False}
        options[option] = known[value] if value in known else int(value) if _WHOLE.fullmatch(value) else value
    mode = ManagerMode(name, options=options)
    problems = ConfigProblems()
    _made(mode, "", problems)
    try:
        problems.raise_if_any()
    except ValueError as error:
        raise ValueError(str(error)) from None
    return mode


def mode_document(mode: ManagerMode) -> dict[str, object]:
    """As it would be written."""
    when = mode.when
    said: dict[str, object] = {name: sorted(getattr(when, name)) for name in _WORDS if getattr(when, name)}
    if when.stream is not None:
        said["stream"] = when.stream
    if when.min_tokens:
        said["min_tokens"] = when.min_tokens
    if when.max_tokens is not None:
        said["max_tokens"] = when.max_tokens
    return {"use": mode.use, "when": said, "priority": mode.priority, "options": dict(mode.options)}


def _mode(document: object, where: str, problems: ConfigProblems) -> ManagerMode | None:
    if not isinstance(document, dict):
        problems.add(where, f"must be an object with {', '.join(_MEMBERS)}")
        return None
    given = cast("dict[str, object]", document)
    _refuse_unknown(given, _MEMBERS, where, problems)
    use, priority, options = given.get("use"), given.get("priority", 0), given.get("options", {})
    if not isinstance(use, str):
        problems.add(f"{where}.use", f"must be one of {', '.join(factory.manager_names())}")
    if not isinstance(priority, int) or isinstance(priority, bool) or not -_MOST < priority < _MOST:
        problems.add(f"{where}.priority", "must be a whole number")
    if not isinstance(options, dict):
        problems.add(f"{where}.options", "must be an object")
    when = _when(given.get("when", {}), f"{where}.when", problems)
    if not isinstance(use, str) or not isinstance(priority, int) or not isinstance(options, dict) or when is None:
        return None
    return ManagerMode(use, when, priority, cast("dict[str, object]", options))


def _when(document: object, where: str, problems: ConfigProblems) -> ModeCondition | None:
    if not isinstance(document, dict):
        problems.add(where, f"must be an object with one or more of {', '.join(_CONDITIONS)}")
        return None
    given = cast("dict[str, object]", document)
    _refuse_unknown(given, _CONDITIONS, where, problems)
    words: dict[str, frozenset[str]] = {}
    for name in _WORDS:
        if name in given:
            value = given[name]
            values = cast("list[object]", value) if isinstance(value, list) else [value]
            if not values or not all(isinstance(one, str) and one for one in values):
                problems.add(f"{where}.{name}", "must be text, or a list of texts")
            words[name] = frozenset(one for one in values if isinstance(one, str))
    numbers: dict[str, int | None] = {"min_tokens": 0, "max_tokens": None}
    for name in numbers:
        if name in given:
            value = given[name]
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST:
                problems.add(f"{where}.{name}", "must be a whole number, at least 0")
            else:
                numbers[name] = value
    stream = given.get("stream")
    if stream is not None and not isinstance(stream, bool):
        problems.add(f"{where}.stream", "must be true or false")
        stream = None
    return ModeCondition(
        **words, stream=stream, min_tokens=numbers["min_tokens"] or 0, max_tokens=numbers["max_tokens"]
    )


def _made(mode: ManagerMode, where: str, problems: ConfigProblems) -> Sequence[ActiveManager]:
    """With a manager as it would be used, which is how its options are checked."""
    try:
        return (ActiveManager(mode, factory.create_manager(mode.use, None, mode.options)),)
    except PluginError as error:
        known = factory.manager_names()
        said = f"must be one of {', '.join(known)}" if mode.use not in known else str(error)
        problems.add(f"{where}.use" if where else "", said)
    except ValueError as error:
        problems.add(f"{where}.options" if where else "", f"{error}")
    return ()


def _refuse_unknown(given: Mapping[str, object], known: Sequence[str], where: str, problems: ConfigProblems) -> None:
    for name in given:
        if name not in known:
            problems.add(f"{where}.{name[:64]}", f"is not known here; known: {', '.join(known)}")
