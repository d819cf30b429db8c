"""Defines what a connector's jobs say when they are done, and its counters.

A report says what happened to every page that was asked for; nothing is dropped in silence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvparams.pages import PageRefusalReason
from kvparams_connectors.store import ResultCode

__all__ = ["ConnectorStats", "LoadReport", "PrefixHit", "RefusedPage", "ReleaseReport", "SaveReport"]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest stored prefix of a plan."""

    tokens: int
    """Tokens that pages without a gap cover from token 0 on; a stored partial last page counts."""
    pages: int
    nbytes: int
    """Stored bytes of those pages, headers included."""
    failure: ResultCode | None = None
    """Why the search ended early, if the store failed; None if it ended at a page that is not there."""


@dataclass(frozen=True, slots=True)
class RefusedPage:
    """A page that was read and not used."""

    index: int
    key: str
    """Of the part that was not good."""
    reason: PageRefusalReason


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Describes what reached the blocks: the tokens [start_token, end_token), and not one more."""

    start_token: int
    end_token: int
    pages: int = 0
    nbytes: int = 0
    """Bytes read for those pages, headers included."""
    refused: tuple[RefusedPage, ...] = ()
    """The page at which the load stopped because it was not the page that was asked for."""
    failure: ResultCode | None = None
    """The store's result at which the load stopped (MISS, TIMEOUT, ...); None if it came to its end or refused."""
    skipped: bool = False
    """Nothing was asked for: by the measured rate, loading would have taken longer than recomputing."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """A `SaveReport` describes the result of each page of a save.

    A page whose parts fared differently counts as failed, else as saved.
    """

    saved: int = 0
    """Pages stored by this job."""
    existing: int = 0
    """Pages that were stored already."""
    dropped: int = 0
    """Pages for which there was no room on the way (slots of the arena, bounce buffers): they are not stored."""
    failed: Mapping[ResultCode, int] = field(default_factory=dict[ResultCode, int])
    """Pages that the store did not take, by its result."""
    nbytes: int = 0
    """Bytes stored by this job, headers included."""

    def __add__(self, other: "SaveReport") -> "SaveReport":
        """Joins the reports of different pages."""
        failed = {
            code: self.failed.get(code, 0) + other.failed.get(code, 0) for code in {**self.failed, **other.failed}
        }
        return SaveReport(
            self.saved + other.saved,
            self.existing + other.existing,
            self.dropped + other.dropped,
            failed,
            self.nbytes + other.nbytes,
        )

    @property
    def complete(self) -> bool:
        """Returns whether every page is stored, by this job or before."""
        return not self.dropped and not self.failed


@dataclass(frozen=True, slots=True)
class ReleaseReport:
    """Describes how many keys were deleted."""

    deleted: int = 0


@dataclass(slots=True)
class ConnectorStats:
    """Counters since the start, which only grow, and how much of the arena is free now."""

    slots: int
    """Parts of pages that may be on their way at a time."""
    slots_free: int
    """How many of them are not; less than `slots` when nothing goes on means that a store still holds buffers."""

    pages_loaded: int = 0
    bytes_loaded: int = 0
    tokens_loaded: int = 0
    loads_skipped: int = 0
    load_bytes_per_s: float = 0.0
    """The measured rate of loads; 0 while nothing is known."""
    pages_saved: int = 0
    bytes_saved: int = 0
    pages_existing: int = 0
    pages_dropped: int = 0
    pages_refused: dict[str, int] = field(default_factory=dict[str, int])
    """By reason (`kvparams.pages.PageRefusalReason`)."""
    store_failures: dict[str, int] = field(default_factory=dict[str, int])
    """By result code, without MISS."""
