"""Reports to the prefix cache model what engines say of their caches as legs end."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvparams.errors import JSONTextError
from kvparams.peer_reads import readable_address
from kvparams_proxy.execution.engine_response import EngineResponse
from kvparams_proxy.execution.response_document import embedded_error
from kvparams_proxy.telemetry.request_record import RequestRecord

if TYPE_CHECKING:
    from kvparams_proxy.fleet.prefix_cache_model import PrefixCacheModel

__all__ = ["report_prefill_response", "report_stream_usage"]


def report_prefill_response(prefixes: "PrefixCacheModel", account: RequestRecord, answer: EngineResponse) -> None:
    """Reports a whole answer, unless it is an error or not JSON.

    The request's account keeps the reasons for the leg's routing.
    """
    try:
        document = answer.document
    except JSONTextError:  # whoever owns the request finds out what is wrong with it
        return
    if embedded_error(document) is None:
        account.prompt_tokens = account.cached_tokens = None  # of an attempt before
        account.record_prefill(document)
        told = readable_address(document.get("kv_transfer_params"))
        account.decision = prefixes.record_report(account.facts, account.prompt_tokens, account.cached_tokens, told)


def report_stream_usage(
    prefixes: "PrefixCacheModel", account: RequestRecord, usage: Mapping[str, object] | None
) -> None:
    """Reports a stream, whose last event says what the prompt cost; `usage` is None where none does."""
    if usage is not None:
        account.record_usage(usage)
    account.decision = prefixes.record_report(account.facts, account.prompt_tokens, account.cached_tokens)
