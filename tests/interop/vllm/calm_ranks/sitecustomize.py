"""For an engine of several ranks on a machine of two cores: whoever waits for another process sleeps a little.

vLLM's scheduler and ranks wait for each other in loops of `os.sched_yield` (shm_broadcast.py), for a second and longer
where a transfer is under way. With two ranks bound to two cores nobody else gets a turn then: seen beside three busy
processes, 2026-11-23, when a Valkey server stood in the kernel's queue for longer than any store is waited for, so that
what was computed was never stored. No test shows it, as it takes a machine that is full. Python loads this module in
each process of an engine whose PYTHONPATH has its folder. Nothing else of vLLM is another one than without it.
"""

import os
import time
from typing import Final

_PAUSE_S: Final = 0.0002


def _sleep() -> None:
    time.sleep(_PAUSE_S)


os.sched_yield = _sleep
