"""Reads a list of events into one batch per event, for both JSON forms.

Every event that has a number makes a batch, even if nothing in it can be used, so that no false gap is seen.
"""

from collections.abc import Iterator
from typing import Annotated, Final

from msgspec import DecodeError, Meta, Raw, ValidationError
from msgspec.json import Decoder

from kvparams.errors import Problem
from kvparams.kv_events.model import MAX_EVENTS, EventBatch, EventSource, InvalidEvents, KVCacheEvent
from kvparams.kv_events.value_conversion import EventFault, check_bounds

__all__ = ["JSONEventReader", "event_rank"]

_MAX_RANK: Final = 65_535
_LIST: Final = Decoder(Annotated[list[Raw], Meta(max_length=MAX_EVENTS)])
_ONE: Final = Decoder(Raw)
_MAX_COMMAS: Final = 2**21
"""Every entry of a list costs memory far beyond its two bytes."""


class JSONEventReader:
    """The events of one text, and the batches that they become."""

    __slots__ = ("_found", "_listed", "_raws")

    def __init__(self, text: str | bytes, max_bytes: int) -> None:
        """Reads the text into raw events.

        Raises:
            InvalidEvents: the text is too long, no JSON, or holds too many events.
        """
        if len(text) > max_bytes:
            raise InvalidEvents((Problem((), "length", f"longer than {max_bytes} bytes"),))
        self._found: list[EventBatch] = []
        self._listed = text.lstrip()[:1] in ("[", b"[")
        self._raws = _read(text, listed=self._listed)

    def __iter__(self) -> Iterator[tuple[int, Raw]]:
        return enumerate(self._raws)

    @property
    def batches(self) -> tuple[EventBatch, ...]:
        """Returns the batches of the events read so far."""
        return tuple(self._found)

    def add(
        self, index: int, source: EventSource, number: int, found: tuple[KVCacheEvent, ...] | EventFault | None
    ) -> None:
        """An event of which at least the number is known; None: of a type that is not."""
        if isinstance(found, EventFault):
            self.lost(index, source, found, number)
        else:
            self._found.append(EventBatch(source, found or (), number, unknown=int(found is None)))

    def lost(self, index: int, source: EventSource, fault: EventFault, number: int | None = None) -> None:
        """An event that is malformed."""
        path = (*((index,) if self._listed else ()), *((fault.member,) if fault.member else ()))
        problems = (Problem(path, fault.kind, fault.message),)
        self._found.append(EventBatch(source, (), number, malformed=1, problems=problems))


def event_rank(rank: int | None, default: int, member: str) -> int:
    """The rank, where an event has one.

    Raises:
        EventFault: out of range.
    """
    return default if rank is None else check_bounds(rank, _MAX_RANK, member)


def _read(text: str | bytes, *, listed: bool) -> list[Raw]:
    commas = text.count(",") if isinstance(text, str) else text.count(b",")
    if commas > _MAX_COMMAS:
        raise InvalidEvents((Problem((), "length", f"more than {_MAX_COMMAS} commas"),))
    try:
        return _LIST.decode(text) if listed else [_ONE.decode(text)]
    except ValidationError:  # of a list of anything only the length is judged
        problem = Problem((), "length", f"more than {MAX_EVENTS} events")
    except RecursionError:
        problem = Problem((), "length", "nested too deep")
    except (DecodeError, UnicodeError):
        problem = Problem((), "json", "not one value in JSON")
    raise InvalidEvents((problem,)) from None
