"""Every dialect that is registered, by name: its table, and for some how a proxy speaks it.

What is registered in `kvparams.dialects` is a `DialectTable`, or a `Dialect` that a proxy routes with, which has its
table as `get_table`. There is one registry: translation and routing read the same entries.
"""

from typing import Final, cast

from kvparams import plugins
from kvparams.dialects.interface import Dialect
from kvparams.dialects.table import DialectTable
from kvparams.errors import PluginError

__all__ = [
    "get_table",
    "load_routable_dialects",
    "load_tables",
    "load_tables_and_errors",
    "routable_dialect_names",
    "routable_dialects",
]

_MEMBERS: Final = sorted({*Dialect.__annotations__, *(name for name in vars(Dialect) if not name.startswith("_"))})
"""What a proxy asks of each."""


def load_tables() -> dict[str, DialectTable]:
    """Every dialect that can be translated.

    Raises:
        PluginError: one of them cannot be loaded.
    """
    found = {name: _table(name, one) for name, one in plugins.load_all_plugins("dialects").items()}
    return {name: one for name, one in found.items() if one is not None}


def load_tables_and_errors() -> tuple[list[DialectTable], list[PluginError]]:
    """Loads all tables as `load_tables` does, and returns the errors of those that cannot be loaded."""
    found: list[DialectTable] = []
    broken: list[PluginError] = []
    for name, one in plugins.load_each_plugin("dialects").items():
        try:
            table = _table(name, one)
        except PluginError as error:
            broken.append(error)
        else:
            found += [] if table is None else [table]
    return found, broken


def get_table(name: str) -> DialectTable:
    """The table of one dialect.

    Raises:
        PluginError: it is not registered, or has no table because it speaks our document alone.
    """
    found = _table(name, plugins.load_plugin("dialects", name))
    if found is None:
        raise PluginError(f"{name!r} says nothing beside our document: translate to or from 'kvparams'")
    return found


def load_routable_dialects() -> tuple[dict[str, Dialect], dict[str, str]]:
    """Every dialect that a proxy can speak, and of the other names why it cannot."""
    found: dict[str, Dialect] = {}
    refused: dict[str, str] = {}
    for name, one in plugins.load_each_plugin("dialects").items():
        try:
            _table(name, one)
        except PluginError as error:
            refused[name] = str(error)
            continue
        lacking = ", ".join(member for member in _MEMBERS if not hasattr(one, member))
        if isinstance(one, DialectTable):
            refused[name] = "its messages can be translated, but no proxy routes with it yet"
        elif lacking:
            refused[name] = f"it has no {lacking}: is it for another kvparams? See kvparams.dialects.interface.Dialect"
        else:
            found[name] = cast("Dialect", one)
    return found, refused


def routable_dialects() -> dict[str, Dialect]:
    """Every dialect that a proxy can speak; what cannot be loaded is left out."""
    return load_routable_dialects()[0]


def routable_dialect_names() -> list[str]:
    """The names of `routable_dialects`, for people."""
    return list(routable_dialects())


def _table(name: str, loaded: object) -> DialectTable | None:
    if isinstance(loaded, PluginError):
        raise loaded
    found = loaded if isinstance(loaded, DialectTable) else getattr(loaded, "table", None)
    if not isinstance(found, DialectTable):
        if not hasattr(loaded, "prefill_keys"):
            raise PluginError(f"{name!r} in 'kvparams.dialects' is neither a Table nor a Dialect")
        return None
    if found.name != name:
        raise PluginError(f"{name!r} in 'kvparams.dialects' is a table of another name: {found.name!r}")
    return found
