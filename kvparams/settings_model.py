"""Settings that people write, as pydantic models: in a file, as flags, in an engine's configuration.

A `SettingsModel` refuses every name that it does not know and says which name was probably meant. `Allowed` says in
words what a value may be. `describe_setting_error` turns what pydantic finds into one sentence.

No message repeats a value, which may be a secret.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import ClassVar, Final, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import no_info_wrap_validator_function

from kvparams.errors import printable

__all__ = [
    "Allowed",
    "SettingPath",
    "SettingsModel",
    "check_setting",
    "describe_setting_error",
    "describe_setting_errors",
    "did_you_mean",
    "error_at",
    "find_setting_errors",
    "join_path",
    "must_be_one_of",
    "placed_errors",
]

T = TypeVar("T")

SettingPath = tuple[str | int, ...]
"""Names of members and places in lists, from the outermost object inwards."""

_UNKNOWN: Final = "unknown_setting"
_WORDS: Final = "setting"
_MAX_MEMBERS: Final = 256
_MAX_SHOWN: Final = 64
"""Characters of a name that somebody has written."""


class _Null:
    """Stands for a null, which no type accepts: `client-keys:` with nothing behind it must not mean no keys."""


_NULL: Final = _Null()


@dataclass(frozen=True)
class Allowed:
    """Describes the values that are allowed, in words that follow "must be". They replace those of pydantic.

    It comes last in `Annotated`, after the constraints. What is wrong inside of the value keeps its own words.
    """

    words: str

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_wrap_validator_function(self._check, handler(source))

    def _check(self, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError as error:
            if any(found["loc"] for found in find_setting_errors(error)):
                raise
            raise _in_words(f"must be {self.words}") from None


class SettingsModel(BaseModel):
    """An object of settings: nothing is converted, every name is known, and a null is no value."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    null_is_absent: ClassVar[bool] = False
    """Whether a member that is null is one that is left out."""
    names_elsewhere: ClassVar[Mapping[str, str]] = {}
    """Names that somebody may expect here, each with a sentence that says where it belongs."""

    @classmethod
    def setting_names(cls) -> list[str]:
        """Returns the names as they are written."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @model_validator(mode="wrap")
    @classmethod
    def _check_names(cls, given: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(given, cls):
            return given
        if not isinstance(given, dict):
            raise _in_words(f"must be an object with {', '.join(cls.setting_names())}")
        members = cast("dict[str, object]", given)
        if len(members) > _MAX_MEMBERS:  # each could be a problem
            raise _in_words(f"must have at most {_MAX_MEMBERS} members")
        if None in members.values():
            if cls.null_is_absent:
                known = set(cls.setting_names())  # a name that is not known is an error, whatever stands behind it
                members = {name: value for name, value in members.items() if value is not None or name not in known}
            else:
                members = {name: _NULL if value is None else value for name, value in members.items()}
        try:
            return handler(members)
        except ValidationError as error:
            found = error.errors(include_url=False)
            if not any(one["type"] == "extra_forbidden" for one in found):
                raise
            raise ValidationError.from_exception_data(cls.__name__, [cls._named(one) for one in found]) from None

    @classmethod
    def _named(cls, found: ErrorDetails) -> InitErrorDetails:
        """Returns the error as it is, or with the names that are known here."""
        kind = _kept(found)
        if found["type"] == "extra_forbidden":
            elsewhere = cls.names_elsewhere.get(str(found["loc"][-1]))
            known = PydanticCustomError(_UNKNOWN, "unknown", {"known": cls.setting_names()})
            kind = known if elsewhere is None else _in_words(elsewhere)
        return InitErrorDetails(type=kind, loc=found["loc"], input=None)


def find_setting_errors(error: ValidationError) -> list[ErrorDetails]:
    """Returns everything that is wrong, for `describe_setting_error`."""
    return error.errors(include_url=False, include_input=False)


def placed_errors(error: ValidationError, *path: str | int) -> list[InitErrorDetails]:
    """Returns everything that is wrong with a value that stands at `path` of a larger one."""
    return [
        InitErrorDetails(type=_kept(found), loc=(*path, *found["loc"]), input=None)
        for found in find_setting_errors(error)
    ]


def error_at(path: SettingPath, words: str) -> InitErrorDetails:
    """Returns an error for `ValidationError.from_exception_data`, with a sentence of its own."""
    return InitErrorDetails(type=_in_words(words), loc=path, input=None)


def describe_setting_error(found: ErrorDetails) -> str:
    """Returns one sentence that says what is wrong, to be put behind the setting's path."""
    kind, context = found["type"], found.get("ctx", {})
    if kind == _WORDS:
        return cast("str", context["words"])
    if kind == _UNKNOWN:
        known = cast("list[str]", context["known"])
        return f"is not known here; {did_you_mean(str(found['loc'][-1]), known)}known: {', '.join(known)}"
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(context["error"])
    return found["msg"].replace("Input should be", "must be")


def describe_setting_errors(error: ValidationError) -> str:
    """Returns everything that is wrong in one line, each behind its path."""
    found = find_setting_errors(error)
    return "; ".join(f"{join_path(one['loc'])}: {describe_setting_error(one)}".removeprefix(": ") for one in found)


def must_be_one_of(value: object, known: Iterable[str]) -> str:
    """Returns the value if it is one of the names that are known.

    Raises:
        ValueError: it is not; the message has the names, and the nearest one first.
    """
    names = list(known)
    if isinstance(value, str) and value in names:
        return value
    nearest = did_you_mean(value, names) if isinstance(value, str) else ""
    raise ValueError(f"must be one of {', '.join(names)}{f'; {nearest.rstrip()}' if nearest else ''}")


def check_setting(kind: TypeAdapter[T], value: object, context: object = None) -> T:
    """Returns a single value in its type.

    Raises:
        ValueError: with a sentence that says what it must be.
    """
    try:
        return kind.validate_python(value, context=context)
    except ValidationError as error:
        raise ValueError(describe_setting_error(find_setting_errors(error)[0])) from None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `did you mean NAME? ` with the nearest of the names that are known; nothing where none is near."""
    by_form = {one.lower().replace("_", "-"): one for one in known}
    found = get_close_matches(name[:_MAX_SHOWN].lower().replace("_", "-"), by_form, 1)
    return f"did you mean {by_form[found[0]]}? " if found else ""


def join_path(path: SettingPath) -> str:
    """Returns a path as it is shown: `instances[2].tls.ca`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part != "[key]":  # pydantic's mark for what is wrong with a name
            text += f".{printable(part[:_MAX_SHOWN])}"
    return text.removeprefix(".")


def _kept(found: ErrorDetails) -> PydanticCustomError:
    """Returns an error as it can be raised again.

    The names that are known stay with it, and the nearest is only looked for where it is shown.
    """
    if found["type"] == _UNKNOWN:
        return PydanticCustomError(_UNKNOWN, "unknown", found.get("ctx"))
    return _in_words(describe_setting_error(found))


def _in_words(words: str) -> PydanticCustomError:
    return PydanticCustomError(_WORDS, "{words}", {"words": words})
