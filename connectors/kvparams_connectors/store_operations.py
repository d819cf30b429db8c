"""Defines what is asked of a store, what it answers, and which operations every store takes.

A batch never raises for one of its keys: every key has its own result from a closed set.
"""

import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

__all__ = [
    "GetOp",
    "PutOp",
    "Result",
    "ResultCode",
    "Results",
    "are_valid_keys",
    "is_valid_get",
    "is_valid_key",
    "is_valid_put",
]

_KEY: Final = re.compile(r"[A-Za-z0-9._-]{1,128}")
_LONGEST: Final = 128
_LETTERS: Final = f"{string.ascii_letters}{string.digits}._-".encode()


class ResultCode(Enum):
    """Describes what became of one key of a batch."""

    OK = "ok"
    EXISTS = "exists"
    """put: the key is there already, whole; nothing was written."""
    MISS = "miss"
    """get, exists, delete: the key is not there."""
    CORRUPT = "corrupt"
    """get: the store itself found the value damaged."""
    FULL = "full"
    """put: the value is within the limit, but there is no room, and none can be made by evicting: what the same batch
    has put or found already stays, and so does what is being written or read at the moment."""
    TOO_LARGE = "too_large"
    """put: larger than the store takes. get: larger than the buffers; `nbytes` says how large."""
    TIMEOUT = "timeout"
    """The deadline passed; the work may still be running (see `Job.settled`)."""
    UNAVAILABLE = "unavailable"
    """The store cannot be reached, is closed or has too much to do."""
    DENIED = "denied"
    """The store refuses this caller."""
    INVALID = "invalid"
    """The operation itself is wrong: a bad key, a buffer that cannot be used."""
    INTERNAL = "internal"
    """A defect in the store; the log has it."""


class Result(NamedTuple):
    """Describes what became of one key."""

    code: ResultCode
    nbytes: int = 0
    """put, get: bytes moved. exists: the value's size, if `has_size`. TOO_LARGE on get: the value's size. Otherwise
    0."""
    has_size: bool = True
    """exists: False if the store has not asked how large the value is (`Capabilities.reports_sizes`). `nbytes` is 0
    then, so that whoever compares it takes the value for none of his."""

    def matches_size(self, nbytes: int) -> bool:
        """exists: whether a value is there that has `nbytes`, as far as the store can tell. A get says for certain."""
        return self.code is ResultCode.OK and (not self.has_size or self.nbytes == nbytes)


Results = list[Result]
"""One result per operation, in the order of the batch."""


@dataclass(frozen=True, slots=True)
class PutOp:
    """Store the bytes of `buffers`, one after the other, under `key`."""

    key: str
    buffers: Sequence[memoryview]
    before_read: Callable[[], object] | None = None
    """A store calls it once before it looks into the buffers, if it does, and best right before: the caller writes then
    what follows from the rest of the value, such as a checksum, which has to read all of it and so brings it into the
    processor's caches. Called by the thread that moves the value; it neither waits nor raises."""
    on_idle: Callable[[], bool] | None = None
    """A store that calls `before_read` may call this before, as often as it likes, where it would only wait: the caller
    does a little of that work, tens of microseconds, and says whether more is left. The value stays as it is
    meanwhile."""

    on_checksum: Callable[[int], object] | None = None
    """A store that copies the value may call it in place of `before_read`: when it has copied the value, with the
    XXH3-64 of what follows the first `kvparams.pages.HEADER_BYTES`, as it has written it. The caller then writes those
    first bytes, and the store copies them after the call. It may raise ValueError: the buffers were released."""
    page_header: bytes | None = None
    """`kvparams.pages.unsealed_header`, if the value is a page that lacks its two checksums. A store may complete the
    page in the first buffer, which has room for it, in place of calling `before_read`."""

    def resolve_before_read(self) -> "PutOp":
        """Calls `before_read` and returns the operation without it.

        It serves a store that hands the value on, or looks at it more than once.
        """
        if self.before_read is None:
            return self
        self.before_read()
        return PutOp(self.key, self.buffers)


@dataclass(frozen=True, slots=True)
class GetOp:
    """Read the value of `key` into `buffers`, one after the other. They may be larger than the value together."""

    key: str
    buffers: Sequence[memoryview]
    on_complete: Callable[[int], None] | None = None
    """A store may call it when the value lies in the buffers, with its size, before the job says so: the caller looks
    at it while it is in the processor's caches. Called by the thread that moved the value; it neither waits nor raises.
    A store that changes the bytes afterwards, or hands out other ones, must not call it, nor let an inner store."""
    on_progress: Callable[[int], None] | None = None
    """A store that calls `on_complete` may call this before, with 0 whenever it begins to fill the buffers, and then
    with how many bytes lie in them that it will not touch again, so that the caller looks at them piece by piece."""
    on_checksum: Callable[[int, int], None] | None = None
    """A store that would call `on_complete` may call it in place of that and of `on_progress`: with the size of the
    value and the XXH3-64 of what follows the first `kvparams.pages.HEADER_BYTES`, as it has written it."""
    caller_verifies: bool = False
    """The caller checks all of the bytes against what it asked for. Then a store may leave out what it would have to
    ask a server for only to be sure that it has not read another value's bytes. A store that keeps what it has read, or
    hands it to others, passes False on."""


def is_valid_key(key: str) -> bool:
    """Returns whether every store takes this key."""
    return _KEY.fullmatch(key) is not None


def are_valid_keys(keys: Sequence[str]) -> list[bool]:
    """`is_valid_key` of each; quicker where all are, as all pages of a long prompt."""
    lengths = [len(key) for key in keys]
    if keys and min(lengths) and max(lengths) <= _LONGEST:
        text = "".join(keys)
        if text.isascii() and not text.encode().translate(None, _LETTERS):
            return [True] * len(keys)
    return [is_valid_key(key) for key in keys]


def is_valid_put(op: PutOp) -> bool:
    """Returns whether every store takes this operation."""
    try:
        return is_valid_key(op.key) and all(buffer.c_contiguous for buffer in op.buffers)
    except ValueError:  # a buffer was released
        return False


def is_valid_get(op: GetOp) -> bool:
    """Returns whether every store takes this operation."""
    try:
        return is_valid_key(op.key) and all(buffer.c_contiguous and not buffer.readonly for buffer in op.buffers)
    except ValueError:  # a buffer was released
        return False
