"""The usage that engines report, in the form of each API: how it is read, and how cached tokens are corrected in it.

A decode engine counts transferred KV as cached. Only the prefill engine knows which tokens of the prompt were.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, cast

from pydantic_core import to_json

__all__ = ["CHAT_USAGE", "MESSAGES_USAGE", "RESPONSES_USAGE", "DetailedUsage", "MessagesUsage", "UsageForm"]

_CACHED: Final = "cached_tokens"
_CACHED_PER_TURN: Final = "cached_tokens_per_turn"
_MESSAGES_CACHE: Final = ("cache_read_input_tokens", "cache_creation_input_tokens")
_NOTHING: Final[Mapping[str, bytes | None]] = {}


class UsageForm(Protocol):
    """The form of an API's `usage`."""

    def cache_report(self, usage: Mapping[str, object]) -> object:
        """Returns what a prefill engine's `usage` says of its cache, for `corrections`."""
        ...

    def reports_cache(self, usage: Mapping[str, object]) -> bool:
        """Returns whether `usage` says anything of a cache."""
        ...

    def corrections(self, usage: Mapping[str, object], report: object) -> Mapping[str, bytes | None]:
        """Returns the changes to a decode engine's `usage`, as for `edit`. None where it is right already."""
        ...


class DetailedUsage:
    """Usage with a member of details, of which prefill's replaces decode's."""

    def __init__(self, details: str) -> None:
        """`details`: the name of that member."""
        self._details = details

    def cache_report(self, usage: Mapping[str, object]) -> object:
        """See `UsageForm.cache_report`."""
        return usage.get(self._details)

    def reports_cache(self, usage: Mapping[str, object]) -> bool:
        """See `UsageForm.reports_cache`."""
        return self._details in usage

    def corrections(self, usage: Mapping[str, object], report: object) -> Mapping[str, bytes | None]:
        """See `UsageForm.corrections`."""
        said = usage.get(self._details)
        if said == report:
            return _NOTHING
        if isinstance(said, dict) and isinstance(report, dict):
            turns = cast("dict[str, object]", said).get(_CACHED_PER_TURN)
            if isinstance(turns, list) and len(cast("list[object]", turns)) > 1:
                report = _of_several_turns(cast("dict[str, object]", said), cast("dict[str, object]", report))
        return {self._details: to_json(report)}


class MessagesUsage:
    """Usage of `/v1/messages`, whose `input_tokens` are those that no cache had.

    Source: Anthropic's API reference; vLLM 0.32.0 anthropic/serving.py, `_build_anthropic_usage`.
    """

    def cache_report(self, usage: Mapping[str, object]) -> object:
        """See `UsageForm.cache_report`."""
        return {name: usage[name] for name in _MESSAGES_CACHE if _count(usage.get(name)) is not None}

    def reports_cache(self, usage: Mapping[str, object]) -> bool:
        """See `UsageForm.reports_cache`."""
        return any(usage.get(name) is not None for name in _MESSAGES_CACHE)

    def corrections(self, usage: Mapping[str, object], report: object) -> Mapping[str, bytes | None]:
        """See `UsageForm.corrections`."""
        rest = _count(usage.get("input_tokens"))
        if rest is None or report == self.cache_report(usage):
            return _NOTHING
        known = cast("dict[str, int]", report) if isinstance(report, dict) else {}
        total = rest + sum(_count(usage.get(name)) or 0 for name in _MESSAGES_CACHE)
        changes: dict[str, bytes | None] = {"input_tokens": b"%d" % max(0, total - sum(known.values()))}
        for name in _MESSAGES_CACHE:
            if name in known:
                changes[name] = b"%d" % known[name]
            elif name in usage:
                changes[name] = None
        return changes


def _of_several_turns(said: Mapping[str, object], report: Mapping[str, object]) -> object:
    """Returns details of an answer for which an engine has run a model more than once.

    Prefill has computed the prompt of the first turn. The others are decode's.
    """
    turns = list(cast("Sequence[object]", said[_CACHED_PER_TURN]))
    first, total, cached = _count(turns[0]), _count(said.get(_CACHED)), _count(report.get(_CACHED))
    if first is None or total is None or cached is None:
        return report
    turns[0] = cached
    return {**said, _CACHED: max(0, total - first + cached), _CACHED_PER_TURN: turns}


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


CHAT_USAGE: Final = DetailedUsage("prompt_tokens_details")
RESPONSES_USAGE: Final = DetailedUsage("input_tokens_details")
MESSAGES_USAGE: Final = MessagesUsage()
