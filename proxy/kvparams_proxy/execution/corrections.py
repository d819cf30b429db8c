"""What must change in a decode engine's answer before a client sees it, spliced in place.

Decode counts transferred KV as cached; only prefill knows what was. And KV params say where engines are. The one rule:
every other byte leaves as the engine wrote it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, cast

from pydantic_core import from_json, to_json

from kvparams.errors import JSONTextError
from kvparams.jsontext import Field, edit, edit_pieces, fields, locate
from kvparams_proxy.execution.privacy import Addresses, answer_changes, error_in
from kvparams_proxy.upstream.terms import UpstreamError, UpstreamRefusal

if TYPE_CHECKING:
    from kvparams_proxy.execution.answers import Answer

__all__ = [
    "Corrections",
    "check_event",
    "check_no_error",
    "complete_events",
    "is_answer",
    "load_answer",
    "prompt_details",
    "split_events",
]


_ITS_OWN: Final = object()


class Corrections:
    """Of the answers to one request."""

    __slots__ = ("_addresses", "_choices", "_closely", "_request_id", "prompt_tokens_details", "usage")

    def __init__(self, request_id: str, addresses: Addresses, *, choices: bool = False) -> None:
        """`request_id` is what the engines were told; `addresses` are theirs; `choices`: a whole answer has some."""
        self._request_id = request_id
        self._choices = choices
        self._addresses = addresses
        self._closely = True
        """Whether every event is examined: until one has shown that what all of them repeat needs no change."""
        self.prompt_tokens_details: object = _ITS_OWN
        """That member of prefill's `usage`, None where the engine does not report it. Until it is known, what the
        answering engine says stands: it may do all of the work."""
        self.usage: Mapping[str, object] | None = None
        """The last `usage` that came, as decode said it."""

    def whole(self, raw: bytes, *, event: bool = False) -> bytes:
        """A JSON answer, or what one event of a stream holds, corrected.

        Raises:
            JSONTextError: it is not a JSON object.
            UpstreamError: it has no choices, and should have some.
            UpstreamRefusal: it is an error, whatever its status said.
        """
        document = load_answer(raw)
        if (error := error_in(document)) is not None:
            raise UpstreamRefusal(error)
        if self._choices and not event and not _chosen(document.get("choices")):
            raise UpstreamError("the engine's answer has no content")
        changes = answer_changes(document, raw, self._request_id, self._addresses)
        self._closely = not changes.keys() <= {"kv_transfer_params"}
        spans: dict[str, Field] = {name: locate(raw, document, name) for name in changes}
        usage = document.get("usage")
        if isinstance(usage, dict):
            self.usage = cast("dict[str, object]", usage)
            wanted = self.prompt_tokens_details
            # Events that count as they go along say it only if engines do; the last one says what prefill said.
            passing = event and document.get("choices") and "prompt_tokens_details" not in self.usage
            if wanted is not _ITS_OWN and not passing and self.usage.get("prompt_tokens_details") != wanted:
                span = spans["usage"] = locate(raw, document, "usage")
                inside = raw[span.value : span.end]
                change = {"prompt_tokens_details": to_json(wanted)}
                changes["usage"] = edit(inside, fields(inside), change)
        return edit(raw, spans, changes) if changes else raw

    def pieces(self, answer: "Answer") -> Sequence[bytes | memoryview]:
        """A whole JSON answer, corrected: of one that was read in steps the pieces, which are no copies.

        Raises:
            as `whole`.
        """
        if answer.fields is None:
            return (self.whole(answer.raw),)
        document, raw = answer.document, answer.raw
        if (error := error_in(document)) is not None:
            raise UpstreamRefusal(error)
        if self._choices and not _chosen(document.get("choices")):
            raise UpstreamError("the engine's answer has no content")
        changes = dict(answer.changes)
        usage = document.get("usage")
        if isinstance(usage, dict):
            self.usage = cast("dict[str, object]", usage)
            wanted, place = self.prompt_tokens_details, answer.fields["usage"]
            if wanted is not _ITS_OWN and self.usage.get("prompt_tokens_details") != wanted:
                inside = raw[place.value : place.end]
                changes["usage"] = edit(inside, fields(inside), {"prompt_tokens_details": to_json(wanted)})
        return edit_pieces(raw, answer.fields, changes) or (raw,)

    def events(self, raw: bytes) -> bytes:
        """Complete server-sent events, corrected.

        Raises:
            JSONTextError: an event that needs correction is not JSON.
            UpstreamRefusal: one is an error; `before` it are the events that are none.
        """
        # Nearly always. `in` would make and drop an exception for each word (CPython 3.11, Objects/bytes_methods.c).
        if not self._closely and max(map(raw.find, _SUSPECTS)) < 0:
            return raw
        done: list[bytes] = []
        at = 0
        try:
            while at < len(raw):
                found = at if self._closely else _suspect(raw, at)
                if found < 0:
                    done.append(raw[at:])
                    break
                start = _event_start(raw, at, found)
                event = next(split_events(raw, start))
                done.append(raw[at:start])
                done.append(self._event(event))
                at = start + len(event)
        except UpstreamRefusal as refusal:
            refusal.before = b"".join(done)
            raise
        return b"".join(done)

    def _event(self, event: bytes) -> bytes:
        lines = event.splitlines(keepends=True)
        data = b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
        if not data.startswith(b"{"):
            return event
        corrected = self.whole(data, event=True)
        if corrected is data:
            return event
        others = b"".join(line for line in lines if not line.startswith(b"data:") and line.strip())
        return b"%bdata: %b\n\n" % (others, corrected)


_SUSPECTS: Final = (b'"prompt_tokens"', b'_params"', b'"error"', b'"nvext"', b'"remote_', b'"bootstrap_')


def _chosen(choices: object) -> bool:
    """Whether something stands there. The text of a choice may be empty: a model may have nothing to say."""
    if isinstance(choices, list):
        for one in cast("list[object]", choices):
            if one and isinstance(one, dict):
                return True
    return False


def _event_start(raw: bytes, at: int, inside: int) -> int:
    """Where the event begins that `inside` is in; `at` is where one does."""
    ends = [end + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (end := raw.rfind(mark, at, inside)) >= 0]
    return max(ends, default=at)


def _suspect(raw: bytes, at: int) -> int:
    """Where the first of these stands that may need correction in any event, or -1. Inside a JSON string a quote is
    escaped, so a model that writes `"prompt_tokens"` does not look like it. Dynamo's worker ids stand in `nvext`."""
    first = -1
    for word in _SUSPECTS:
        found = raw.find(word, at) if first < 0 else raw.find(word, at, first)
        if found >= 0:
            first = found
    return first


def load_answer(raw: bytes) -> dict[str, object]:
    """An engine's answer as an object, at the parser's speed: its keys are not examined for doubles.

    Raises:
        JSONTextError: it is not a JSON object.
    """
    try:
        document: object = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise JSONTextError(f"not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise JSONTextError("not a JSON object")
    return cast("dict[str, object]", document)


def is_answer(raw: bytes) -> bool:
    """Whether it has what a client asks for: JSON, no error, and a choice."""
    try:
        document = load_answer(raw)
    except JSONTextError:
        return False
    return error_in(document) is None and _chosen(document.get("choices"))


def prompt_details(answer: Mapping[str, object]) -> object:
    """`usage.prompt_tokens_details` of an answer, None where the engine does not report it."""
    usage = answer.get("usage")
    return cast("dict[str, object]", usage).get("prompt_tokens_details") if isinstance(usage, dict) else None


def complete_events(raw: bytes) -> int:
    """How many bytes of `raw` are whole events: up to and with the last blank line."""
    if raw.endswith(b"\n\n"):  # nearly always: an engine sends events whole
        return len(raw)
    return max(raw.rfind(b"\n\n") + 2, raw.rfind(b"\r\n\r\n") + 4) if b"\n\n" in raw or b"\r\n\r\n" in raw else 0


def check_event(event: bytes) -> None:
    """
    Raises:
        JSONTextError: it is cut off: neither JSON nor the last one.
    """
    data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
    if data != b"[DONE]":
        load_answer(data)


def check_no_error(events: bytes) -> None:
    """
    Raises:
        JSONTextError: one that should be is no JSON object.
        UpstreamRefusal: one is an error.
    """
    for event in split_events(events):
        data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
        if data.startswith(b"{") and (error := error_in(load_answer(data))) is not None:
            raise UpstreamRefusal(error)


def split_events(raw: bytes, at: int = 0) -> Iterator[bytes]:
    """One by one from `at` on, each with the blank line that ends it."""
    while at < len(raw):
        ends = [end + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (end := raw.find(mark, at)) >= 0]
        end = min(ends, default=len(raw))
        yield raw[at:end]
        at = end
