"""Every dialect that is registered, by name: its table, and for some how a proxy speaks it.

What is registered in `kvparams.dialects` is a `Table`, or a `Dialect` that a proxy routes with, which has its table as
`table`. The one rule: there is one list; who needs a table and who routes look into the same.
"""

from typing import Final, cast

from kvparams import plugins
from kvparams.dialects import Dialect
from kvparams.dialects.table import Table
from kvparams.errors import PluginError

__all__ = ["each_route", "each_table", "route_names", "routes", "table", "tables"]

_MEMBERS: Final = sorted({*Dialect.__annotations__, *(name for name in vars(Dialect) if not name.startswith("_"))})
"""What a proxy asks of each."""


def tables() -> dict[str, Table]:
    """Every dialect that can be translated.

    Raises:
        PluginError: one of them cannot be loaded.
    """
    found = {name: _table(name, one) for name, one in plugins.load_all("dialects").items()}
    return {name: one for name, one in found.items() if one is not None}


def each_table() -> tuple[list[Table], list[PluginError]]:
    """As `tables`, for those who go on without what cannot be loaded: the second list says what that is, and why."""
    found: list[Table] = []
    broken: list[PluginError] = []
    for name, one in plugins.load_each("dialects").items():
        try:
            table = _table(name, one)
        except PluginError as error:
            broken.append(error)
        else:
            found += [] if table is None else [table]
    return found, broken


def table(name: str) -> Table:
    """The table of one dialect.

    Raises:
        PluginError: it is not registered, or has no table because it speaks our document alone.
    """
    found = _table(name, plugins.load("dialects", name))
    if found is None:
        raise PluginError(f"{name!r} says nothing beside our document: translate to or from 'kvparams'")
    return found


def each_route() -> tuple[dict[str, Dialect], dict[str, str]]:
    """Every dialect that a proxy can speak, and of the other names why it cannot."""
    found: dict[str, Dialect] = {}
    refused: dict[str, str] = {}
    for name, one in plugins.load_each("dialects").items():
        try:
            _table(name, one)
        except PluginError as error:
            refused[name] = str(error)
            continue
        lacking = ", ".join(member for member in _MEMBERS if not hasattr(one, member))
        if isinstance(one, Table):
            refused[name] = "its messages can be translated, but no proxy routes with it yet"
        elif lacking:
            refused[name] = f"it has no {lacking}: is it for another kvparams? See kvparams.dialects.Dialect"
        else:
            found[name] = cast("Dialect", one)
    return found, refused


def routes() -> dict[str, Dialect]:
    """Every dialect that a proxy can speak; what cannot be loaded is left out."""
    return each_route()[0]


def route_names() -> list[str]:
    """The names of `routes`, for people."""
    return list(routes())


def _table(name: str, loaded: object) -> Table | None:
    if isinstance(loaded, PluginError):
        raise loaded
    found = loaded if isinstance(loaded, Table) else getattr(loaded, "table", None)
    if not isinstance(found, Table):
        if not hasattr(loaded, "prefill_keys"):
            raise PluginError(f"{name!r} in 'kvparams.dialects' is neither a Table nor a Dialect")
        return None
    if found.name != name:
        raise PluginError(f"{name!r} in 'kvparams.dialects' is a table of another name: {found.name!r}")
    return found
