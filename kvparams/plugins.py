"""Loads plugins by name from entry points: commands, dialects, stores, policies and managers.

A third party adds one in its own `pyproject.toml`, without touching this project:

    [project.entry-points."kvparams.policies"]
    nearest = "their_package.policies:Nearest"

Nothing is imported before it is asked for by name.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from kvparams.errors import PluginError

__all__ = ["load_all_plugins", "load_each_plugin", "load_plugin", "plugin_names"]

_OURS: Final = frozenset({"kvparams", "kvparams_proxy", "kvparams_connectors"})
"""The packages of this project, which has extras."""
_MAX_NAME: Final = 64
"""Characters of a name that are compared with the known ones."""


def plugin_names(kind: str) -> list[str]:
    """The names registered in the group `kvparams.<kind>`, sorted."""
    return sorted({point.name for point in entry_points(group=f"kvparams.{kind}")})


def load_plugin(kind: str, name: str) -> object:
    """Returns the object that is registered under `name` in the group `kvparams.<kind>`.

    Raises:
        PluginError: the name is unknown (the message lists the known ones), registered twice for different objects,
            or its module cannot be imported, or lacks or refuses the object (the message says why).
    """
    found = tuple(entry_points(group=f"kvparams.{kind}", name=name))
    if not found:
        names = plugin_names(kind)
        known = ", ".join(names) or "none"
        near = get_close_matches(name.lower()[:_MAX_NAME], names, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise PluginError(f"no {name!r} is registered in 'kvparams.{kind}'; {hint}known: {known}")
    return _loaded(kind, name, found)


def load_all_plugins(kind: str) -> dict[str, object]:
    """Returns all objects that are registered in the group `kvparams.<kind>`, by name, sorted.

    Raises:
        PluginError: as `load_plugin`.
    """
    found = load_each_plugin(kind)
    for one in found.values():
        if isinstance(one, PluginError):
            raise one
    return found


def load_each_plugin(kind: str, only: str | None = None) -> dict[str, object]:
    """As `load_all_plugins`; what cannot be loaded is there as its `PluginError`.

    With `only`, nothing of another name is loaded.

    What is installed is looked through once, which takes some milliseconds; a `load_plugin` of every name would do so
    every time.
    """
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=f"kvparams.{kind}"):
        if only in (None, point.name):
            found.setdefault(point.name, []).append(point)
    loaded: dict[str, object] = {}
    for name in sorted(found):
        try:
            loaded[name] = _loaded(kind, name, found[name])
        except PluginError as error:
            loaded[name] = error
    return loaded


def _loaded(kind: str, name: str, registered: Iterable[EntryPoint]) -> object:
    found = {point.value: point for point in registered}
    if len(found) > 1:
        raise PluginError(f"{name!r} is registered more than once in 'kvparams.{kind}': {', '.join(sorted(found))}")
    (point,) = found.values()
    try:
        return point.load()
    except Exception as error:  # whatever a module of somebody else raises while it is imported
        package = point.module.split(".")[0]
        hint = ""
        if package in _OURS and isinstance(error, ImportError):
            extra = ",".join(point.extras or [package.removeprefix("kvparams_")])
            hint = f". If a package is missing, install the extra: pip install 'kvparams[{extra}]'"
        raise PluginError(f"{name!r} ({point.value}) cannot be loaded: {error}{hint}") from error
