"""Every dialect that is registered, by name: its table, and for some how a proxy speaks it.

What is registered in `kvparams.dialects` is a `Table`, or a `Dialect` that a proxy routes with, which has its table as
`table`. The one rule: there is one list; who needs a table and who routes look into the same.
"""

from typing import cast

from kvparams import plugins
from kvparams.dialects import Dialect
from kvparams.dialects.table import Table
from kvparams.errors import PluginError

__all__ = ["route_names", "routes", "table", "tables"]


def tables() -> dict[str, Table]:
    """Every dialect that can be translated.

    Raises:
        PluginError: one of them cannot be loaded.
    """
    found = {name: _table(one) for name, one in plugins.load_all("dialects").items()}
    return {name: one for name, one in found.items() if one is not None}


def table(name: str) -> Table:
    """The table of one dialect.

    Raises:
        PluginError: it is not registered, or has no table because it speaks our document alone.
    """
    found = _table(plugins.load("dialects", name))
    if found is None:
        raise PluginError(f"{name!r} says nothing beside our document: translate to or from 'kvparams'")
    return found


def routes() -> dict[str, Dialect]:
    """Every dialect that a proxy can speak.

    Raises:
        PluginError: one of them cannot be loaded.
    """
    loaded = plugins.load_all("dialects")
    return {name: cast("Dialect", one) for name, one in loaded.items() if not isinstance(one, Table)}


def route_names() -> list[str]:
    """The names of `routes`, for people: what cannot be loaded is left out here, and told when it is asked for."""
    loaded = plugins.load_each("dialects")
    return [name for name, one in loaded.items() if not isinstance(one, Table | PluginError)]


def _table(found: object) -> Table | None:
    found = found if isinstance(found, Table) else getattr(found, "table", None)
    return found if isinstance(found, Table) else None
