"""For an engine of several ranks on a machine of two cores: whoever waits for another process sleeps a little.

vLLM's scheduler and ranks wait for each other in loops of `os.sched_yield` (shm_broadcast.py), for a second and longer
where a transfer is under way. With two ranks bound to two cores nobody else gets a turn then: measured beside one busy
process, an answer took 10 s in place of 0.2 s, and a Valkey server that was asked stood in the kernel's queue for 30 to
120 s, longer than any store is waited for, so that what was computed was never stored. Python loads this module in each
process of an engine whose PYTHONPATH has its folder. Nothing else of vLLM is another one than without it.
"""

import os
import time
from typing import Final

_PAUSE_S: Final = 0.0002


def _sleep() -> None:
    time.sleep(_PAUSE_S)


os.sched_yield = _sleep
