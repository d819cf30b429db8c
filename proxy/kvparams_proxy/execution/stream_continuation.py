"""Continuing a broken stream on another engine, from the token ids that were sent.

While a stream runs, `StreamRecorder` remembers its token ids (asked for with `return_token_ids`, and taken out again
where the client has not asked itself). When its engine fails, the rest is asked of another engine as a completion of
exactly these ids, and its events are put into the form of those that came before. Only ids whose text the client has
are counted. Tokens that an engine had computed but not sent are computed again.
"""

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from pydantic_core import from_json

from kvparams.errors import JSONTextError
from kvparams.routing.plan import StreamProgress
from kvparams_proxy.execution.response_document import embedded_error
from kvparams_proxy.execution.sse import ELIDED_LIST, MAX_EVENTS_PER_TURN, event_data, split_events
from kvparams_proxy.upstream.types import UpstreamError

__all__ = ["StreamRecorder"]

_IDS: Final = b'token_ids"'
_VALUE: Final = re.compile(
    rb'token_ids"[ \t\r\n]*:[ \t\r\n]*(?:null|\[(?:[0-9, \t\r\n]*|%b)\])([ \t\r\n]*,)?' % re.escape(ELIDED_LIST[1:-1])
)
"""Inside a JSON string every quote is escaped, so this finds members only."""
_OBJECT_END: Final = b"}\n\n"
_LAST: Final = b"\n\ndata: [DONE]\n\n"
_HIDDEN: Final = 4
"""Tokens in a row of which a chat shows nothing: more than the bytes of one character, so it is reasoning left out."""

_UNREAD_BYTES: Final = 262_144
"""Of one stream that are kept without a look into them: most streams never break, and looking takes three times as
long as everything else that is done with an event."""
_UNREAD_EVENTS: Final = 2 * MAX_EVENTS_PER_TURN
_NOTHING: Final[dict[str, Any]] = {}
_READ_BYTES: Final = 2 << 20
"""Of one event. The ids of a prompt that takes more of them cannot be read within one turn: its stream is not
continued."""


class StreamRecorder:
    """Records one stream, so that another engine can continue it."""

    __slots__ = (
        "_answer",
        "_base",
        "_chat",
        "_count",
        "_counted",
        "_finished",
        "_keep",
        "_lost",
        "_marked",
        "_mixed",
        "_prompt",
        "_template",
        "_unread",
        "_unread_bytes",
        "_unread_events",
        "_unsaid",
        "resumed",
    )

    def __init__(self, *, chat: bool, keep_ids: bool, count: bool) -> None:
        """`keep_ids`: the client has asked for token ids itself; `count`: and for the usage at the end."""
        self._chat = chat
        self._keep = keep_ids
        self._count = count
        self._counted = False
        self._prompt: list[int] | None = None
        self._answer: list[int] = []
        self._unsaid: list[int] = []
        self._base = 0
        self._finished = False
        self._mixed = False
        """Whether there was more in it than plain content."""
        self._lost = False
        """Whether its token ids are not what they should be."""
        self._template: dict[str, Any] | None = None
        self._unread: deque[tuple[bytes, int]] = deque()  # events as they came, and how many they are
        self._unread_bytes = 0
        self._unread_events = 0
        self._marked: tuple[int, list[int], bool, bool] = 0, [], False, False
        self.resumed = False

    def progress(self) -> StreamProgress | None:
        """Returns the position from which another engine can go on.

        None if the stream has said too little, or everything.
        """
        self._read()
        if self._lost or self._prompt is None or self._finished or self._mixed or (self._chat and not self._answer):
            return None
        return StreamProgress(self._prompt, list(self._answer))

    def missing_ending(self) -> bytes | None:
        """Returns the end of a stream whose last token has been sent, or None where tokens are missing.

        No engine is needed for this.
        """
        self._read()
        template = self._template
        if self._lost or self._prompt is None or template is None or not self._finished:
            return None
        if self._counted or not self._count:
            return b"data: [DONE]\n\n"
        prompt, completion = len(self._prompt), len(self._answer) + len(self._unsaid)
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
        return _event({**_members(template), "choices": [], "usage": usage}) + b"data: [DONE]\n\n"

    def mark_resumed(self) -> None:
        """Notes that another engine goes on from `progress()`."""
        self._read()
        self.resumed = True
        self._unsaid.clear()
        self._base = len(self._answer)

    def events(self, raw: bytes, whole: bytes | None = None) -> bytes:
        """Records whole events of the engine, and returns them in the client's form.

        `whole` are the same events as they came, where long lists were cut out of `raw`.

        Raises:
            JSONTextError: an event is not what it should be: one that was cut off, or any of an engine that goes on.
            UpstreamError: examining them would take too long.
        """
        if self.resumed:
            self._marked = len(self._answer), self._unsaid.copy(), self._finished, self._counted
            try:
                if raw.count(b"\n\n") + raw.count(b"\r\n\r\n") > MAX_EVENTS_PER_TURN:
                    raise UpstreamError("too many events came at once that must be rewritten")
                return b"".join([self._rewritten(event) for event in split_events(raw)])
            except (JSONTextError, UpstreamError):
                self.undo_last()
                raise
        ended = raw.count(b"\n\n")
        number = ended + raw.count(b"\r\n\r\n")
        if raw.count(_OBJECT_END) + raw.endswith(_LAST) != ended:  # a comment, or one that was cut off
            if number > MAX_EVENTS_PER_TURN:
                raise UpstreamError("too many events came at once that must be examined")
            for event in split_events(raw):
                if not event.endswith(_OBJECT_END):
                    _document(event)
        if self._unread_bytes > _UNREAD_BYTES or self._unread_events > _UNREAD_EVENTS:
            self._read_oldest(number)
        kept = raw if whole is None or len(whole) > _READ_BYTES else whole
        self._unread.append((kept, number))
        self._unread_bytes += len(kept)
        self._unread_events += number
        if number > MAX_EVENTS_PER_TURN:  # too many to be looked into in one turn
            self._lost = True
        return raw if self._keep else _stripped(raw)

    def undo_last(self) -> None:
        """Reverts the last call of `events`, whose result was not sent."""
        if not self.resumed:
            kept, number = self._unread.pop()
            self._unread_bytes -= len(kept)
            self._unread_events -= number
            return
        answered, self._unsaid, self._finished, self._counted = self._marked
        del self._answer[answered:]

    def _read_oldest(self, number: int) -> None:
        """Looks into as many events as have just come: all of them at once would take too long."""
        while self._unread and number > 0:
            kept, events = self._unread.popleft()
            self._unread_bytes -= len(kept)
            self._unread_events -= events
            number -= events
            self._look_into(kept)

    def _read(self) -> None:
        """Looks into all events that have come."""
        unread = b"".join(kept for kept, _ in self._unread)
        self._unread.clear()
        self._unread_bytes = self._unread_events = 0
        self._look_into(unread)

    def _look_into(self, unread: bytes) -> None:
        if self._lost:
            return
        for event in split_events(unread):
            try:
                document = _document(event)
                if document is None:
                    continue
                if embedded_error(document) is not None:  # nothing behind it was sent
                    break
                self._record(document)
            except (JSONTextError, UpstreamError):
                self._lost = True
                break
            if next(_choices(document), None) is not None:
                self._template = document

    def _record(self, document: dict[str, Any]) -> None:
        choice = next(_choices(document), _NOTHING)
        for prompt in (document.get("prompt_token_ids"), choice.get("prompt_token_ids")):
            if self._prompt is None and prompt is not None:
                self._prompt = _whole_numbers(prompt)
        if ids := choice.get("token_ids"):
            self._unsaid += _whole_numbers(ids)
        if _text(choice):
            self._answer += self._unsaid
            self._unsaid.clear()
        elif self._chat and (_reasons(choice) or len(self._unsaid) > _HIDDEN):
            self._mixed = True
        if choice.get("finish_reason") is not None:
            self._finished = True
        self._counted = not choice and isinstance(document.get("usage"), dict)

    def _rewritten(self, event: bytes) -> bytes:
        """Returns an event of a completion, in the form of the stream that it continues."""
        document = _document(event)
        template = self._template
        if (
            document is None or template is None or embedded_error(document) is not None
        ):  # who corrects it will see to that
            return event
        self._record(document)
        made = _members(template)
        before = next(_choices(template))
        made["choices"] = [self._choice(before, choice) for choice in _choices(document)]
        if isinstance(usage := document.get("usage"), dict):
            made["usage"] = self._usage(cast("dict[str, Any]", usage))
        return _event(made)

    def _choice(self, before: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
        made = dict(before)
        for name in ("finish_reason", "stop_reason", "token_ids"):
            if name in choice and (name != "token_ids" or self._keep):
                made[name] = choice[name]
        if self._chat and choice.get("finish_reason") is None:  # a chat has it at its end only
            made.pop("stop_reason", None)
        made.pop("prompt_token_ids", None)
        if not self._keep:
            made.pop("token_ids", None)
        if self._chat:
            made["delta"] = {"content": choice.get("text", "")}
        else:
            made["text"] = choice.get("text", "")
        return made

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the usage that a single engine would have counted."""
        prompt = len(self._prompt or ())
        said = usage.get("completion_tokens")
        completion = self._base + (said if type(said) is int else 0)
        return {
            **usage,
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


def _members(template: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the members that all events of a stream have in common."""
    return {name: value for name, value in template.items() if name not in ("choices", "usage", "prompt_token_ids")}


def _event(document: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _stripped(raw: bytes) -> bytes:
    """Returns whole events without their token ids."""
    found = raw.find(_IDS)
    if found < 0:
        return raw
    pieces: list[bytes] = []
    at = 0
    while found >= 0:
        member = _VALUE.match(raw, found)
        start = found - 1 if raw[found - 1] == 0x22 else found - 8
        if member is None or not (start == found - 1 or raw.startswith(b'"prompt_', start)):  # another member
            found = raw.find(_IDS, found + 1)
            continue
        end = member.end()
        before = raw[at:start]
        behind_comma = before if before.endswith((b",", b"{")) else before.rstrip(b" \t\r\n")
        if behind_comma.endswith(b","):  # then the comma behind the member stays
            before = behind_comma[:-1]
            end = end if member[1] is None else member.start(1)
        pieces.append(before)
        at = end
        found = raw.find(_IDS, end)
    pieces.append(raw[at:])
    return b"".join(pieces)


def _document(event: bytes) -> dict[str, Any] | None:
    """Returns the parsed JSON of one event, or None for a comment or the last event."""
    data = event_data(event)
    if not data.startswith(b"{"):
        return None
    try:
        return cast("dict[str, Any]", from_json(data, allow_inf_nan=False, cache_strings="keys"))
    except ValueError as error:
        raise JSONTextError(f"an event is not valid JSON: {error}") from error


def _choices(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the choices of a document that are objects."""
    choices: object = document.get("choices")
    for choice in cast("list[object]", choices) if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            yield cast("dict[str, Any]", choice)


def _whole_numbers(ids: object) -> list[int]:
    if not isinstance(ids, list) or not set(map(type, cast("list[object]", ids))) <= {int}:
        raise JSONTextError("token ids are a list of whole numbers")
    return cast("list[int]", ids)


def _text(choice: Mapping[str, Any]) -> bool:
    """Returns whether a choice has text that the client sees."""
    delta = choice.get("delta")
    return bool(cast("dict[str, object]", delta).get("content") if isinstance(delta, dict) else choice.get("text"))


def _reasons(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    said = cast("dict[str, object]", delta) if isinstance(delta, dict) else {}
    return bool(said.get("reasoning_content") or said.get("reasoning"))
