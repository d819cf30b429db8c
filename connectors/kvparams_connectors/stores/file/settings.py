"""The settings of a file store: `file:///dev/shm/kv?size=4GiB`."""

from typing import Annotated

from pydantic import Field

from kvparams_connectors.store_settings import Size, StoreSettings

__all__ = ["FileSettings"]


class FileSettings(StoreSettings):
    """See the module."""

    size: Annotated[
        Size | None, Field(description="the size of the file (default: that of the existing file, or 1GiB)")
    ] = None
