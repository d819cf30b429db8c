"""Defines the advice that a store gives to `kvparams doctor`.

A store that knows of settings that will hurt has a method `advice() -> list[Advice]`; most have none. Each piece of
advice says what was found and what to do about it, and never anything secret.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from kvparams_connectors.store import KVStore

__all__ = ["Advice", "AdviceGrade", "StoreAdvisor", "advice_from_store"]

AdviceGrade = Literal["ok", "warning", "error"]
"""ok: as it should be. warning: it works, and will hurt. error: it does not work."""


@dataclass(frozen=True, slots=True)
class Advice:
    """An `Advice` is the result of one examination."""

    level: AdviceGrade
    finding: str
    """What is so: `maxmemory-policy is noeviction`."""
    action: str = ""
    """What to do: `set maxmemory-policy allkeys-lru`. Empty only where nothing is to be done, or `finding` says
    it."""


@runtime_checkable
class StoreAdvisor(Protocol):
    """A store that knows more about its settings than the interface tells."""

    def advice(self) -> Sequence[Advice]:
        """Ask the server, within a few seconds; raises nothing for a server that does not answer."""
        ...


def advice_from_store(store: KVStore) -> list[Advice]:
    """Returns what the store says; a store without the method says nothing, and one that raises is a warning itself."""
    if not isinstance(store, StoreAdvisor):
        return []
    try:
        return list(store.advice())
    except Exception as error:  # noqa: BLE001 - somebody else's code; the doctor goes on
        return [Advice("warning", f"the store could not say how it is set up ({type(error).__name__})", "see its log")]
