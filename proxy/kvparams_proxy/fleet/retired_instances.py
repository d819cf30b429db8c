"""Tracks legs on instances that are no longer in the fleet: earlier incarnations, and removed members.

An instance is kept exactly as long as a leg runs on it.
"""

from kvparams.instances import Instance
from kvparams_proxy.fleet.member import Member

__all__ = ["RetiredInstances"]


class _RemainingLegs:
    __slots__ = ("left", "member")

    def __init__(self, member: Member, left: int) -> None:
        self.member = member
        self.left = left


class RetiredInstances:
    """The retired instances of one fleet."""

    def __init__(self) -> None:
        self._legs: dict[Instance, _RemainingLegs] = {}

    def __len__(self) -> int:
        return len(self._legs)

    def add(self, member: Member) -> None:
        """Adds `member.instance`, which is an earlier incarnation from now on."""
        legs = member.own_in_flight - sum(legs.left for legs in self._legs.values() if legs.member is member)
        if legs:
            self._legs[member.instance] = _RemainingLegs(member, legs)

    def member(self, instance: Instance) -> Member:
        """Returns the member of a retired instance.

        Raises:
            KeyError: no leg runs there.
        """
        return self._legs[instance].member

    def release(self, instance: Instance) -> Member:
        """Releases one ended leg and returns the member of its instance.

        Raises:
            ValueError: none runs there.
        """
        legs = self._legs.get(instance)
        if legs is None:
            raise ValueError(f"{instance.id} is released more often than it was acquired")
        legs.left -= 1
        if not legs.left:
            del self._legs[instance]
        return legs.member
