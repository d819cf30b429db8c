"""The request log: one JSON line for each request, at its end.

Lines are gathered on the event loop and written by a thread (`line_writer.py`), several at once. A line contains no
part of the prompt or the answer, no address and no key. Values that a client chooses are bounded and escaped.
"""

import asyncio
import atexit
from json.encoder import encode_basestring_ascii as _text
from pathlib import Path
from time import gmtime, strftime, time
from typing import Final

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
_LINE: Final = (
    '{"time":"%s.%03dZ","request_id":%s,"transfer_ids":[%s],"tenant":%s,"model":%s,"endpoint":%s,"stream":%s,'
    '"outcome":"%s","status":%s,"error":%s,"route":[%s],"queued_ms":%.1f,"prefill_ms":%.1f,"result_ms":%.1f,'
    '"decode_ms":%.1f,"stream_ms":%.1f,"total_ms":%.1f,"prompt_tokens":%s,"predicted_tokens":%s,'
    '"cached_tokens":%s,"completion_tokens":%s,'
    '"retries":%d,"answer_bytes":%d,"trace_id":%s}\n'
)


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
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None
        self._second = 0
        self._stamp = ""
        self._paths: dict[bytes, str] = {}
        """Those that are served here."""
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
        transfers = _text(facts.transfer_id)
        if account.further_transfers:
            transfers = ",".join((transfers, *map(_text, account.further_transfers)))
        code, trace, status, decision = account.code, account.trace_context, account.status, account.decision
        prompt, cached, completion = account.prompt_tokens, account.cached_tokens, account.completion_tokens
        ended_s = account.ended_s
        self._add(
            _LINE
            % (
                self._time(ended_s),
                ended_s % 1 * 1000,
                _text(facts.request_id),
                transfers,
                _text(facts.tenant[:_WORD]),
                _model(facts.model),
                self._path(account.endpoint),
                "true" if account.stream else "false",
                life.outcome,
                "null" if status is None else status,
                "null" if code is None else _text(code[:_WORD]),
                ",".join([_text(instance.id) for instance in account.route]),
                spent["queued"] * 1000,
                spent["prefill"] * 1000,
                spent["result"] * 1000,
                spent["decode"] * 1000,
                spent["first_byte"] * 1000,
                (since_s - begun_s) * 1000,
                "null" if prompt is None else prompt,
                "null" if decision is None else decision.expected.cached_tokens,
                "null" if cached is None else cached,
                "null" if completion is None else completion,
                account.retries,
                account.answer_bytes,
                _trace(trace),
            )
        )

    def refused(self, refusal: RefusedRequest) -> None:
        """See `kvparams_proxy.telemetry.request_record.RecordReader`."""
        error = refusal.error
        outcome = "refused" if error.status < 500 else "failed"
        identity = (_text(refusal.request_id), "", _text(refusal.tenant[:_WORD]), _model(refusal.model))
        path = self._path(refusal.endpoint)
        times = (0.0,) * 6
        now = time()
        self._add(
            _LINE
            % (
                *(self._time(now), now % 1 * 1000, *identity, path, "null", outcome, error.status),
                *(_text(error.name[:_WORD]), "", *times, *("null",) * 4, 0, 0, _trace(refusal.trace)),
            )
        )

    def close(self) -> None:
        """Writes the remaining lines, for a second at most. A second call does nothing."""
        atexit.unregister(self.close)
        self._flush()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._writer.close(_CLOSE_S)

    def _add(self, line: str) -> None:
        lines = self._lines
        lines.append(line)
        if len(lines) >= _FLUSH_LINES:
            self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(_FLUSH_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._flush()

    def _flush(self) -> None:
        if self._lines:
            self._writer.put("".join(self._lines).encode("ascii"), len(self._lines))
            self._lines.clear()

    def _path(self, endpoint: bytes) -> str:
        text = self._paths.get(endpoint)
        if text is None:
            text = self._paths[endpoint] = _text(endpoint.decode("latin-1"))
        return text

    def _time(self, at_s: float) -> str:
        """UTC, to the second: most lines share one."""
        second = int(at_s)
        if second != self._second:
            self._second, self._stamp = second, strftime("%Y-%m-%dT%H:%M:%S", gmtime(second))
        return self._stamp


def _model(name: str | None) -> str:
    return "null" if name is None else _text(name[:_MODEL])


def _trace(trace: TraceContext | None) -> str:
    return f'"{trace.trace_id:032x}"' if trace is not None and trace.sampled else "null"
