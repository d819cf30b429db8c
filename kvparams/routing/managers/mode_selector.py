"""Chooses the manager of a request where several are active, by conditions and priorities.

The choice is pure and total: one mode must accept every request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvparams.instances import RequestFacts
from kvparams.routing.managers.interface import DisaggregatedRequestManager

__all__ = ["ActiveManager", "ManagerMode", "ModeCondition", "ModeSelector"]


@dataclass(frozen=True, slots=True)
class ModeCondition:
    """For which requests a mode is meant: all that is said must hold; what is not said holds always."""

    model: frozenset[str] = frozenset()
    """One of these; anything where empty, as are the next ones."""
    endpoint: frozenset[str] = frozenset()
    """Paths, such as `/v1/completions`."""
    tenant: frozenset[str] = frozenset()
    session: frozenset[str] = frozenset()
    stream: bool | None = None
    min_tokens: int = 0
    """Of the prompt, about, as `RequestFacts.prompt_tokens`."""
    max_tokens: int | None = None

    def matches(self, request: RequestFacts, endpoint: str, stream: bool) -> bool:
        """Returns True if the condition accepts this request."""
        return (
            self.min_tokens <= request.prompt_tokens
            and (self.max_tokens is None or request.prompt_tokens <= self.max_tokens)
            and (self.stream is None or self.stream is stream)
            and (not self.model or request.model in self.model)
            and (not self.endpoint or endpoint in self.endpoint)
            and (not self.tenant or request.tenant in self.tenant)
            and (not self.session or request.session in self.session)
        )


_ALWAYS: Final = ModeCondition()


@dataclass(frozen=True, slots=True)
class ManagerMode:
    """A manager in use, as an operator says it."""

    use: str
    """Its name in the entry-point group `kvparams.managers`."""
    when: ModeCondition = _ALWAYS
    priority: int = 0
    """Of those whose conditions hold, the highest is taken, of equals the one named first."""
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    """See `kvparams.routing.managers.manager_options`."""


class ActiveManager(NamedTuple):
    """A mode and its manager."""

    mode: ManagerMode
    manager: DisaggregatedRequestManager


class ModeSelector:
    """The modes that are active now. It never changes: who switches makes another one."""

    __slots__ = ("_order", "_sole", "active")

    def __init__(self, active: Sequence[ActiveManager]) -> None:
        """Orders the active managers by priority.

        Raises:
            ValueError: no mode is for every request, or one can never be taken.
        """
        self.active = tuple(active)
        order = sorted(self.active, key=lambda each: -each.mode.priority)
        always = next((place for place, each in enumerate(order) if each.mode.when == _ALWAYS), None)
        if always is None:
            raise ValueError("one mode must be for all requests: add one without `when`")
        if always != len(order) - 1:
            never = order[always + 1].mode.use
            raise ValueError(f"{never} is never used, because {order[always].mode.use} before it is for all requests")
        self._order = order
        self._sole = order[0].manager if len(order) == 1 else None

    def select_manager(self, request: RequestFacts, endpoint: str, stream: bool) -> DisaggregatedRequestManager:
        """Returns the manager that coordinates this request."""
        if self._sole is not None:
            return self._sole
        return next(one.manager for one in self._order if one.mode.when.matches(request, endpoint, stream))
