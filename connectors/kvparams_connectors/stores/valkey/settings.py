"""The settings of a Valkey store: `valkey://host:6379?prefix=prod&ttl=3600`, `valkeys://` for TLS."""

from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from kvparams.settings_model import Allowed
from kvparams_connectors.store_settings import DIGITS, FilePath, Prefix, StoreSettings

__all__ = ["ValkeySettings", "ValkeysSettings"]

_LONGEST_TTL_S: Final = 10 * 365 * 86400
_Lifetime = Annotated[
    int, DIGITS, Field(ge=1, le=_LONGEST_TTL_S), Allowed(f"a whole number of seconds from 1 to {_LONGEST_TTL_S}")
]
_Threads = Annotated[int, DIGITS, Field(ge=1, le=64), Allowed("a whole number from 1 to 64")]
_Text = Annotated[str, Field(min_length=1), Allowed("text, not empty")]


class ValkeySettings(StoreSettings):
    """See the module."""

    prefix: Annotated[
        Prefix | None, Field(description="what every key begins with; deployments that share a server do not meet")
    ] = None
    ttl: Annotated[
        _Lifetime | None, Field(description="the seconds after a put in which the server keeps the value")
    ] = None
    threads: Annotated[
        _Threads,
        Field(description="the number of batches that are worked on at a time, each over connections of its own"),
    ] = 1
    user: Annotated[_Text | None, Field(description="the name of the user; needs `password_file`")] = None
    password_file: Annotated[FilePath | None, Field(description="a file with the password")] = None

    @model_validator(mode="after")
    def _check_password(self) -> Self:
        if self.user is not None and self.password_file is None:
            raise ValueError("user is set, but password_file is not; set both")
        return self


class ValkeysSettings(ValkeySettings):
    """The settings of `valkeys://`."""

    ca: Annotated[
        FilePath | None,
        Field(description="a PEM file of the authorities that may have issued the server's certificate"),
    ] = None
    cert: Annotated[FilePath | None, Field(description="the certificate that the server is shown (PEM)")] = None
    key: Annotated[FilePath | None, Field(description="the private key of `cert` (PEM)")] = None

    @model_validator(mode="after")
    def _check_key(self) -> Self:
        if self.key is not None and self.cert is None:
            raise ValueError("key is set, but cert is not; set both or neither")
        return self
