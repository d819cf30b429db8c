"""What must change in a decode engine's answer before a client sees it, spliced in place.

Decode counts transferred KV as cached; only prefill knows what was. And KV params say where engines are. The one rule:
every other byte leaves as the engine wrote it.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple, cast

from pydantic_core import from_json, to_json

from kvparams.errors import JSONTextError
from kvparams.jsontext import Field, edit, fields, locate

__all__ = ["Corrections", "complete_events", "load_answer", "prompt_details"]

_PRIVATE: Final = frozenset(("kv_transfer_params", "ec_transfer_params", "disaggregated_params", "disagg_prefill_resp"))


class Corrections(NamedTuple):
    """What prefill said, for the answers of decode."""

    prompt_tokens_details: object
    """That member of prefill's `usage`; None where the engine does not report it."""

    def whole(self, raw: bytes) -> bytes:
        """A JSON answer, corrected.

        Raises:
            JSONTextError: it is not a JSON object.
        """
        document = load_answer(raw)
        changes: dict[str, bytes | None] = {}
        spans: dict[str, Field] = {}
        for name in _PRIVATE & document.keys():
            changes[name] = None
            spans[name] = locate(raw, document, name)
        usage = document.get("usage")
        if isinstance(usage, dict):
            details = cast("dict[str, object]", usage).get("prompt_tokens_details")
            if details != self.prompt_tokens_details:
                span = spans["usage"] = locate(raw, document, "usage")
                inside = raw[span.value : span.end]
                change = {"prompt_tokens_details": to_json(self.prompt_tokens_details)}
                changes["usage"] = edit(inside, fields(inside), change)
        return edit(raw, spans, changes) if changes else raw

    def events(self, raw: bytes) -> bytes:
        """Complete server-sent events, corrected.

        Raises:
            JSONTextError: an event that needs correction is not JSON.
        """
        if _clean(raw):
            return raw
        return b"".join(self._event(event) for event in _split(raw))

    def _event(self, event: bytes) -> bytes:
        if _clean(event):
            return event
        lines = event.splitlines(keepends=True)
        data = b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
        if not data.startswith(b"{"):
            return event
        corrected = self.whole(data)
        if corrected is data:
            return event
        others = b"".join(line for line in lines if not line.startswith(b"data:") and line.strip())
        return b"%bdata: %b\n\n" % (others, corrected)


def _clean(raw: bytes) -> bool:
    """Whether events need no correction: they hold none of these. (Inside a JSON string a quote is escaped, so a model
    that writes `"prompt_tokens"` does not look like it.)"""
    return b'"prompt_tokens"' not in raw and b"_transfer_params" not in raw and b"disagg" not in raw


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


def prompt_details(answer: Mapping[str, object]) -> object:
    """`usage.prompt_tokens_details` of an answer, None where the engine does not report it."""
    usage = answer.get("usage")
    return cast("dict[str, object]", usage).get("prompt_tokens_details") if isinstance(usage, dict) else None


def complete_events(raw: bytes) -> int:
    """How many bytes of `raw` are whole events: up to and with the last blank line."""
    if raw.endswith(b"\n\n"):  # nearly always: an engine sends events whole
        return len(raw)
    return max(raw.rfind(b"\n\n") + 2, raw.rfind(b"\r\n\r\n") + 4) if b"\n\n" in raw or b"\r\n\r\n" in raw else 0


def _split(raw: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(raw):
        ends = [end + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (end := raw.find(mark, at)) >= 0]
        end = min(ends, default=len(raw))
        yield raw[at:end]
        at = end
