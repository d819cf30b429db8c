"""What must change in a decode engine's answer before a client sees it, spliced in place.

Decode counts transferred KV as cached; only prefill knows what was. And KV params say where engines are. The one rule:
every other byte leaves as the engine wrote it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvparams.jsontext import edit, fields, load_object

__all__ = ["Corrections", "complete_events", "prompt_details"]

_PRIVATE: Final = ("kv_transfer_params", "ec_transfer_params", "disaggregated_params", "disagg_prefill_resp")
_NEEDLES: Final = (b'"prompt_tokens"', b"_transfer_params", b"disagg")
"""Text without any of these needs no correction. (Inside a JSON string a quote is escaped, so a model that writes
`"prompt_tokens"` does not look like it.)"""


@dataclass(frozen=True, slots=True)
class Corrections:
    """What prefill said, for the answers of decode."""

    prompt_tokens_details: bytes
    """That member of prefill's `usage` as JSON text; `null` where the engine does not report it."""

    def whole(self, raw: bytes) -> bytes:
        """A JSON answer, corrected.

        Raises:
            JSONTextError: it is not one.
        """
        _, spans = load_object(raw)
        changes: dict[str, bytes | None] = {name: None for name in _PRIVATE if name in spans}
        usage = spans.get("usage")
        if usage is not None and raw[usage.value] == 0x7B:
            before = raw[usage.value : usage.end]
            after = self._usage(before)
            if after is not before:
                changes["usage"] = after
        return edit(raw, spans, changes) if changes else raw

    def events(self, raw: bytes) -> bytes:
        """Complete server-sent events, corrected.

        Raises:
            JSONTextError: an event that needs correction is not JSON.
        """
        if not any(needle in raw for needle in _NEEDLES):
            return raw
        return b"".join(self._event(event) for event in _split(raw))

    def _event(self, event: bytes) -> bytes:
        if not any(needle in event for needle in _NEEDLES):
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

    def _usage(self, raw: bytes) -> bytes:
        spans = fields(raw)
        there = spans.get("prompt_tokens_details")
        if there is None and self.prompt_tokens_details == b"null":
            return raw
        if there is not None and raw[there.value : there.end] == self.prompt_tokens_details:
            return raw
        return edit(raw, spans, {"prompt_tokens_details": self.prompt_tokens_details})


def prompt_details(answer: bytes) -> bytes:
    """`usage.prompt_tokens_details` of a JSON answer as text, `null` where it is absent."""
    spans = fields(answer)
    usage = spans.get("usage")
    if usage is None or answer[usage.value] != 0x7B:
        return b"null"
    raw = answer[usage.value : usage.end]
    details = fields(raw).get("prompt_tokens_details")
    return b"null" if details is None else raw[details.value : details.end]


def complete_events(raw: bytes) -> int:
    """How many bytes of `raw` are whole events: up to and with the last blank line."""
    return max(raw.rfind(b"\n\n") + 2, raw.rfind(b"\r\n\r\n") + 4) if b"\n\n" in raw or b"\r\n\r\n" in raw else 0


def _split(raw: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(raw):
        ends = [end + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (end := raw.find(mark, at)) >= 0]
        end = min(ends, default=len(raw))
        yield raw[at:end]
        at = end
