"""Settings in a store's URL, as a pydantic model for each store: `StoreSettings`, and the types of its members.

The same names mean the same thing for every store (`size`, `prefix`). A setting that a store does not know is refused;
a misspelt limit must not be a limit that is silently not there. docs/configuration.md is made from these models.
"""

from collections.abc import Callable
from typing import Annotated, Final, Self

from pydantic import BeforeValidator, Field, PlainValidator, ValidationError

from kvparams.settings_model import Allowed, SettingsModel, describe_setting_errors, must_be_one_of
from kvparams_connectors.store_url import StoreError, StoreURL, parse_size

__all__ = ["DIGITS", "Devices", "FilePath", "Host", "Port", "Prefix", "Size", "StoreSettings", "one_of"]

_MOST_DIGITS: Final = 18


def _read_size(value: object) -> object:
    try:
        return parse_size(value) if isinstance(value, str) else value
    except StoreError:
        return value


def _read_digits(value: object) -> object:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS:
        return int(value)
    return value


DIGITS: Final = BeforeValidator(_read_digits)
"""Reads a whole number from its text."""
Size = Annotated[int, BeforeValidator(_read_size), Allowed("a size such as 512MiB (B, KiB, MiB, GiB or TiB)")]
Port = Annotated[int, DIGITS, Field(ge=1, le=65535), Allowed("a port from 1 to 65535")]
Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,253}$"), Allowed("a host name or an address, without a port")]
Devices = Annotated[str, Field(pattern=r"^[A-Za-z0-9._,-]{0,1024}$"), Allowed("names of devices, separated by commas")]
FilePath = Annotated[str, Field(min_length=1), Allowed("the path of a file")]
"""The file is not looked at."""
Prefix = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$"), Allowed("1 to 128 characters from A-Za-z0-9._-")]


def one_of(*names: str) -> PlainValidator:
    """Returns the check of a setting that is one of these names."""
    check: Callable[[object], str] = lambda value: must_be_one_of(value, names)  # noqa: E731
    return PlainValidator(check)


class StoreSettings(SettingsModel):
    """The settings that a store's URL may have. A subclass describes each of them."""

    @classmethod
    def read(cls, url: StoreURL) -> Self:
        """Returns the settings of a URL.

        Raises:
            StoreError: with everything that is wrong, and the URL as far as it may be shown.
        """
        try:
            return cls.model_validate(dict(url.settings))
        except ValidationError as error:
            raise StoreError(f"{url.scheme} store: {describe_setting_errors(error)}, in {url.redacted!r}") from None
