"""Uses a file store in processes that are killed; test_file_crashes.py starts them.

    crash_worker.py loop PATH SEED     use the store at random until killed; exit 1 at the first wrong byte
    crash_worker.py steps PATH STRIDE  be killed at every STRIDE-th line of the code that changes the index
    crash_worker.py race PATH SIZE KEY open or create the store, put a value, and say so

Contents follow from the key, so any reader can tell a wrong byte.
"""

import os
import signal
import sys
import time
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from kvparams_connectors.store import GetOp, KVStore, PutOp, ResultCode
from kvparams_connectors.stores.file.file_map import FileGeometry
from kvparams_connectors.stores.file.store import FileStore

DEADLINE_S = 20.0
UNIT = 4096


def content(key: str) -> memoryview:
    """Up to five units, another length for each key."""
    digest = xxh3_64_intdigest(key.encode())
    words = np.arange(5 * UNIT // 8, dtype=np.uint64) * np.uint64(digest | 1)
    return words.data.cast("B")[: digest % (5 * UNIT)]


def put(store: KVStore, *keys: str) -> list[ResultCode]:
    results = store.put([PutOp(key, (content(key),)) for key in keys], DEADLINE_S).result()
    return [result.code for result in results]


def read(store: KVStore, key: str) -> bool:
    """Whether the value is there; exits if it is there and wrong."""
    target = memoryview(bytearray(5 * UNIT))
    result = store.get([GetOp(key, (target,))], DEADLINE_S).result()[0]
    if result.code is ResultCode.MISS:
        return False
    if result.code is not ResultCode.OK or target[: result.nbytes] != content(key):
        sys.exit(f"{key}: {result} and the bytes are not those of the key")
    return True


def use_at_random(path: Path, seed: int) -> None:
    random = Random(seed)
    store = FileStore(path)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        keys = [f"key-{random.randrange(60)}" for _ in range(random.randrange(1, 4))]
        action = random.random()
        if action < 0.4:
            put(store, *keys)
        elif action < 0.9:
            for key in keys:
                read(store, key)
        else:
            store.delete(keys, DEADLINE_S).result()


class Killer:
    """Kills this process at a given line of the code that changes the index."""

    def __init__(self, step: int) -> None:
        self.left = step

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(("file/index.py", "extents.py", "file/values.py", "file/store.py")):
            return None
        if event == "line":
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
        return self.trace


def change(path: Path, step: int) -> None:
    """Evict, put, find and delete; killed at line `step`, if there are so many."""
    store = FileStore(path)
    ops = [PutOp(key, (content(key),)) for key in ("new-1", "old-3", "new-2")]
    sys.settrace(Killer(step).trace)
    deadline = time.monotonic() + DEADLINE_S
    results = store.put_blocking(ops, deadline)
    store.delete_blocking(["old-3", "new-1"], deadline)
    sys.settrace(None)
    if ResultCode.FULL in [result.code for result in results]:
        os._exit(3)
    os._exit(0)


def be_killed_at_every_step(path: Path, stride: int) -> None:
    """A surviving process watches: nothing wrong, nothing lost but what had to go, all room usable."""
    size = next(size for size in range(UNIT, 1 << 20, UNIT) if FileGeometry.fitting(size, UNIT).units == 20)
    survivor = FileStore(path, size, unit_bytes=UNIT)
    old = [f"old-{number}" for number in range(6)]
    step, repairs = 0, survivor.repairs
    while True:
        survivor.delete([*old, "new-1", "new-2"], DEADLINE_S).result()
        whole = memoryview(bytearray(survivor.capabilities.max_value_bytes))
        if survivor.put([PutOp("whole", (whole,))], DEADLINE_S).result()[0].code is not ResultCode.OK:
            sys.exit(f"step {step}: room was lost")
        survivor.delete(["whole"], DEADLINE_S).result()
        put(survivor, *old)
        before = [key for key in old if read(survivor, key)]
        child = os.fork()
        if child == 0:
            change(path, step)
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status):
            if os.WEXITSTATUS(status):
                sys.exit(f"step {step}: the worker failed with {os.WEXITSTATUS(status)}")
            break
        if step % 3 == 0:  # a newcomer finds what the dead process left, or else the survivor does
            FileStore(path).close()
        # What was used last is never a victim: it is still there, unless it is what was to be deleted.
        for key in before[-2:]:
            if key != "old-3" and not read(survivor, key):
                sys.exit(f"step {step}: {key} was lost")
        for key in (*old, "new-1", "new-2"):
            read(survivor, key)
        if step % 2:  # what the dead process was writing is written anew; otherwise its room must come back by itself
            again = put(survivor, "new-1", "new-2")
            if not set(again) <= {ResultCode.OK, ResultCode.EXISTS}:
                sys.exit(f"step {step}: {again}")
            if not (read(survivor, "new-1") and read(survivor, "new-2")):
                sys.exit(f"step {step}: what was put is not there")
        step += stride
    survivor.close()
    sys.stdout.write(f"{step} {survivor.repairs - repairs}\n")


def race(path: Path, size: int, key: str) -> None:
    store = FileStore(path, size, unit_bytes=UNIT)
    sys.stdout.write(f"{put(store, key)[0].value} {read(store, key)}\n")
    store.close()


if __name__ == "__main__":
    mode, where = sys.argv[1], Path(sys.argv[2])
    if mode == "loop":
        use_at_random(where, int(sys.argv[3]))
    elif mode == "steps":
        be_killed_at_every_step(where, int(sys.argv[3]))
    else:
        race(where, int(sys.argv[3]), sys.argv[4])
