"""Corrects a decode engine's response before the client sees it, by editing bytes in place.

Decode counts transferred KV as cached; only prefill knows what was. And KV params say where engines are. All other
bytes leave as the engine wrote them.
"""

from collections.abc import Mapping, Sequence
from typing import Final, cast

from kvparams.jsontext.document import MemberSpan, find_member, find_members
from kvparams.jsontext.editing import edit, edit_pieces
from kvparams.jsontext.words import find_words
from kvparams.native import NATIVE
from kvparams_proxy.execution.answer_forms import OTHER_FORM, AnswerForm
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.engine_response import EngineResponse
from kvparams_proxy.execution.response_document import embedded_error, load_response
from kvparams_proxy.execution.response_privacy import Allowance, locate_members, privacy_changes
from kvparams_proxy.execution.sse import (
    MAX_EVENTS_PER_TURN,
    SSEBoundaries,
    event_data,
    split_events,
)
from kvparams_proxy.upstream.types import UpstreamError, UpstreamErrorResponse

__all__ = ["ResponseCorrector", "require_complete_event", "require_no_error"]


_ITS_OWN: Final = object()
_CROWDED: Final = 6_000
"""Quotes in an event: to find the place of a member among more of them holds the event loop for too long."""
_CHANGE_UNITS: Final = 1
"""What changing an event takes beyond examining it, in units of `Allowance`. Engines that say in each event who runs it
write 230 bytes an event and more, so all events of a full read may be changed."""
_PARAMS: Final = b'_params"'
_NO_PARAMS: Final = b'_params":null'
_NO_CONTENT: Final = "the engine's answer has no content"
_TOO_MUCH: Final = "an event of its stream has too many members to be corrected"


class ResponseCorrector:
    """Corrects the responses to one request."""

    __slots__ = ("_addresses", "_allowance", "_closely", "_form", "_request_id", "cache_report", "usage")

    def __init__(self, request_id: str, addresses: EngineAddresses, form: AnswerForm = OTHER_FORM) -> None:
        """`request_id` is what the engines were told; `addresses` are theirs; `form`: of the API's answers."""
        self._request_id = request_id
        self._form = form
        self._addresses = addresses
        self._allowance: Allowance | None = None
        """Of the events of one read, once any must be examined."""
        self._closely = True
        """Whether every event is examined: until one has shown that what all of them repeat needs no change."""
        self.cache_report: object = _ITS_OWN
        """What prefill's `usage` says of its cache, as `UsageForm.cache_report` returns it. Until it is known, what the
        answering engine says stands: it may do all of the work."""
        self.usage: Mapping[str, object] | None = None
        """The last `usage` that came, as decode said it."""

    def learn_prefill_usage(self, answer: Mapping[str, object]) -> None:
        """Reads what the prefill engine's answer says of its cache. It may say nothing."""
        usage = answer.get("usage")
        self.cache_report = self._form.usage.cache_report(
            cast("dict[str, object]", usage) if isinstance(usage, dict) else {}
        )

    def correct_document(self, raw: bytes, *, event: bool = False, is_stored: bool = False) -> bytes:
        """Returns a corrected JSON answer or event.

        Args:
            raw: its text.
            event: whether it is one of a stream.
            is_stored: whether it is an answer that was kept, which may tell that its request has failed.

        Raises:
            JSONTextError: it is not a JSON object.
            UpstreamError: it has no content, and should have some.
            UpstreamErrorResponse: it is an error, whatever its status said.
        """
        document = load_response(raw)
        if not is_stored and (error := embedded_error(document)) is not None:
            raise UpstreamErrorResponse(error)
        form = self._form
        if not event and not form.has_content(document):
            raise UpstreamError(_NO_CONTENT)
        if event and form.event_wrapper is not None:
            inner = document.get(form.event_wrapper)
            if isinstance(inner, dict):
                return self._correct_wrapped(raw, document, form.event_wrapper, cast("dict[str, object]", inner))
        return self._correct_members(raw, document, event=event)

    def _correct_wrapped(
        self, raw: bytes, document: Mapping[str, object], wrapper: str, inner: dict[str, object]
    ) -> bytes:
        """Returns an event, with the answer corrected that its member `wrapper` holds.

        Raises:
            as `correct_document`.
        """
        if (error := embedded_error(inner)) is not None:
            raise UpstreamErrorResponse(error)
        outer = {name: value for name, value in document.items() if name != wrapper}
        if not self._form.public_members.issuperset(outer):
            raw = self._correct_members(raw, document, event=True)
        span = find_member(raw, document, wrapper)
        before = raw[span.value : span.end]
        after = self._correct_members(before, inner, event=True)
        self._closely = True  # what is in a wrapped answer tells nothing of the events that follow it
        if after is before:
            return raw
        return b"%b%b%b" % (raw[: span.value], after, raw[span.end :])

    def _correct_members(self, raw: bytes, document: Mapping[str, object], *, event: bool) -> bytes:
        """Returns the object `raw`, which parses to `document`, with members corrected.

        Raises:
            UpstreamError: it has too many members.
        """
        form = self._form
        crowded = event and len(raw) > 2 * _CROWDED and raw.count(b'"') > _CROWDED
        if crowded and not form.event_wrapper and (_PARAMS in raw or not form.public_members.issuperset(document)):
            raise UpstreamError(_TOO_MUCH)
        allowance = self._allowance if event else None
        changes = privacy_changes(document, raw, self._request_id, self._addresses, allowance, form)
        self._closely = not changes.keys() <= {"kv_transfer_params"}
        if crowded and changes and (NATIVE is None or not form.event_wrapper):
            raise UpstreamError(_TOO_MUCH)
        spans: dict[str, MemberSpan] = {**locate_members(raw, document, changes, allowance)} if changes else {}
        usage = document.get("usage")
        if isinstance(usage, dict):
            self.usage = cast("dict[str, object]", usage)
            if corrected := self._usage_corrections(self.usage, document, event=event):
                span = spans["usage"] = find_member(raw, document, "usage")
                changes["usage"] = _edit_usage(raw[span.value : span.end], self.usage, corrected)
        if not changes:
            return raw
        if allowance is not None:
            allowance.spend(_CHANGE_UNITS)
        return edit(raw, spans, changes)

    def _usage_corrections(
        self, usage: Mapping[str, object], document: Mapping[str, object], *, event: bool
    ) -> Mapping[str, bytes | None]:
        """Returns the changes to a `usage`.

        Events that count as they go along report a cache only if engines do. The last one is corrected.
        """
        report, form = self.cache_report, self._form
        if report is _ITS_OWN:
            return {}
        if event and not form.usage.reports_cache(usage) and (document.get("choices") or form.omits_params):
            return {}
        return form.usage.corrections(usage, report)

    def correct_response(self, answer: EngineResponse, *, is_stored: bool = False) -> Sequence[bytes | memoryview]:
        """Returns a whole JSON answer, corrected. For one that was read in steps it returns pieces, without copies.

        `is_stored` as for `correct_document`.

        Raises:
            as `correct_document`.
        """
        answer.raise_if_invalid()
        if answer.member_spans is None:
            return (self.correct_document(answer.raw, is_stored=is_stored),)
        document, raw = answer.document, answer.raw
        if not is_stored and (error := embedded_error(document)) is not None:
            raise UpstreamErrorResponse(error)
        if not self._form.has_content(document):
            raise UpstreamError(_NO_CONTENT)
        changes = dict(answer.privacy_changes)
        usage = document.get("usage")
        if isinstance(usage, dict):
            self.usage = cast("dict[str, object]", usage)
            place = answer.member_spans["usage"]
            if corrected := self._usage_corrections(self.usage, document, event=False):
                inside = raw[place.value : place.end]
                changes["usage"] = edit(inside, find_members(inside), corrected)
        return edit_pieces(raw, answer.member_spans, changes) or (raw,)

    def correct_events(self, raw: bytes) -> bytes:
        """Returns complete server-sent events, corrected.

        Raises:
            JSONTextError: an event that needs correction is not JSON.
            UpstreamError: examining the events would take too long.
            UpstreamErrorResponse: one is an error; `before` it are the events that are none.
        """
        if not self._closely and max(find_words(raw, self._form.suspects)) < 0:  # nearly always
            return raw
        words = self._form.suspects
        ends = SSEBoundaries(raw)
        suspects: list[int] | None = None
        done: list[bytes] = []
        at = 0
        allowance = self._allowance = self._allowance or Allowance()
        allowance.renew()
        try:
            while at < len(raw):
                if not self._closely:
                    if suspects is None:
                        suspects = find_words(raw, words, at)
                    found = _next(raw, at, words, suspects)
                    if found < 0:
                        break
                    start = _event_start(raw, at, found)
                    done.append(raw[at:start])
                    at = start
                end = ends.after(at)
                if suspects is not None and not self._closely and _says_no_params(raw[at:end], words, suspects, end):
                    done.append(raw[at:end])
                else:
                    allowance.spend(1)
                    done.append(self._event(raw[at:end]))
                at = end
        except UpstreamErrorResponse as refusal:
            refusal.preceding_events = b"".join(done)
            raise
        done.append(raw[at:])
        return b"".join(done)

    def _event(self, event: bytes) -> bytes:
        data = event_data(event)
        if not data.startswith(b"{"):
            return event
        corrected = self.correct_document(data, event=True)
        if corrected is data:
            return event
        if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:  # nearly always: one line
            return b"data: %b\n\n" % corrected
        lines = event.splitlines(keepends=True)
        others = b"".join(line for line in lines if not line.startswith(b"data:") and line.strip())
        end = b"\r\n" if event.endswith(b"\r\n\r\n") else b"\n"
        # `event_data` has joined the lines with LF, which a JSON string cannot hold
        return b"%bdata: %b%b%b" % (others, corrected.replace(b"\n", end + b"data: "), end, end)


def _says_no_params(event: bytes, words: Sequence[bytes], suspects: Sequence[int], end: int) -> bool:
    """Returns whether all that is suspicious of an event are KV params that are null, as each event of some APIs has.

    `suspects` holds where each of the words stands first from the event on, which ends at `end`.
    """
    for word, found in zip(words, suspects, strict=True):
        if word != _PARAMS and 0 <= found < end:
            return False
    return event.count(_PARAMS) == event.count(_NO_PARAMS)


def _edit_usage(usage: bytes, document: Mapping[str, object], changes: Mapping[str, bytes | None]) -> bytes:
    """Returns the text of a `usage`, which parses to `document`, with these changes."""
    if document.keys() >= changes.keys():
        return edit(usage, {name: find_member(usage, document, name) for name in changes}, changes)
    return edit(usage, find_members(usage), changes)


def _event_start(raw: bytes, at: int, inside: int) -> int:
    """Returns the start of the event that contains `inside`. `at` is the start of an event."""
    ends = [end + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (end := raw.rfind(mark, at, inside)) >= 0]
    return max(ends, default=at)


def _next(raw: bytes, at: int, words: Sequence[bytes], suspects: list[int]) -> int:
    """Returns where the first word stands, from `at` on, that may need correction in any event; -1 without one.

    Inside a JSON string a quote is escaped, so a model that writes `"prompt_tokens"` does not look like it. Dynamo's
    worker ids stand in `nvext`. `suspects` holds where each of the words was found last: nothing is searched for twice.
    """
    first = -1
    for index, found in enumerate(suspects):
        if 0 <= found < at:
            found = suspects[index] = raw.find(words[index], at)
        if found >= 0 and (first < 0 or found < first):
            first = found
    return first


def require_complete_event(event: bytes) -> None:
    """Requires that an event is complete.

    Raises:
        JSONTextError: it is cut off: neither JSON nor the last one.
    """
    data = event_data(event)
    if data != b"[DONE]":
        load_response(data)


def require_no_error(events: bytes) -> None:
    """Requires that no event is an error.

    Raises:
        JSONTextError: one that should be is no JSON object.
        UpstreamError: there are too many of them.
        UpstreamErrorResponse: one is an error.
    """
    for number, event in enumerate(split_events(events)):
        if number > MAX_EVENTS_PER_TURN:
            raise UpstreamError("too many events came at once, none of them with content")
        data = event_data(event)
        if data.startswith(b"{") and (error := embedded_error(load_response(data))) is not None:
            raise UpstreamErrorResponse(error)
