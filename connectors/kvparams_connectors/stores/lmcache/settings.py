"""The settings of stores on LMCache's servers: `lmcache://host:65432`, `lmcache-mp://127.0.0.1:5555?http=8080`."""

from typing import Annotated, Final

from pydantic import Field

from kvparams.settings_model import Allowed
from kvparams_connectors.store_settings import Port, Prefix, Size, StoreSettings
from kvparams_connectors.stores.lmcache.wire import LMCacheNames

__all__ = ["LMCacheMPSettings", "LMCacheSettings"]

_LARGEST_MP: Final = 1 << 30
_ShortPrefix = Annotated[
    str,
    Field(pattern=rf"^[A-Za-z0-9._-]{{1,{LMCacheNames.LONGEST_PREFIX}}}$"),
    Allowed(f"1 to {LMCacheNames.LONGEST_PREFIX} characters from A-Za-z0-9._-"),
]
_PREFIX: Final = "what every key begins with; deployments that share a server do not meet"


class LMCacheSettings(StoreSettings):
    """The settings of `lmcache://`."""

    prefix: Annotated[_ShortPrefix | None, Field(description=_PREFIX)] = None


class LMCacheMPSettings(StoreSettings):
    """The settings of `lmcache-mp://`. All who share values need the same `max_value` and `prefix`."""

    http: Annotated[Port, Field(description="the port of the server's administration")] = 8080
    max_value: Annotated[
        Annotated[Size, Field(le=_LARGEST_MP), Allowed("a size such as 4MiB, at most 1GiB")],
        Field(description="the largest value that is stored; every value takes as much room"),
    ] = 4 << 20
    prefix: Annotated[Prefix | None, Field(description=_PREFIX)] = None
