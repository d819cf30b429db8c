"""Decides which instances may be paired: by connector, group and compatibility key.

A group is a replica: its prefill and decode instances belong together. Those of no group pair freely with others of
none. A compatibility key says that two builds, layouts or versions understand each other's KV. All three must be equal
on both sides; an absent value equals an absent value.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from kvparams.instances import Instance, Role

__all__ = ["PairKey", "PairTarget", "may_pair", "pair_key"]


_SAME: Final[Mapping[str, str]] = {"store-drop": "store", "store-meet": "store"}
"""Dialects that say only what a proxy does with one and the same connector: its engines find each other's pages."""


class PairKey(NamedTuple):
    """A `PairKey` holds the values that two instances must have in common."""

    connector: str
    group: str | None
    compatibility: str | None

    def describe(self) -> str:
        """For people."""
        group = "of no group" if self.group is None else f"of the group {self.group}"
        key = "" if self.compatibility is None else f" and the compatibility key {self.compatibility}"
        return f"{group} with the connector {self.connector}{key}"


PairTarget = Instance | Role
"""Who runs, or will run, the other leg: this instance; somebody of this role who has yet to be chosen."""


def pair_key(instance: Instance) -> PairKey:
    """Its own."""
    return PairKey(_SAME.get(instance.dialect, instance.dialect), instance.group, instance.compatibility)


def may_pair(one: Instance, other: Instance) -> bool:
    """Returns True if one of these instances may fetch the other's KV."""
    return pair_key(one) == pair_key(other)
