"""The settings of a tiered store: `tiered:?l1=...&l2=...`."""

from typing import Annotated, Literal

from pydantic import Field

from kvparams.settings_model import Allowed
from kvparams_connectors.store_settings import StoreSettings, one_of

__all__ = ["TieredSettings"]

_Tier = Annotated[str, Field(min_length=1), Allowed("the URL of a store, percent-encoded")]


class TieredSettings(StoreSettings):
    """See the module."""

    l1: Annotated[_Tier | None, Field(description="the URL of the fastest tier, percent-encoded; required")] = None
    l2: Annotated[_Tier | None, Field(description="the URL of the next tier; required")] = None
    l3: Annotated[_Tier | None, Field(description="the URL of the next tier")] = None
    l4: Annotated[_Tier | None, Field(description="the URL of the next tier")] = None
    write: Annotated[
        Literal["through", "back"],
        one_of("through", "back"),
        Field(description="whether a put is done when the last tier has the value (through), or the first (back)"),
    ] = "through"
