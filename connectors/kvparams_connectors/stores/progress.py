"""Defines how often a store says that a part of a value has arrived (`GetOp.on_progress`)."""

__all__ = ["progress_step_bytes"]


def progress_step_bytes(nbytes: int, about: int) -> int:
    """Returns how much of a value of `nbytes` comes before the caller is told (`GetOp.on_progress`).

    About so much, in equal parts: what is copied goes through a core's own cache twice, as source and as copy, and the
    kernel's buffers with it, so that of a mebibyte little is left in a cache of two.
    """
    return -(-nbytes // max(1, nbytes // about)) if nbytes else 1
