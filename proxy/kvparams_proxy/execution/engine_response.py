"""A whole answer of an engine, parsed once: a short one where it is needed, a long one in steps of bounded work.

Of a long one, members that are long stand in its document as something short of their kind. `kv_transfer_params` are
there in full, within a bound.
"""

import re
from collections.abc import Generator, Iterable, Mapping
from typing import Final, cast

from pydantic_core import to_json

from kvparams.errors import JSONTextError
from kvparams.jsontext.document import read_object
from kvparams.jsontext.incremental_reader import IncrementalReader
from kvparams.jsontext.receivers import OPEN_OBJECT, AbridgedObjectReceiver, ListReceiver, Receiver, TreeBuilder
from kvparams.jsontext.scanner import (
    LONGEST_TOKEN,
    STEP_BYTES,
    UNLIMITED,
    JSONLimits,
    MemberSpan,
    piece_end,
    scalar_end,
    skip_space,
)
from kvparams_proxy.execution.answer_forms import CHOICES_FORM, AnswerForm
from kvparams_proxy.execution.engine_addresses import EngineAddresses
from kvparams_proxy.execution.response_document import embedded_error, load_response
from kvparams_proxy.execution.response_privacy import PRIVATE_MEMBERS, privacy_changes

__all__ = ["LONG_RESPONSE_BYTES", "EngineResponse", "private_member_cuts"]

LONG_RESPONSE_BYTES: Final = 8 << 10
"""An answer that is longer is read in steps."""
_LIMITS: Final = JSONLimits(max_bytes=2**62, max_containers=2**62, max_strings=2**62)
"""The length of an answer is bounded already."""
_MOST_VALUES: Final = 200_000
"""In `kv_transfer_params`: the blocks of some million tokens."""
_MOST_PARAMS_BYTES: Final = 1 << 20
_MOST_OF_ITS_OWN: Final = 64
"""Members that are not of the API: each has to be searched for addresses."""
_MOST_CUTS: Final = 4096
_SEARCHED_BYTES: Final = 64 << 10
_OVERLAP: Final = 512
_LOOKED_AT: Final = 16 << 10
"""Bytes of a member that are searched for addresses."""
_COPIED_BYTES: Final = 1 << 20
_PARAMS: Final = ("kv_transfer_params", "ec_transfer_params")
"""What an engine says to another one."""
_NEEDED: Final = frozenset(("id", "object", "system_fingerprint", "error", "usage", "type", *_PARAMS))
_SAYS_OF_ITSELF: Final = ("id", "object", "type", "system_fingerprint", "kv_transfer_params", "ec_transfer_params")
_NAMES: Final = b"|".join(name.encode() for name in sorted(PRIVATE_MEMBERS))
_PRIVATE: Final = re.compile(rb'([{,])[ \t\r\n]*"(?:%b)"[ \t\r\n]*:[ \t\r\n]*' % _NAMES)
_PRIVATE_TOO: Final = re.compile(rb'[ \t\r\n]*"(?:%b)"[ \t\r\n]*:[ \t\r\n]*' % _NAMES)
_COMMA: Final = re.compile(rb"[ \t\r\n]*,")
_SUSPECTS: Final = (b'_params"', b'"remote_', b'"bootstrap_')
"""Where one of them stands in a choice, members may say where KV is."""


class EngineResponse:
    """A whole response of an engine."""

    __slots__ = ("_document", "_error", "_form", "member_spans", "privacy_changes", "raw")

    def __init__(self, raw: bytes, form: AnswerForm = CHOICES_FORM) -> None:
        """`form`: of the API's answers."""
        self.raw: Final = raw
        self._form = form
        self._document: Mapping[str, object] | None = None
        self._error: str | None = None
        self.member_spans: Mapping[str, MemberSpan] | None = None
        """Where its members stand, if it was read in steps."""
        self.privacy_changes: Mapping[str, bytes | None] = {}
        """What must be kept from clients, if it was read in steps; as for `kvparams.jsontext.editing.edit`."""

    @property
    def document(self) -> Mapping[str, object]:
        """The parsed response.

        Raises:
            JSONTextError: it is not a JSON object.
        """
        if self._document is None:
            self.raise_if_invalid()
            self._document = load_response(self.raw)
        return self._document

    def raise_if_invalid(self) -> None:
        """Raises the error that reading the response in steps has found, if any.

        Raises:
            JSONTextError: it was read in steps, and is not a JSON object, or none that can be used.
        """
        if self._error is not None:
            raise JSONTextError(self._error)  # one that is kept would hold the frames it was raised through

    @property
    def has_content(self) -> bool:
        """Returns whether the response is usable: JSON, no error, and an answer of its API."""
        try:
            document = self.document
        except JSONTextError:
            return False
        return embedded_error(document) is None and self._form.has_content(document)

    def parse_in_steps(self, request_id: str, addresses: EngineAddresses) -> Generator[None, None, "EngineResponse"]:
        """Parses the response in steps. Never raises for its content.

        Args:
            request_id: what the engine was told.
            addresses: of the engines.

        Returns:
            The answer itself.
        """
        receiver = _EngineResponseReceiver(self._form)
        try:
            yield from read_object(self.raw, receiver, _LIMITS, strict=False)
            _check_params(receiver)
            yield
            self.privacy_changes = yield from _changes(self.raw, receiver, request_id, addresses, self._form)
            self._document = receiver.document
            self.member_spans = receiver.fields
        except JSONTextError as error:
            self._error = str(error)
        return self


def _check_params(receiver: AbridgedObjectReceiver) -> None:
    """Raises an error for parameters of a transfer that cannot be handed on."""
    for name in _PARAMS:
        field = receiver.fields.get(name)
        if field is None:
            continue
        if field.end - field.value > _MOST_PARAMS_BYTES:
            raise JSONTextError(f"its {name} are too long")
        try:
            to_json(receiver.document.get(name))
        except ValueError as error:
            raise JSONTextError(f"its {name} are nested too deep, or no text") from error


class _EngineResponseReceiver(AbridgedObjectReceiver):
    """Receives a long answer. A member that stands twice is refused: only one of them would be corrected."""

    __slots__ = ()

    def __init__(self, form: AnswerForm) -> None:
        special: dict[str, AbridgedObjectReceiver | ListReceiver] = {
            "error": AbridgedObjectReceiver(),
            "usage": AbridgedObjectReceiver(),
        }
        needed = _NEEDED
        if form.content is not None:
            special[form.content] = _ContentReceiver()
            needed |= {form.content}
        super().__init__(needed, special)

    def on_members(self, members: dict[str, object]) -> None:
        """See `Receiver.on_members`."""
        self._require_new(members)
        super().on_members(members)

    def _require_new(self, names: Iterable[str]) -> None:
        if not self.document.keys().isdisjoint(names):
            raise JSONTextError("a member stands twice in it")

    def on_nested(self, name: str | None, opening: int) -> Receiver | None:
        """See `Receiver.on_nested`."""
        self._require_new((cast("str", name),))
        if name in _PARAMS and opening == OPEN_OBJECT:
            built = TreeBuilder(opening, _MOST_VALUES)
            self.document[name] = built.value
            return built
        return super().on_nested(name, opening)


class _ContentReceiver(ListReceiver):
    """Receives a long list, such as that of choices; it stands for one if there is one with something in it."""

    __slots__ = ()

    def on_values(self, values: list[object]) -> None:
        """See `Receiver.on_values`."""
        if any(choice and isinstance(choice, dict) for choice in values):
            self.stand_in[:] = [{"index": 0}]

    def on_nested(self, name: str | None, opening: int) -> None:
        """See `Receiver.on_nested`."""
        if opening == OPEN_OBJECT:
            self.stand_in[:] = [{"index": 0}]


def _changes(
    raw: bytes, receiver: AbridgedObjectReceiver, request_id: str, addresses: EngineAddresses, form: AnswerForm
) -> Generator[None, None, dict[str, bytes | None]]:
    """Computes in steps the changes that `privacy_changes` computes for a short response."""
    document, fields = receiver.document, receiver.fields
    said = {name: document[name] for name in _SAYS_OF_ITSELF if name in document and name in form.public_members}
    changes = privacy_changes(said, b"", request_id, addresses, form=form)
    its_own = [name for name in fields if name not in form.public_members]
    for name in its_own:
        if name in PRIVATE_MEMBERS and document[name] is None:
            continue
        if name in PRIVATE_MEMBERS or len(its_own) > _MOST_OF_ITS_OWN:
            changes[name] = None
            continue
        field = fields[name]
        kept = yield from _without_private(raw, field)
        beginning = raw[field.value : min(field.end, field.value + _LOOKED_AT)] if kept is None else kept[:_LOOKED_AT]
        if addresses.occur_in(beginning.decode("utf-8", "replace")):
            changes[name] = None
        elif kept is not None:
            changes[name] = kept
        yield
    if "choices" in fields and (yield from _says(raw, fields["choices"])):
        kept = yield from _without_private(raw, fields["choices"])
        if kept is not None:
            changes["choices"] = kept
    return changes


def _says(raw: bytes, field: MemberSpan) -> Generator[None, None, bool]:
    """Returns, in steps, whether the value contains one of the suspicious words."""
    for word in _SUSPECTS:
        for at in range(field.value, field.end, _COPIED_BYTES):
            if raw.find(word, at, min(at + _COPIED_BYTES + len(word), field.end)) >= 0:
                return True
            yield
    return False


def _without_private(raw: bytes, field: MemberSpan) -> Generator[None, None, bytes | None]:
    """Returns the value without members at any depth that reveal KV or engines; None if it has none."""
    kept = bytearray()
    at, end = field.value, field.end
    cuts = yield from private_member_cuts(raw, at, end)
    if not cuts:
        return None
    for start, behind in (*cuts, (end, end)):
        while at < start:
            piece = raw[at : min(at + _COPIED_BYTES, start)]
            kept += piece
            at += len(piece)
            yield
        at = behind
    return cast("bytes", kept)  # to make bytes of it would copy all of it at once


def private_member_cuts(raw: bytes, at: int, end: int) -> Generator[None, None, list[tuple[int, int]]]:
    """Finds the members in `raw[at:end]`, JSON text, that reveal the location of KV or engines.

    Each span includes one comma, so that the text without them is still JSON.

    Raises:
        JSONTextError: there are too many.
    """
    cuts: list[tuple[int, int]] = []
    number = 0
    while at < end:
        stop = min(at + _SEARCHED_BYTES, end)
        found = _PRIVATE.search(raw, at, stop)
        if found is None:  # one that goes on behind `stop` is found from where it begins
            at = stop if stop == end else stop - _OVERLAP
            yield
            continue
        start, first = found.start(), found[1] == b"{"
        at = yield from _value_end(raw, found.end())
        number += 1
        if first:
            start += 1
            while (comma := _COMMA.match(raw, at, at + _SEARCHED_BYTES)) is not None:
                at = comma.end()
                too = _PRIVATE_TOO.match(raw, at, at + _SEARCHED_BYTES)
                if too is None:
                    break
                at = yield from _value_end(raw, too.end())
                number += 1
                if number > _MOST_CUTS:
                    break
                yield
            if at < len(raw) and raw[at] <= 0x20 and skip_space(raw, at) >= at + LONGEST_TOKEN:
                raise JSONTextError("there is too much white space in it")
        cuts.append((start, at))
        if number > _MOST_CUTS:
            raise JSONTextError("it has too many members that say where KV or engines are")
        yield
    return cuts


def _value_end(raw: bytes, at: int) -> Generator[None, None, int]:
    """Returns, in steps, the end of the value that begins at `at`."""
    byte = raw[at]
    if byte in b"{[":
        reader = IncrementalReader(raw, at, UNLIMITED)
        yield from reader.steps()
        return reader.at
    if byte != 0x22:
        return scalar_end(raw, at)
    last = False
    while not last:
        at, last = piece_end(raw, at + 1, STEP_BYTES)
        at -= not last
        yield
    return at + 1
