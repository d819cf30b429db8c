"""Ends a worker with its supervisor, whatever ends that."""

import ctypes
import signal
import sys
from typing import Final

__all__ = ["end_with_parent"]

_PR_SET_PDEATHSIG: Final = 1
"""Source: prctl(2)."""


def end_with_parent() -> None:
    """Asks the kernel to kill this process when the thread that started it ends, which is the supervisor's main thread.

    Only Linux can do this. Everywhere, and for a supervisor that ended before, the end of the channel has a worker cut
    its requests and end.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
