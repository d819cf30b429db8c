"""Parses the operator's further names of models: what a client may say instead of what engines serve."""

from collections.abc import Mapping
from typing import Final, cast

__all__ = ["ModelAliases", "parse_model_aliases"]

ModelAliases = Mapping[str, str]
"""The served model by its alias."""
_MOST: Final = 1024
_MOST_CHARS: Final = 1024
_MUST: Final = "must be ALIAS=MODEL; separate several by commas"


def parse_model_aliases(value: object) -> ModelAliases:
    """Parses a value of a flag or the fleet file: `ALIAS=MODEL`, several separated by commas, or an object of these.

    Raises:
        ValueError: with what it must be.
    """
    if isinstance(value, str):
        pairs = [text.strip().partition("=")[::2] for text in value.split(",")]
    elif isinstance(value, dict):
        pairs = list(cast("dict[object, object]", value).items())
    else:
        raise ValueError(_MUST)
    found: dict[str, str] = {}
    for alias, model in pairs:
        if not _is_name(alias) or not _is_name(model):
            raise ValueError(_MUST)
        name = cast("str", alias)
        if name in found:
            raise ValueError(f"names the alias {name[:64]!r} twice")
        found[name] = cast("str", model)
    if len(found) > _MOST:
        raise ValueError(f"must name at most {_MOST} aliases")
    again = next((alias for alias, model in found.items() if model in found), None)
    if again is not None:
        raise ValueError(f"the alias {again[:64]!r} stands for another alias; name the model that engines serve")
    return found


def _is_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MOST_CHARS and value.isprintable()
