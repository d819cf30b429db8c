"""Everything that has a name here (commands, stores, policies, managers, later dialects) is an entry point.

A third party adds one in its own `pyproject.toml`, without touching this project:

    [project.entry-points."kvparams.policies"]
    nearest = "their_package.policies:Nearest"

The one rule: nothing is imported before it is asked for by name.
"""

from importlib.metadata import EntryPoint, entry_points

from kvparams.errors import PluginError

__all__ = ["load", "names"]


def names(kind: str) -> list[str]:
    """The names registered in the group `kvparams.<kind>`, sorted."""
    return sorted({point.name for point in entry_points(group=f"kvparams.{kind}")})


def load(kind: str, name: str) -> object:
    """What is registered under `name` in the group `kvparams.<kind>`.

    Raises:
        PluginError: the name is unknown (the message lists the known ones), registered twice for different objects,
            or its module cannot be imported (the message says what is missing).
    """
    group = f"kvparams.{kind}"
    found: dict[str, EntryPoint] = {point.value: point for point in entry_points(group=group, name=name)}
    if not found:
        known = ", ".join(names(kind)) or "none"
        raise PluginError(f"no {name!r} is registered in {group!r}; known: {known}")
    if len(found) > 1:
        raise PluginError(f"{name!r} is registered more than once in {group!r}: {', '.join(sorted(found))}")
    (point,) = found.values()
    try:
        return point.load()
    except ImportError as error:
        extra = point.extras or [point.value.split(".")[0].removeprefix("kvparams_")]
        raise PluginError(
            f"{name!r} ({point.value}) cannot be imported: {error}. "
            f"If a package is missing, install the extra: pip install 'kvparams[{','.join(extra)}]'"
        ) from error
