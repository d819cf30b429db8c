"""A store's URL and the settings in it: `scheme://place?name=value&name=value`.

The same names mean the same thing for every store (`size`, `threads`). The one rule: a setting that a store does not
know is refused, with the known ones listed; a misspelt limit must not be a limit that is silently not there.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from kvparams.errors import KVParamsError

__all__ = ["StoreError", "StoreURL", "StoreUnreachable", "on_loopback", "parse_size"]

_UNITS: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE: Final = re.compile(r"([1-9][0-9]{0,14})([A-Za-z]*)")
_MAX_SETTINGS: Final = 64


class StoreError(KVParamsError):
    """A store cannot be opened as asked; the message says what is wrong and what to do."""


class StoreUnreachable(StoreError):
    """Nobody answers where the store should be: it may be there later, with the same settings."""


def on_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def parse_size(text: str) -> int:
    """`"512MiB"` → 536870912. Units: none or B, KiB, MiB, GiB, TiB.

    Raises:
        StoreError: it is not a size.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        raise StoreError(f"{text!r} is not a size; write a whole number and one of B, KiB, MiB, GiB, TiB: 512MiB")
    return int(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True, slots=True)
class StoreURL:
    """A store's URL, taken apart."""

    text: str
    scheme: str
    place: str
    """What stands between `//` and the path: a host and port, or nothing."""
    path: str
    settings: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def parse(cls, text: str) -> "StoreURL":
        """Take a URL apart.

        Raises:
            StoreError: it has no scheme, or a setting stands there twice or has no value.
        """
        try:
            parts = urlsplit(text)
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True, max_num_fields=_MAX_SETTINGS)
        except ValueError as error:
            raise StoreError(f"{text!r} is not a store's URL: {error}") from error
        if not parts.scheme:
            raise StoreError(f"{text!r} is not a store's URL; write for example memory:?size=1GiB or file:///path")
        settings = dict(pairs)
        if len(settings) != len(pairs):
            raise StoreError(f"{text!r} says the same setting twice")
        return cls(text, parts.scheme, parts.netloc, unquote(parts.path), settings)

    def only(self, *known: str) -> None:
        """Refuse every setting that is not in `known`."""
        unknown = sorted(set(self.settings) - set(known))
        if unknown:
            raise StoreError(
                f"{self.scheme} store: unknown setting {', '.join(unknown)} in {self.text!r}; known: {', '.join(known)}"
            )

    def size(self, name: str) -> int | None:
        """The setting `name` in bytes; None if it is not there."""
        text = self.settings.get(name)
        return None if text is None else parse_size(text)

    def number(self, name: str, default: int, *, low: int, high: int) -> int:
        """The setting `name` as a whole number in [low, high]."""
        text = self.settings.get(name)
        if text is None:
            return default
        if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
            raise StoreError(f"{self.scheme} store: {name}={text} is not a whole number in [{low}, {high}]")
        return int(text)

    def choice(self, name: str, default: str, *others: str) -> str:
        """The setting `name`: `default` or one of `others`."""
        text = self.settings.get(name, default)
        if text != default and text not in others:
            raise StoreError(f"{self.scheme} store: {name}={text} is none of {', '.join((default, *others))}")
        return text
