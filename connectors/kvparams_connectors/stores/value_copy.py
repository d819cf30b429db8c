"""Copies values between callers' buffers and a store's memory, with their checksums, and says so to the callers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from kvparams.pages import HEADER_BYTES
from kvparams_connectors.hashed_copy import CopyPairs, copy_hashed
from kvparams_connectors.store import GetOp, PutOp
from kvparams_connectors.stores.progress import progress_step_bytes

__all__ = ["group_by_size", "read_values", "report_arrival", "write_values"]

_TOGETHER: Final = 4 << 20
"""Values of so many bytes are copied, become visible and are let go together: what is done for one value costs about as
much as for several."""
_SMALLEST: Final = 4096
_STEP: Final = 1 << 20
"""So much is copied before whoever looks at it is told. A quarter of that costs one thread a twelfth less, but then
two threads wait for each other more, since each step lets go of the interpreter lock twice: a get with verification had
0.58 of a memcpy, and 0.65 with this."""


def group_by_size(sizes: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Returns indexes, in order, in groups of a bounded size.

    Args:
        sizes: an index and the size of its value, in bytes.
    """
    groups: list[list[int]] = []
    room = 0
    for index, nbytes in sizes:
        if room < nbytes or not groups:
            groups.append([])
            room = _TOGETHER
        groups[-1].append(index)
        room -= max(nbytes, _SMALLEST)
    return groups


def write_values(ops: Sequence[PutOp], places: Sequence[CopyPairs]) -> list[bool]:
    """Copies values to their places in the store, and has them completed; see `PutOp`.

    Args:
        ops: what is put.
        places: for each operation the pieces of its value, in the store and in the caller's buffers.

    Returns:
        Which values were written. The buffers of the others were released by the caller.
    """
    ready = [op.on_checksum is not None or _completes(op) for op in ops]
    chosen = [at for at, is_ready in enumerate(ready) if is_ready]
    for at, checksum in zip(chosen, copy_hashed([places[at] for at in chosen], HEADER_BYTES), strict=True):
        complete = ops[at].on_checksum
        if complete is None:
            continue
        try:
            complete(checksum)
        except ValueError:  # the caller released what it looks at then
            ready[at] = False
        else:
            _copy_front(places[at], HEADER_BYTES)
    return ready


def _completes(op: PutOp) -> bool:
    try:
        op.resolve_before_read()
    except ValueError:  # the caller released what it looks at then
        return False
    return True


def read_values(ops: Sequence[GetOp], places: Sequence[CopyPairs]) -> list[int | None]:
    """Copies values out of the store.

    Args:
        ops: what is read.
        places: for each operation the pieces of its value, in the caller's buffers and in the store.

    Returns:
        For `report_arrival`: XXH3-64 of what follows the first `HEADER_BYTES` of each value; None where the caller has
        released a buffer.
    """
    checksums: list[int | None] = [0] * len(ops)
    at_once: list[int] = []
    for at, op in enumerate(ops):
        if op.on_checksum is not None or op.on_progress is None:
            at_once.append(at)
            continue
        try:
            _copy_with_progress(places[at], op.on_progress)
        except ValueError:  # the caller released what it looks at meanwhile
            checksums[at] = None
    for at, checksum in zip(at_once, copy_hashed([places[at] for at in at_once], HEADER_BYTES), strict=True):
        checksums[at] = checksum
    return checksums


def report_arrival(op: GetOp, nbytes: int, checksum: int) -> None:
    """Tells the caller that a value lies in its buffers; see `GetOp`."""
    if op.on_checksum is not None:
        op.on_checksum(nbytes, checksum)
    elif op.on_complete is not None:
        op.on_complete(nbytes)


def _copy_front(pairs: CopyPairs, nbytes: int) -> None:
    """Copies the first `nbytes` of a value again."""
    for target, source in pairs:
        size = min(nbytes, target.size)
        target[:size] = source[:size]
        nbytes -= size
        if not nbytes:
            return


def _copy_with_progress(pairs: CopyPairs, on_progress: Callable[[int], None]) -> None:
    step = progress_step_bytes(sum(target.size for target, _ in pairs), _STEP)
    done = 0
    on_progress(0)
    for target, source in pairs:
        for start in range(0, target.size, step):
            part = target[start : start + step]
            np.copyto(part, source[start : start + step])
            done += part.size
            on_progress(done)
