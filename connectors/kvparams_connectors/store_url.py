"""A store's URL and the settings in it: `scheme://place?name=value&name=value`.

`store_settings` has the models of the settings. A URL may have a secret in it where it should have none, so what is
said of one is what `redact_url` leaves of it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final
from urllib.parse import parse_qsl, unquote, unquote_plus, urlsplit

from kvparams.errors import KVParamsError

__all__ = ["StoreError", "StoreURL", "StoreUnreachable", "is_loopback", "parse_size", "redact_url"]

_UNITS: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE: Final = re.compile(r"([1-9][0-9]{0,14})([A-Za-z]*)")
_MAX_SETTINGS: Final = 64

_PARTS: Final = re.compile(
    r"(?:([A-Za-z][A-Za-z0-9+.-]*):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?",
    re.DOTALL,
)
_PLACE: Final = re.compile(r"([A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]*\])(?::(.*))?", re.DOTALL)
_PORT: Final = re.compile(r"[0-9]{0,5}")
_PATH: Final = re.compile(r"[\w./~+%,: -]*")
_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
_ANY_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Misspelt ones, too: an error shows them."""
_VALUE: Final = re.compile(r"[A-Za-z0-9._:/%+-]{0,128}")
_TIER: Final = re.compile(r"l[1-9]")
_HARMLESS: Final = frozenset({
    "http", "lease", "max_value", "ports", "prefix", "protocol", "replicas", "segment", "size", "threads", "transport",
    "ttl", "write",
})  # fmt: skip
"""Settings whose values are shown: numbers, choices and names."""
_HIDDEN: Final = "..."


class StoreError(KVParamsError):
    """A store cannot be opened as asked; the message says what is wrong and what to do."""


class StoreUnreachable(StoreError):
    """Nobody answers where the store should be: it may be there later, with the same settings."""


def is_loopback(host: str) -> bool:
    """Returns True if only this machine can reach a server at this host."""
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


def redact_url(text: str) -> str:
    """Returns a printable form of a URL, good or malformed.

    It has no user and no password, and only the names of unknown settings.

    `valkey://...@host:6379?ttl=5&password=...`; a tier's URL stands in parentheses: `tiered:?l1=(memory:?size=1GiB)`.
    """
    return _shown(text, tiers=True)


def _shown(text: str, *, tiers: bool) -> str:
    match = _PARTS.fullmatch(text)
    if match is None:
        return _HIDDEN
    scheme, place, path, query, rest = match.groups()
    # An unescaped / ? or # in a password ends the place too early; then the @ stands behind it.
    astray = "@" in f"{path}{query}{rest}"
    found = f"{scheme}:" if scheme else ""
    if place is not None:
        found += f"//{_shown_place(place, hide=astray)}"
    if astray or not _PATH.fullmatch(path):
        path = f"{'/' if path.startswith('/') else ''}{_HIDDEN if path.strip('/') else ''}"
    found += path
    if query is not None:
        found += "?" + "&".join(_shown_setting(*one.partition("="), tiers=tiers) for one in query.split("&"))
    return f"{found}#{_HIDDEN}" if rest is not None else found


def _shown_place(place: str, *, hide: bool) -> str:
    _, at, host = place.rpartition("@")
    match = _PLACE.fullmatch(host)
    if match is None or (host and hide):
        host = _HIDDEN
    elif match[2] is not None and not _PORT.fullmatch(match[2]):
        host = f"{match[1]}:{_HIDDEN}"
    return f"{_HIDDEN}@{host}" if at else host


def _shown_setting(name: str, equals: str, value: str, *, tiers: bool) -> str:
    if not equals or not _NAME.fullmatch(name):
        return _HIDDEN
    if tiers and _TIER.fullmatch(name):
        return f"{name}=({_shown(unquote_plus(value), tiers=False)})"
    return f"{name}={value if name in _HARMLESS and _VALUE.fullmatch(value) else _HIDDEN}"


@dataclass(frozen=True, slots=True, repr=False)
class StoreURL:
    """A `StoreURL` holds the parts of a store's URL.

    Its `repr` and its `redacted` can be shown; the other fields are as they were given.
    """

    raw: str
    """The URL itself, to open it with: never for a message or a log."""
    scheme: str
    location: str
    """What stands between `//` and the path: a host and port, or nothing."""
    path: str
    settings: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def parse(cls, text: str) -> "StoreURL":
        """Take a URL apart.

        Raises:
            StoreError: it has no scheme, a user or a password, or a setting that stands there twice or has no value.
        """
        # The errors' own words have pieces of the URL in them, so they are neither said nor kept as the cause.
        try:
            parts = urlsplit(text)
        except ValueError:
            raise StoreError(
                f"{redact_url(text)!r} is not a store's URL: the part after // is no host and port"
            ) from None
        try:
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True, max_num_fields=_MAX_SETTINGS)
        except ValueError:
            what = f"its settings are not name=value&name=value, at most {_MAX_SETTINGS}"
            raise StoreError(f"{redact_url(text)!r} is not a store's URL: {what}") from None
        if not parts.scheme:
            raise StoreError(
                f"{redact_url(text)!r} is not a store's URL; write for example memory:?size=1GiB or file:///path"
            )
        if "@" in parts.netloc:
            what = "has a user or password before the host; use the settings user= and password_file= instead"
            raise StoreError(f"{parts.scheme} store: {redact_url(text)!r} {what}")
        settings = dict(pairs)
        if len(settings) != len(pairs):
            raise StoreError(f"{redact_url(text)!r} has the same setting twice")
        if not all(map(_ANY_NAME.fullmatch, settings)):  # perhaps the rest of a password with a ? in it
            what = "has a setting whose name is none; write ? # / and @ percent-encoded"
            raise StoreError(f"{redact_url(text)!r} {what}")
        return cls(text, parts.scheme, parts.netloc, unquote(parts.path), settings)

    @property
    def redacted(self) -> str:
        """The URL as far as it may be shown: for messages and logs."""
        return redact_url(self.raw)

    def __repr__(self) -> str:
        """Only what may be shown."""
        return f"StoreURL({self.redacted!r})"
