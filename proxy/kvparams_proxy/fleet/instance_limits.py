"""The limits of the instances of one role: those for all, or those of the models that an instance serves."""

from collections.abc import Iterable
from typing import Final

from kvparams.instances import Role
from kvparams.routing.admission import RoleLimits
from kvparams.routing.model_settings import SettingsByModel
from kvparams_proxy.fleet.member import Member

__all__ = ["InstanceLimits"]


class InstanceLimits:
    """Says whether an instance has room for a leg."""

    def __init__(self, role: Role, usual: RoleLimits, models: SettingsByModel | None = None) -> None:
        """`usual`: for instances whose models have no limits of their own in `models`."""
        self.usual: Final = usual
        self._role = role
        self._models = models or SettingsByModel()
        self._by_model = False
        """Whether some model has limits of its own for this role."""
        self.exist = False
        """Whether some instance has, or could have, a limit."""
        self.count_tokens = False
        """Whether some limit is in tokens."""
        self.settings_changed(())

    def settings_changed(self, members: Iterable[Member]) -> None:
        """Hears that what is set for models has changed."""
        own = [each.limits[self._role] for each in self._models.entries.values() if self._role in each.limits]
        self._by_model = bool(own)
        self.count_tokens = any(each.tokens is not None for each in (self.usual, *own))
        self.exist = self.count_tokens or any(each.requests is not None for each in (self.usual, *own))
        self._assign(members)

    def members_changed(self, members: Iterable[Member]) -> None:
        """Hears that members, or the models that they serve, have changed."""
        if self._by_model:
            self._assign(members)

    def of(self, member: Member) -> RoleLimits:
        """Returns the limits of an instance."""
        return member.limits or self.usual

    def have_room(self, member: Member, tokens: int) -> bool:
        """Returns whether a leg has room. Foreign legs alone leave room for one: engines may report legs that ended."""
        limits = member.limits or self.usual
        if limits.requests is not None and member.in_flight >= limits.requests and member.known_in_flight:
            return False
        has_none = member.tokens == member.foreign_tokens
        return limits.tokens is None or has_none or member.tokens + tokens <= limits.tokens

    def _assign(self, members: Iterable[Member]) -> None:
        for member in members:
            if member.instance.role is self._role:
                member.limits = self._models.limits_of(self._role, member.models, self.usual)
