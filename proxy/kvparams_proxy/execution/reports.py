"""What an engine reports of its prefix cache when a prefill leg has ended, for whoever keeps books of caches."""

from typing import TYPE_CHECKING

from kvparams.errors import JSONTextError
from kvparams.peers import readable
from kvparams_proxy.execution.answers import Answer
from kvparams_proxy.execution.privacy import error_in
from kvparams_proxy.telemetry.account import Account

if TYPE_CHECKING:
    from kvparams_proxy.fleet.prefixes import Prefixes

__all__ = ["report"]


def report(prefixes: "Prefixes", account: Account, answer: Answer) -> None:
    """Tell it, and the request's account why the leg went where it did, unless the answer is an error or none."""
    try:
        document = answer.document
    except JSONTextError:  # whoever owns the request finds out what is wrong with it
        return
    if error_in(document) is None:
        account.prompt_tokens = account.cached_tokens = None  # of an attempt before
        account.prefilled(document)
        told = readable(document.get("kv_transfer_params"))
        account.decision = prefixes.reported(account.facts, account.prompt_tokens, account.cached_tokens, told)
