"""The settings of a memory store: `memory:?size=1GiB`."""

from typing import Annotated

from pydantic import Field

from kvparams_connectors.store_settings import Size, StoreSettings

__all__ = ["MemorySettings"]


class MemorySettings(StoreSettings):
    """See the module."""

    size: Annotated[Size, Field(description="the size of all values together")] = 1 << 30
