"""Parses the operator's choice of tokenization for each model, and loads the tokenizers.

The proxy does not start if a named tokenizer is missing.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from kvparams_proxy.tokenization.errors import TokenizerError

if TYPE_CHECKING:
    from kvparams_proxy.tokenization.local_tokenizer import LocalTokenizer

__all__ = ["TokenizationMethod", "TokenizerChoices", "load_tokenizers", "parse_tokenizer_choices"]


class TokenizationMethod(StrEnum):
    """A method of tokenization other than a local tokenizer."""

    ENGINE = "engine"
    BYTES = "bytes"


TokenizerChoices = Mapping[str | None, Path | TokenizationMethod]
"""By model; under None stands the way of all others."""
_MOST: Final = 256
_MUST: Final = "must be PATH, engine or bytes, each with an optional MODEL= before it; separate several by commas"


def parse_tokenizer_choices(value: object, folder: Path) -> TokenizerChoices:
    """Parses a value of a flag or the fleet file.

    It is `PATH`, `engine` or `bytes` for every model, `MODEL=...` for one, several separated by commas. In the file it
    may be an object, with `"*"` for every model. Relative paths begin in `folder`.

    Raises:
        ValueError: with what it must be.
    """
    if isinstance(value, str):
        pairs = [_pair(text.strip()) for text in value.split(",")]
    elif isinstance(value, dict):
        pairs = list(cast("dict[object, object]", value).items())
    else:
        raise ValueError(_MUST)
    found: dict[str | None, Path | TokenizationMethod] = {}
    for model, way in pairs:
        if not isinstance(model, str) or not isinstance(way, str) or not model or not way or "\0" in way:
            raise ValueError(_MUST)
        name = None if model == "*" else model
        if name in found:
            raise ValueError(f"names {model[:64]!r} twice")
        found[name] = TokenizationMethod(way) if way in tuple(TokenizationMethod) else folder / way
    if len(found) > _MOST:
        raise ValueError(f"must name at most {_MOST} models")
    return found


def _pair(text: str) -> tuple[str, str]:
    model, equals, way = text.partition("=")
    return (model, way) if equals else ("*", text)


def load_tokenizers(choices: TokenizerChoices) -> "dict[str | None, LocalTokenizer | TokenizationMethod]":
    """Loads the tokenizers that are named. Models that share one share its caches. Blocks.

    Raises:
        TokenizerError: one cannot be used, or the extra `tokens` is not installed.
    """
    paths = {way for way in choices.values() if isinstance(way, Path)}
    loaded = _load(paths) if paths else {}
    return {model: loaded[way] if isinstance(way, Path) else way for model, way in choices.items()}


def _load(paths: set[Path]) -> "dict[Path, LocalTokenizer]":
    try:
        from kvparams_proxy.tokenization.tokenizer_files import load_local_tokenizer
    except ImportError as error:
        message = f"a tokenizer needs packages that are not installed ({error}): pip install 'kvparams[tokens]'"
        raise TokenizerError(message) from error
    return {path: load_local_tokenizer(path) for path in paths}
