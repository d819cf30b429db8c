"""Defines what Mooncake's numbers mean. Pure.

Source: `mooncake-store/include/types.h` of Mooncake 0.3.13, and what its client answers when it is made to fail. A
number that is not known here is a failure of the store, never a miss and never a success.
"""

from enum import IntEnum
from typing import Final

from kvparams_connectors.store import ResultCode

__all__ = ["MASTER_UNREACHABLE", "MooncakeStatus", "result_code"]


class MooncakeStatus(IntEnum):
    """The numbers that a decision depends on."""

    OK = 0
    NO_ROOM = -200
    """No segment has room for it, there is no segment, or it is larger than every segment."""
    INVALID = -600
    """For a put that is started: this client has started one of the same key already."""
    NOT_READY = -703
    """Somebody has started to put it."""
    NOT_FOUND = -704
    EXISTS = -705
    """It is there, or somebody has started to put it."""
    LEASED = -706
    LEASE_EXPIRED = -707
    """The read took longer than the lease: the memory may have had another owner meanwhile."""
    GONE = -712
    TRANSFER_FAILED = -800
    CHECKSUM = -801
    RPC_FAILED = -900
    RPC_TIMEOUT = -901


MASTER_UNREACHABLE: Final = frozenset({MooncakeStatus.RPC_FAILED, MooncakeStatus.RPC_TIMEOUT})
"""No call can succeed before the master answers again."""

_CODES: Final[dict[int, ResultCode]] = {
    MooncakeStatus.OK: ResultCode.OK,
    MooncakeStatus.NO_ROOM: ResultCode.FULL,
    MooncakeStatus.INVALID: ResultCode.INVALID,
    MooncakeStatus.NOT_READY: ResultCode.MISS,
    MooncakeStatus.NOT_FOUND: ResultCode.MISS,
    MooncakeStatus.EXISTS: ResultCode.EXISTS,
    MooncakeStatus.LEASE_EXPIRED: ResultCode.TIMEOUT,
    MooncakeStatus.GONE: ResultCode.MISS,
    MooncakeStatus.CHECKSUM: ResultCode.CORRUPT,
}


def result_code(answer: int) -> ResultCode:
    """The code for what one key was answered; lengths count as success."""
    if answer > 0:
        return ResultCode.OK
    return _CODES.get(answer, ResultCode.UNAVAILABLE)
