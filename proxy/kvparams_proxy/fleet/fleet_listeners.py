"""Defines who hears of changes of the fleet: its parts in this process, and other proxies."""

from typing import Protocol

from kvparams_proxy.fleet.member import Member

__all__ = ["FleetListener", "FleetSharing"]


class FleetListener(Protocol):
    """Hears who comes and goes, from when it begins to listen."""

    def joined(self, member: Member) -> None:
        """Hears that a member has joined. It can be chosen once it is known to be ready."""
        ...

    def left(self, member: Member) -> None:
        """Hears that a member has left and its last leg has ended: its resources may be closed."""
        ...


class FleetSharing(Protocol):
    """Hears what other proxies in front of the same engines should know."""

    def load_changed(self, member: Member) -> None:
        """Hears that this proxy has more or fewer legs there."""
        ...

    def adapter_used(self, member: Member, adapter: str) -> None:
        """Hears that a leg of this proxy has made a LoRA adapter the one that an engine used last."""
        ...

    def engine_failed(self, member: Member, *, connected: bool, why: str) -> None:
        """Hears that a leg failed and its engine is to blame."""
        ...

    def engine_restarted(self, member: Member) -> None:
        """Hears that a probe found another incarnation."""
        ...
