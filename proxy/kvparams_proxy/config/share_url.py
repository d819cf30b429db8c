"""The URL of `--share`: where the proxies of a site find each other.

valkey://host:6379?prefix=site-a        a Valkey server; valkeys:// speaks TLS
"""

import re
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from kvparams.settings_model import did_you_mean

__all__ = ["DEFAULT_PREFIX", "ShareURL", "parse_share_url"]

DEFAULT_PREFIX: Final = "kvparams"
_SCHEMES: Final = ("valkey", "valkeys")
_REDIS: Final = {"redis": "valkey", "rediss": "valkeys"}
_MAX_PREFIX: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ShareURL(NamedTuple):
    """A checked URL."""

    server: str
    """The URL of the server, which may hold a password."""
    prefix: str
    """The name of the site; everything on the server begins with it."""

    def __str__(self) -> str:
        """Returns the URL without user and password."""
        parts = urlsplit(self.server)
        host = parts.hostname or ""
        place = f"[{host}]" if ":" in host else host
        if parts.port is not None:
            place += f":{parts.port}"
        return urlunsplit((parts.scheme, place, parts.path, urlencode({"prefix": self.prefix}), ""))


def parse_share_url(text: str) -> ShareURL:
    """Parses the URL.

    Raises:
        ValueError: what is wrong and what to write instead; never a password.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError("must be a URL such as valkey://host:6379?prefix=site-a") from None
    if parts.scheme not in _SCHEMES:
        nearest = did_you_mean(parts.scheme, _SCHEMES).replace("? ", "://?")
        hint = f"; {nearest}" if nearest else ""
        if parts.scheme in _REDIS:
            hint = f"; {parts.scheme}:// is written {_REDIS[parts.scheme]}:// here"
        raise ValueError(f"must begin with valkey:// or valkeys://{hint}")
    if not parts.hostname or port == 0 or parts.fragment:
        raise ValueError("must name a host and a port, such as valkey://host:6379?prefix=site-a")
    if parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        raise ValueError("the path may only be the number of a database, such as valkey://host:6379/0")
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    prefix = settings.pop("prefix", DEFAULT_PREFIX)
    for name in settings:
        if _NAME.fullmatch(name) is None:  # perhaps the rest of a password with a ? in it
            raise ValueError("a setting behind ? has a name that is none; write ? # / and @ percent-encoded")
        raise ValueError(f"{name!r} is no setting of it; {did_you_mean(name, ['prefix'])}it has `prefix`")
    if not 1 <= len(prefix) <= _MAX_PREFIX or not prefix.isascii() or not prefix.isprintable() or " " in prefix:
        raise ValueError(f"prefix must have 1 to {_MAX_PREFIX} visible ASCII characters")
    return ShareURL(urlunsplit((parts.scheme, parts.netloc, parts.path, "", "")), prefix)
