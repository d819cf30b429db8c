"""The request log: one JSON line for each request, at its end.

Lines are gathered on the event loop and written by a thread (`line_writer.py`), several at once. A line contains no
part of the prompt or the answer, no address and no key. Values that a client chooses are bounded and escaped.
"""

import asyncio
import atexit
from pathlib import Path
from time import gmtime, strftime, time
from typing import Final

from kvparams.jsontext.writing import fill_line
from kvparams.routing.request_lifecycle import TRANSITIONS, LifecycleState
from kvparams_proxy.telemetry.line_writer import LineWriter
from kvparams_proxy.telemetry.request_record import RefusedRequest, RequestRecord
from kvparams_proxy.telemetry.tracing import TraceContext

__all__ = ["RequestLog"]

_FLUSH_S: Final = 0.2
_FLUSH_LINES: Final = 1024
_CLOSE_S: Final = 1.0
"""For what is left at the end; a place that does not take it gets no more."""
_MODEL: Final = 200
"""Characters of a model's name, at most."""
_WORD: Final = 128
"""... of a tenant's, an instance's, an error's."""
_NOTHING: Final[dict[LifecycleState, float]] = dict.fromkeys(TRANSITIONS, 0.0)
_LINE: Final = tuple(
    b'{"time":"@@","request_id":@,"transfer_ids":@,"tenant":@,"model":@,"endpoint":@,"stream":@,"outcome":@,'
    b'"status":@,"error":@,"route":@,"queued_ms":@,"encoded":@,"encode_ms":@,"prefill_ms":@,"result_ms":@,"decode_ms":@,"stream_ms":@,'
    b'"total_ms":@,"prompt_tokens":@,"predicted_tokens":@,"cached_tokens":@,"completion_tokens":@,"retries":@,'
    b'"answer_bytes":@,"trace_id":@}\n'.split(b"@")
)
"""What stands between the values of a line."""
_MILLISECONDS: Final = tuple(b".%03dZ" % number for number in range(1000))


class RequestLog:
    """Writes a log line for each request. A `kvparams_proxy.telemetry.request_record.RecordReader`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, place: str, lock: Path | None = None) -> None:
        """Opens the log.

        Args:
            loop: whose thread calls everything here.
            place: see `LineWriter`.
            lock: likewise.

        Raises:
            OSError: the file cannot be written.
        """
        self._loop = loop
        self._writer = LineWriter(place, lock)
        self._lines: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._second = 0
        self._stamp = b""
        atexit.register(self.close)  # whatever ends the process in an orderly way, its last lines are written

    @property
    def dropped(self) -> int:
        """The number of lines that were dropped because their destination was too slow or missing."""
        return self._writer.dropped

    def ended(self, account: RequestRecord) -> None:
        """See `kvparams_proxy.telemetry.request_record.RecordReader`."""
        facts, life = account.facts, account.lifecycle
        # How long it was in each state, all visits together.
        spent = _NOTHING.copy()
        before, _, since_s = life.spans[0]
        begun_s = since_s
        for state, _, at_s in life.spans:
            spent[before] += at_s - since_s
            before, since_s = state, at_s
        transfers = [facts.transfer_id]
        if account.further_transfers:
            transfers += account.further_transfers
        code, decision, ended_s = account.code, account.decision, account.ended_s
        self._add(
            self._second_of(ended_s),
            _MILLISECONDS[int(ended_s % 1 * 1000)],
            facts.request_id,
            transfers,
            facts.tenant[:_WORD],
            facts.model and facts.model[:_MODEL],
            account.endpoint,
            account.stream,
            life.outcome,
            account.status,
            code and code[:_WORD],
            [instance.id for instance in account.route],
            spent["queued"] * 1000,
            account.is_encoded,
            spent["encode"] * 1000,
            spent["prefill"] * 1000,
            spent["result"] * 1000,
            spent["decode"] * 1000,
            spent["first_byte"] * 1000,
            (since_s - begun_s) * 1000,
            account.prompt_tokens,
            decision and decision.in_engine_tokens(decision.expected.cached_tokens, account.engine_prompt_tokens),
            account.cached_tokens,
            account.completion_tokens,
            account.retries,
            account.answer_bytes,
            _trace(account.trace_context),
        )

    def refused(self, refusal: RefusedRequest) -> None:
        """See `kvparams_proxy.telemetry.request_record.RecordReader`."""
        error, now = refusal.error, time()
        nothing: list[str] = []
        begun = (self._second_of(now), _MILLISECONDS[int(now % 1 * 1000)], refusal.request_id, nothing)
        asked = (refusal.tenant[:_WORD], refusal.model and refusal.model[:_MODEL], refusal.endpoint, None)
        ended = ("refused" if error.status < 500 else "failed", error.status, error.name[:_WORD], nothing)
        spent = (0.0, None, *(0.0,) * 6)
        self._add(*begun, *asked, *ended, *spent, *(None,) * 4, 0, 0, _trace(refusal.trace))

    def close(self) -> None:
        """Writes the remaining lines, for a second at most. A second call does nothing."""
        atexit.unregister(self.close)
        self._flush()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._writer.close(_CLOSE_S)

    def _add(self, *values: object) -> None:
        lines = self._lines
        lines.append(fill_line(_LINE, values))
        if len(lines) >= _FLUSH_LINES:
            self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(_FLUSH_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._flush()

    def _flush(self) -> None:
        if self._lines:
            self._writer.put(b"".join(self._lines), len(self._lines))
            self._lines.clear()

    def _second_of(self, at_s: float) -> bytes:
        """UTC, to the second: most lines share one."""
        second = int(at_s)
        if second != self._second:
            self._second, self._stamp = second, strftime("%Y-%m-%dT%H:%M:%S", gmtime(second)).encode()
        return self._stamp


def _trace(trace: TraceContext | None) -> str | None:
    return f"{trace.trace_id:032x}" if trace is not None and trace.sampled else None
