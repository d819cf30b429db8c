"""Loads a model's tokenizer from its files: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`.

All files come from the folder that the operator names, none from a network. They are interpreted as transformers 5.19
does it (tokenization_utils_tokenizers.py, TokenizersBackend).
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, cast

from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer

from kvparams_proxy.tokenization.chat_template import ChatTemplate
from kvparams_proxy.tokenization.errors import TokenizerError
from kvparams_proxy.tokenization.local_tokenizer import CACHE_BYTES, LocalTokenizer

__all__ = ["load_local_tokenizer"]

_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ID: Final = re.compile(r"[0-9]{1,18}")
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


def load_local_tokenizer(path: Path, cache_bytes: int = CACHE_BYTES) -> LocalTokenizer:
    """Loads the tokenizer from a folder with `tokenizer.json`, or from such a file itself. Blocks.

    Raises:
        TokenizerError: with what is wrong.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TokenizerError(f"{file} cannot be read: {error.strerror}") from error
    except Exception as error:  # the library's errors are of no class of their own
        raise TokenizerError(f"{file} is not a tokenizer: {error}") from error
    config = _config(file.with_name("tokenizer_config.json"))
    _complete(tokenizer, config)
    specials = {name: text for name in _NAMED if (text := _content(config.get(name))) is not None}
    try:
        templates = {name: ChatTemplate(text, specials) for name, text in _templates(file.parent, config).items()}
    except TemplateError as error:
        raise TokenizerError(f"the chat template in {file.parent} is invalid: {error}") from error
    return LocalTokenizer(tokenizer, templates, cache_bytes)


def _config(path: Path) -> dict[str, object]:
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return cast("dict[str, object]", found)


def _templates(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Returns chat templates by name. A separate file has precedence over the configuration."""
    given = config.get("chat_template")
    found: dict[str, str] = {}
    if isinstance(given, str):
        found["default"] = given
    elif isinstance(given, list):
        for entry in cast("list[object]", given):
            named = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
            name, text = named.get("name"), named.get("template")
            if not isinstance(name, str) or not isinstance(text, str):
                raise TokenizerError("chat_template in tokenizer_config.json: each one has a name and a template")
            found[name] = text
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    kept = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    return kept or found


def _complete(tokenizer: Tokenizer, config: Mapping[str, object]) -> None:
    """Adds tokens that only the configuration names.

    Its settings of ends (`add_bos_token`) count only without `tokenizer.json`, whose own post-processor has them.
    """
    add = cast("Callable[[list[AddedToken]], int]", tokenizer.add_tokens)  # pyright: ignore[reportUnknownMemberType]
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder")
    entries = cast("dict[str, object]", listed) if isinstance(listed, dict) else {}
    for number in sorted(entries, key=lambda text: int(text) if _ID.fullmatch(text) else 0):
        entry = entries[number]
        content = _content(entry)
        if content is not None and content not in known:
            flags = cast("dict[str, object]", entry)
            add([AddedToken(content, **{name: flags.get(name) is True for name in _FLAGS})])
            known.add(content)
    for name in _NAMED:
        content = _content(config.get(name))
        if content is not None and content not in known:
            add([AddedToken(content, special=True)])
            known.add(content)


def _content(value: object) -> str | None:
    """Returns a token's text, given plainly or as an object."""
    if isinstance(value, dict):
        value = cast("dict[str, object]", value).get("content")
    return value if isinstance(value, str) else None
