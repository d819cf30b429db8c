"""Tests that request records are read in batches: all of them, once, in order, and soon."""

import asyncio
import time

from kvparams.instances import RequestFacts
from kvparams.routing.request_lifecycle import RequestLifecycle
from kvparams_proxy.errors import ProxyError
from kvparams_proxy.telemetry.record_dispatcher import RecordDispatcher
from kvparams_proxy.telemetry.request_record import RefusedRequest, RequestRecord
from tests.support.virtual_loop import VirtualLoop


class Reads:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def ended(self, account: RequestRecord) -> None:
        self.seen.append(account.facts.request_id)

    def refused(self, refusal: RefusedRequest) -> None:
        self.seen.append(f"refused {refusal.request_id}")


def account(number: int) -> RequestRecord:
    facts = RequestFacts(f"r{number}", "t", None, 1, 1, None, None)
    return RequestRecord(facts, "/v1/completions", False, RequestLifecycle(time.perf_counter), [], None)


async def test_every_reader_reads_every_account_once_and_in_order() -> None:
    readers = Reads(), Reads()
    ledger = RecordDispatcher(asyncio.get_running_loop(), readers)
    for number in range(100):
        ledger.ended(account(number))
        await asyncio.sleep(0)
    assert 0 < len(readers[0].seen) < 100  # in batches
    ledger.close()
    assert readers[0].seen == readers[1].seen == [f"r{number}" for number in range(100)]


async def test_what_ended_before_a_refusal_is_read_before_it() -> None:
    reader = Reads()
    ledger = RecordDispatcher(asyncio.get_running_loop(), [reader])
    ledger.ended(account(0))
    ledger.refused(RefusedRequest("x", "/", ProxyError(400, "invalid_request_error", "no")))
    ledger.ended(account(1))
    ledger.flush()
    ledger.flush()
    assert reader.seen == ["r0", "refused x", "r1"]
    ledger.close()


def test_one_account_alone_is_read_soon() -> None:
    reader = Reads()
    loop = VirtualLoop()
    ledger = RecordDispatcher(loop, [reader])
    for number in range(2):  # the second time too
        ledger.ended(account(number))
        assert len(reader.seen) == number
        loop.run_until(loop.time() + 0.1)
        assert len(reader.seen) == number + 1
    assert reader.seen == ["r0", "r1"]
    ledger.close()
