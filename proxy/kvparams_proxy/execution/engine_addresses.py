"""Hosts and addresses of engines, recognized in text that a client may get."""

import re
from collections import deque
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from kvparams.routing.handoff_verifier import parse_declared_address
from kvparams_proxy.fleet.member import Member

__all__ = ["RANDOM_ID", "EngineAddresses"]

_LOOKS: Final = (
    r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?!\d|\.\d)",  # IPv4
    r"(?<![0-9A-Za-z:])(?:[0-9A-Fa-f]{0,4}:){3,7}[0-9A-Fa-f]{1,4}",  # IPv6
    r"(?<![A-Za-z0-9])ip-\d{1,3}(?:-\d{1,3}){3}(?!\d)",  # what clouds call a machine
    r"(?<![A-Za-z0-9])localhost(?![A-Za-z0-9])",
    r"(?<![A-Za-z0-9])[A-Za-z0-9]{1,63}(?:[-.][A-Za-z0-9]{1,63}){1,8}:\d{4,5}(?!\d)",  # a host and its port
    r"[A-Za-z0-9]\.(?:svc|internal|local)(?![A-Za-z0-9])",  # names inside a cluster
    r"Traceback \(most recent call last",
    r"\w\.(?:py|pyx|cpp|cu|rs|so)(?![A-Za-z0-9])",  # places in code
)
RANDOM_ID: Final = re.compile(r"(?:chat)?cmpl-[0-9a-f]{8,64}")
"""A response id that cannot be an address by its looks."""
_MOST_FOUND: Final = 16
"""Addresses in one text that are looked for in what the client sent."""
_REMEMBERED: Final = 64
"""Engines that have left and are still hidden."""


class EngineAddresses:
    """Hosts of the engines, and patterns that look like addresses. A `fleet_members.FleetListener`."""

    __slots__ = ("_gone", "_pattern", "_urls", "has_random_looking_host")

    def __init__(self, urls: Iterable[str] = ()) -> None:
        """`urls` of engines."""
        self._urls = list(urls)
        self._gone: deque[str] = deque(maxlen=_REMEMBERED)
        """Of the last that have left: their last answers are still on the way."""
        self._pattern: re.Pattern[str] | None = None
        self.has_random_looking_host = _like_random(self._urls)
        """Whether the name of a host is one that could be random: then nothing is random by its looks alone."""

    def joined(self, member: Member) -> None:
        """Adds the host of a new member."""
        self._urls.extend(_urls(member))
        self._changed()

    def left(self, member: Member) -> None:
        """Moves the URLs of a member that has left to those of former members, which stay recognized."""
        for url in _urls(member):
            self._urls.remove(url)
            self._gone.append(url)
        self._changed()

    def _changed(self) -> None:
        self._pattern = None
        self.has_random_looking_host = _like_random([*self._urls, *self._gone])

    def occur_in(self, text: str, sent: bytes = b"") -> bool:
        """Returns whether `text` contains an address that is not in `sent`, the client's own request."""
        if self._pattern is None:
            self._pattern = _pattern([*self._urls, *self._gone])
        for number, found in enumerate(self._pattern.finditer(text)):
            if number == _MOST_FOUND or not sent or found.group().encode("utf-8", "replace") not in sent:
                return True
        return False


def _urls(member: Member) -> Iterable[str]:
    instance = member.instance
    declared_hosts = (parse_declared_address(text).host for text in instance.addresses)
    names = (f"//{host}" for host in declared_hosts if host and ":" not in host)
    return (instance.url, *(() if instance.bootstrap is None else (instance.bootstrap,)), *names)


def _names(urls: Iterable[str]) -> set[str]:
    hosts = {urlsplit(url).hostname or "" for url in urls}
    return {name for host in hosts for name in (host, host.partition(".")[0])} - {""}


def _like_random(urls: Iterable[str]) -> bool:
    return any(RANDOM_ID.fullmatch(f"cmpl-{name}") for name in _names(urls))


def _pattern(urls: Iterable[str]) -> re.Pattern[str]:
    names = _names(urls)
    known = "|".join(_name(name) for name in sorted(names) if not name.isdecimal())
    parts = (*_LOOKS, rf"(?<![A-Za-z0-9])(?:{known})(?![A-Za-z0-9])") if known else _LOOKS
    return re.compile("|".join(parts), re.IGNORECASE)


def _name(name: str) -> str:
    """Returns a pattern for a host as it may be written. A plain word is an address only with a port behind it."""
    return rf"{name}:\d{{2,5}}" if name.isalpha() else re.escape(name)
