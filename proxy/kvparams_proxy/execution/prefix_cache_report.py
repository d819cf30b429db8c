"""What an engine reports of its prefix cache when a prefill leg has ended, for whoever keeps books of caches."""

from typing import TYPE_CHECKING

from kvparams.errors import JSONTextError
from kvparams.peer_reads import readable_address
from kvparams_proxy.execution.engine_response import EngineResponse
from kvparams_proxy.execution.response_document import embedded_error
from kvparams_proxy.telemetry.request_record import RequestRecord

if TYPE_CHECKING:
    from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel

__all__ = ["report_prefill_response"]


def report_prefill_response(prefixes: "PrefixCacheModel", account: RequestRecord, answer: EngineResponse) -> None:
    """Tell it, and the request's account why the leg went where it did, unless the answer is an error or none."""
    try:
        document = answer.document
    except JSONTextError:  # whoever owns the request finds out what is wrong with it
        return
    if embedded_error(document) is None:
        account.prompt_tokens = account.cached_tokens = None  # of an attempt before
        account.record_prefill(document)
        told = readable_address(document.get("kv_transfer_params"))
        account.decision = prefixes.record_report(account.facts, account.prompt_tokens, account.cached_tokens, told)
