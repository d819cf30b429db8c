"""The frames of a message over ZMQ: topic, number, payload; live ones and those that were asked for again.

Engines answer a request for replay with one message for each batch and one with the number 2^64 - 1 at the end. vLLM up
to 0.20 leaves the topic out there, later ones and SGLang have it; a router socket puts an empty frame in front. The
number of frames decides which frames are there, never the engine's version.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvparams.errors import Problem
from kvparams.kv_events.model import InvalidEvents

__all__ = ["MAX_SEQUENCE", "MessageFrames", "read_live", "read_replayed", "replay_request"]

MAX_SEQUENCE: Final = 2**64 - 2
_END: Final = 2**64 - 1
_MAX_TOPIC: Final = 1024


class MessageFrames(NamedTuple):
    """A `MessageFrames` holds the parts of one message."""

    topic: bytes
    sequence: int
    payload: bytes


def read_live(frames: Sequence[bytes]) -> MessageFrames:
    """A message from an engine's publisher: `topic, number, payload`.

    Raises:
        InvalidEvents: it has other frames.
    """
    if len(frames) != 3:
        raise _wrong(len(frames))
    topic, number, payload = frames
    found = MessageFrames(topic, _sequence(number, 1), payload)
    if len(topic) > _MAX_TOPIC:
        raise InvalidEvents((Problem((0,), "length", f"a topic of more than {_MAX_TOPIC} bytes"),))
    if found.sequence == _END:
        raise InvalidEvents((Problem((1,), "range", "this number marks the end of a replay"),))
    return found


def read_replayed(frames: Sequence[bytes]) -> MessageFrames | None:
    """A message that answers a request for replay, with the empty frame in front of it or without; None: that was all.

    Raises:
        InvalidEvents: it has other frames.
    """
    if not 2 <= len(frames) <= 4 or (len(frames) == 4 and frames[0]):
        raise _wrong(len(frames))
    number, payload = frames[-2:]
    if _sequence(number, len(frames) - 2) == _END:
        return None
    return read_live((frames[-3] if len(frames) > 2 else b"", number, payload))


def replay_request(first: int) -> tuple[bytes, bytes]:
    """Returns the frames that a dealer socket sends to get the batches from number `first` on."""
    return b"", first.to_bytes(8, "big")


def _sequence(number: bytes, index: int) -> int:
    if len(number) != 8:
        raise InvalidEvents((Problem((index,), "length", "a number has 8 bytes"),))
    return int.from_bytes(number, "big")


def _wrong(count: int) -> InvalidEvents:
    return InvalidEvents((Problem((), "length", f"a message of {count} frames"),))
