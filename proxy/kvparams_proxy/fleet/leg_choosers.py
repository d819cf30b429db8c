"""Chooses among the candidates for a leg: the policy of its model, with its turns and what is believed to be cached."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from kvparams.instances import RequestFacts, SchedulingPolicy
from kvparams.routing.model_settings import SettingsByModel
from kvparams_proxy.fleet.member import Member

if TYPE_CHECKING:
    from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel

__all__ = ["LegChooser", "LegChoosers"]


class LegChooser:
    """A policy, the number of its choices, and the prefix cache model if the policy looks at caches."""

    __slots__ = ("policy", "prefixes", "turn")

    def __init__(self, policy: SchedulingPolicy, prefixes: "PrefixCacheModel | None") -> None:
        """`prefixes` is the model of the role, whether the policy looks at it or not."""
        self.policy: Final = policy
        self.prefixes: Final = prefixes if getattr(policy, "uses_prefixes", False) else None
        self.turn = 0
        """The number of choices so far."""

    def choose(self, members: Sequence[Member], facts: RequestFacts) -> Member:
        """Chooses a member and uses up a turn. Where the policy looks at caches, the leg's work counts from now on."""
        turn = self.turn
        self.turn = turn + 1
        if self.prefixes is None:
            return self.policy.choose(members, facts, turn)
        return self.prefixes.choose(self.policy, members, facts, turn)


class LegChoosers:
    """The choosers of one role: the usual one, and those of models with a policy of their own."""

    def __init__(
        self,
        policy: SchedulingPolicy,
        prefixes: "PrefixCacheModel | None" = None,
        policies: Mapping[str, SchedulingPolicy] | None = None,
        models: SettingsByModel | None = None,
    ) -> None:
        """Creates a chooser for each policy.

        Args:
            policy: for models without one of their own.
            prefixes: the model of caches, where the role has one.
            policies: by the name of a model's entry.
            models: finds the entry of a model.
        """
        self._usual = LegChooser(policy, prefixes)
        self._by_entry: dict[str | None, LegChooser] = {
            name: LegChooser(each, prefixes) for name, each in (policies or {}).items()
        }
        self._models = models or SettingsByModel()
        every = (self._usual, *self._by_entry.values())
        self.prefixes: Final = next((each.prefixes for each in every if each.prefixes is not None), None)
        """The model of caches, if some policy looks at it."""

    def find(self, model: str | None) -> LegChooser:
        """Returns the chooser for legs of a model."""
        if not self._by_entry:
            return self._usual
        return self._by_entry.get(self._models.entry_name(model), self._usual)
