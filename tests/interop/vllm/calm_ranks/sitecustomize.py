"""Makes an engine's ranks sleep while they wait, so that other processes of a machine with two cores get a turn.

vLLM's scheduler and ranks wait for each other in loops of `os.sched_yield` (shm_broadcast.py), for a second and longer
while a transfer is under way. Two ranks bound to two cores then leave no time to other processes. This was seen beside
three busy processes, 2026-11-23: a Valkey server waited in the kernel's queue for longer than any store's deadline, so
no KV was stored. No test shows it, because it takes a full machine. Python loads this module in each process of an
engine whose PYTHONPATH has its folder. It changes nothing else of vLLM.
"""

import os
import time
from typing import Final

_PAUSE_S: Final = 0.0002


def _sleep() -> None:
    time.sleep(_PAUSE_S)


os.sched_yield = _sleep
