"""Settings that stand in an engine's own configuration, as JSON or YAML that the engine has parsed.

Names that the engine itself reads there are left out; every other name must be known. A null is a setting that is left
out. Everything wrong with single settings is said at once.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from kvparams.page_auth import PageAuthKeys
from kvparams.settings_model import Allowed, SettingsModel, describe_setting_errors
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.transfer.page_auth_keys import read_page_auth_keys

__all__ = ["Count", "EngineSettings", "FilePath", "PositiveNumber", "Switch", "Text"]

Text = Annotated[str, Field(min_length=1), Allowed("text, not empty")]
Count = Annotated[int, Field(ge=1), Allowed("a whole number, at least 1")]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False), Allowed("a number above 0")]
Switch = Annotated[bool, Allowed("true or false")]
FilePath = Annotated[
    Path,
    BeforeValidator(lambda value: Path(value) if isinstance(value, str) and value else value),
    Allowed("the path of a file"),
]
"""The file is not looked at."""
_URL = Annotated[str, Field(min_length=1), Allowed("the store's URL: valkey://host:6379")]


class EngineSettings(SettingsModel):
    """Settings that every adapter has. The docstrings of fields are their descriptions in the reference."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    null_is_absent: ClassVar[bool] = True

    store: _URL = Field("", validate_default=True, repr=False)
    """The URL of a store that other processes reach."""
    revision: Text | None = None
    """Identifies these weights among others of the same name (default: what the files say)."""
    seal_keys: FilePath | None = None
    """The key file of authenticated pages; all engines that share need the same one."""

    @classmethod
    def read(cls, given: Mapping[str, object], where: str, of_engine: Collection[str]) -> Self:
        """Returns the settings in an engine's configuration.

        Args:
            given: the configuration.
            where: its name, for errors.
            of_engine: names that the engine reads itself.

        Raises:
            StoreError: with everything that is wrong.
        """
        try:
            return cls.model_validate({name: value for name, value in given.items() if name not in of_engine})
        except ValidationError as error:
            raise StoreError(f"{where}: {describe_setting_errors(error)}") from None

    def read_seals(self) -> PageAuthKeys | None:
        """Returns the keys of authenticated pages.

        Raises:
            PageAuthError: they cannot be read.
        """
        return None if self.seal_keys is None else read_page_auth_keys(self.seal_keys)
