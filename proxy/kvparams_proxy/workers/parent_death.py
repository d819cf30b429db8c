"""Kills a worker when its supervisor exits, however that happens."""

import ctypes
import signal
import sys
from typing import Final

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG: Final = 1
"""Source: prctl(2)."""


def end_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that started it exits: the supervisor's main thread.

    Only Linux can do this. On other systems, and if the supervisor has exited before, the worker sees the end of the
    channel and exits.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
