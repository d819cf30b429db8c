"""Models of modes: those of the fleet file (`modes`), of the admin API and of `--mode`.

    modes:
      - {use: aggregated, when: {max_tokens: 256}, priority: 1}
      - {use: prefill_then_decode}

As for entries, all of them can be used or none, and everything wrong is said at once.
"""

import re
from typing import Annotated, Any, Final, cast

from pydantic import (
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from kvparams.errors import PluginError
from kvparams.routing.managers import factory
from kvparams.routing.managers.mode_selector import ActiveManager, ManagerMode, ModeCondition, ModeSelector
from kvparams.settings_model import Allowed, SettingsModel, must_be_one_of
from kvparams_proxy.config.spec_fields import Choices, Switch
from kvparams_proxy.config_errors import ConfigProblems

__all__ = ["ModeEntry", "Modes", "mode_document", "parse_mode_flag", "parse_modes"]

_MAX_MODES: Final = 64
_WORDS: Final = ("model", "endpoint", "tenant", "session")
_MOST: Final = (1 << 53) - 1
_WHOLE: Final = re.compile(r"[0-9]{1,18}")

_Count = Annotated[int, Field(ge=0, le=_MOST), Allowed("a whole number, at least 0")]
_Priority = Annotated[int, Field(ge=-_MOST, le=_MOST), Allowed("a whole number")]


def _check_name(value: object) -> str:
    """Returns the name of a manager that can be loaded."""
    try:
        factory.create_manager(value if isinstance(value, str) else "")
    except PluginError as error:
        must_be_one_of(value, factory.manager_names())
        raise ValueError(str(error)) from error
    return cast("str", value)


_ManagerName = Annotated[str, PlainValidator(_check_name)]


class ConditionEntry(SettingsModel):
    """For which requests a mode is meant."""

    model: Choices = ()
    min_tokens: _Count = 0
    max_tokens: _Count | None = None
    stream: Switch | None = None
    endpoint: Choices = ()
    tenant: Choices = ()
    session: Choices = ()

    def to_condition(self) -> ModeCondition:
        """Returns the condition."""
        words = {name: frozenset[str](getattr(self, name)) for name in _WORDS}
        return ModeCondition(**words, stream=self.stream, min_tokens=self.min_tokens, max_tokens=self.max_tokens)


class ModeEntry(SettingsModel):
    """A way to coordinate requests."""

    use: _ManagerName
    when: ConditionEntry = ConditionEntry()
    priority: _Priority = 0
    options: Annotated[dict[str, Any], Allowed("an object"), Field(validate_default=True)] = Field(
        default_factory=dict[str, Any]
    )

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, object], info: ValidationInfo) -> dict[str, object]:
        if "use" in info.data:
            factory.create_manager(info.data["use"], None, options)  # which checks them
        return options

    def to_mode(self) -> ManagerMode:
        """Returns the mode."""
        return ManagerMode(self.use, self.when.to_condition(), self.priority, self.options)


_entries: Final = TypeAdapter[list[ModeEntry]](
    Annotated[
        list[ModeEntry],
        Field(min_length=1, max_length=_MAX_MODES),
        Allowed(f"a list of 1 to {_MAX_MODES}, each an object with {', '.join(ModeEntry.setting_names())}"),
    ]
)


def _check_modes(value: object) -> tuple[ManagerMode, ...]:
    """Returns the modes. One of them must be for every request, and each must be taken for some."""
    modes = tuple(entry.to_mode() for entry in _entries.validate_python(value))
    ModeSelector([ActiveManager(mode, factory.create_manager(mode.use, None, mode.options)) for mode in modes])
    return modes


Modes = Annotated[tuple[ManagerMode, ...], PlainValidator(_check_modes)]
"""A list of modes."""
_modes: Final = TypeAdapter[tuple[ManagerMode, ...]](Modes)


def parse_modes(document: object, where: str, problems: ConfigProblems) -> tuple[ManagerMode, ...]:
    """Returns a list of modes; an empty one if it cannot be used, which is added to `problems`."""
    try:
        return _modes.validate_python(document)
    except ValidationError as error:
        problems.add_errors(error, where)
        return ()


def parse_mode_flag(text: str) -> ManagerMode:
    """Returns the mode of `NAME` or `NAME,OPTION=VALUE,...`, for every request.

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
    factory.create_manager(_check_name(name), None, options)  # which checks them
    return ManagerMode(name, options=options)


def mode_document(mode: ManagerMode) -> dict[str, object]:
    """Returns a mode as it would be written."""
    when = mode.when
    said: dict[str, object] = {name: sorted(getattr(when, name)) for name in _WORDS if getattr(when, name)}
    if when.stream is not None:
        said["stream"] = when.stream
    if when.min_tokens:
        said["min_tokens"] = when.min_tokens
    if when.max_tokens is not None:
        said["max_tokens"] = when.max_tokens
    return {"use": mode.use, "when": said, "priority": mode.priority, "options": dict(mode.options)}
