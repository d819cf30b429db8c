"""What an engine reports of its prefix cache when a prefill leg has ended, for whoever keeps books of caches."""

from typing import TYPE_CHECKING

from kvparams.errors import JSONTextError
from kvparams.scheduling import RequestFacts
from kvparams_proxy.execution.corrections import load_answer
from kvparams_proxy.execution.privacy import error_in
from kvparams_proxy.telemetry.account import prompt_usage

if TYPE_CHECKING:
    from kvparams_proxy.fleet.prefixes import Decision, Prefixes

__all__ = ["report"]


def report(prefixes: "Prefixes", facts: RequestFacts, raw: bytes) -> "Decision | None":
    """Tell it, unless the answer is an error or none; why the leg went where it did."""
    try:
        document = load_answer(raw)
    except JSONTextError:
        return None
    if error_in(document) is not None:
        return None
    return prefixes.reported(facts, *prompt_usage(document))
