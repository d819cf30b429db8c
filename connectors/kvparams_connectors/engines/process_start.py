"""Determines when this process began: nothing that an earlier one has accepted may be accepted again.

Where it cannot be known it is now, which refuses more and never less.
"""

import os
import time
from pathlib import Path

__all__ = ["process_start_time"]


def process_start_time() -> float:
    """In seconds since 1970, by this machine's clock as it is now."""
    now = time.time()
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()  # behind a name with anything in it
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc_pid_stat(5)
    except (OSError, AttributeError, ValueError, IndexError):  # not Linux
        return now
    return now - max(0.0, age)
