"""Mooncake's transfer engine, guarded: reads from another process's memory into a landing area of ours.

What decides how it is used, by reading (`mooncake-integration/transfer_engine/transfer_engine_py.cpp` at commit 007354c
and `multi_transport.cpp` of Mooncake): `batch_transfer_sync_read` blocks, and turns round on a core, for up to
30 s where the other side is stopped; when it gives up, or when one part of a batch has failed, other parts may still be
on their way and be written later. So it never gets a caller's buffer. The one rule: what a failed read was to land in
is never used again.

To let go of it takes most of a second, in which it holds the interpreter's lock (seen with 0.3.13.post1). It asks
nobody for a proof: who reaches its port may read and write all memory that is registered with it.
"""

import ctypes
import importlib
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol, cast

import numpy as np

from kvparams_connectors.arena import Arena, Slot
from kvparams_connectors.jobs import Job, Lane
from kvparams_connectors.settings import StoreError
from kvparams_connectors.stores.extents import Bytes

__all__ = ["Transfer"]

_LOGGER: Final = logging.getLogger(__name__)

_SETUP_S: Final = 20.0
_CLOSE_S: Final = 2.0
_SLOTS: Final = 8


class _Native(Protocol):
    """What is used of `mooncake.engine.TransferEngine`."""

    def initialize(self, local: str, metadata: str, protocol: str, devices: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, address: int, nbytes: int, /) -> int: ...
    def unregister_memory(self, address: int, /) -> int: ...
    def batch_transfer_sync_read(
        self, session: str, targets: list[int], sources: list[int], lengths: list[int], /
    ) -> int: ...


class Transfer:
    """A transfer engine, its landing area, and the threads that wait for it. Any thread may use it."""

    def __init__(self, local: str, *, protocol: str, devices: str, buffer_bytes: int, threads: int) -> None:
        """Args:
            local: where others find this process.
            protocol: `tcp` or `rdma`.
            devices: RDMA devices, separated by commas.
            buffer_bytes: of the landing area.
            threads: how many reads at a time.

        Raises:
            StoreError: the library cannot be loaded or set up.
        """
        self._native = _set_up(local, protocol, devices)
        self.session: Final = (
            f"[{local}]:{self._native.get_rpc_port()}" if ":" in local else (f"{local}:{self._native.get_rpc_port()}")
        )
        """How others call this process."""
        self.landing: Final = Arena(buffer_bytes, max(64, buffer_bytes // _SLOTS // 64 * 64))
        """Where values arrive."""
        self._registered: list[Bytes] = []
        self._lost: list[Slot] = []
        self._lock = threading.Lock()
        self._threads: Final = threads
        self._busy = 0
        self._lane = Lane("kvparams-peer-transfer", threads=threads)
        self.offer(np.frombuffer(self.landing.memory, dtype=np.uint8))

    @property
    def lost(self) -> int:
        """Slots of the landing area that are not used any more."""
        with self._lock:
            return len(self._lost)

    @property
    def free(self) -> bool:
        """Whether a read would begin at once: it does not where reads that were given up are still stuck."""
        return self._busy < self._threads

    def offer(self, memory: Bytes) -> None:
        """Let the engine read and write this memory, which is kept alive.

        Raises:
            StoreError: it does not take it.
        """
        answer = self._native.register_memory(memory.ctypes.data, memory.size)
        if answer != 0:
            raise StoreError(f"peer store: Mooncake's transfer engine does not take {memory.size} bytes: {answer}")
        self._registered.append(memory)

    def withdraw(self, memory: Bytes) -> None:
        """It is not to be read any more, if it was offered."""
        where = memory.ctypes.data
        if any(one.ctypes.data == where for one in self._registered):
            self._native.unregister_memory(where)
            self._registered = [one for one in self._registered if one.ctypes.data != where]

    def read(self, session: str, slot: Slot, pieces: Sequence[tuple[int, int]], deadline: float) -> bool:
        """Read these addresses and lengths there, one after the other, into the beginning of `slot`.

        Whether they are there; if not, the slot is not the caller's any more.
        """
        start = int(np.frombuffer(slot.view, dtype=np.uint8).ctypes.data)
        targets: list[int] = []
        for _, length in pieces:
            targets.append(start)
            start += length
        sources, lengths = [address for address, _ in pieces], [length for _, length in pieces]
        outcome: list[int] = []

        def work(_: Job[bool]) -> bool:
            with self._lock:
                self._busy += 1
            try:
                outcome.append(self._native.batch_transfer_sync_read(session, targets, sources, lengths))
            finally:
                with self._lock:
                    self._busy -= 1
            return outcome[0] == 0

        job = self._lane.submit(work, deadline - time.monotonic(), timed_out=False, refused=False)
        if job.result():
            return True

        def settle() -> None:
            if outcome in ([], [0]):  # it was never begun, or has ended well after all
                slot.give_back()
            else:
                with self._lock:
                    self._lost.append(slot)

        job.on_settled(settle)
        return False

    def close(self) -> None:
        """Wait, within bounds, for reads, and let go; a read that is stuck keeps the memory and the engine for ever."""
        if not self._lane.close(_CLOSE_S) or self.lost:
            for kept in (self._native, self._registered, self.landing):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
            _LOGGER.error("peer: a transfer was stuck when its store was closed; its memory is kept")
            return
        for memory in self._registered:
            self._native.unregister_memory(memory.ctypes.data)


def _set_up(local: str, protocol: str, devices: str) -> _Native:
    """By a thread of its own: it is not known how long that takes."""
    try:
        module: Any = importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise StoreError(
            f"peer store: Mooncake's transfer engine cannot be loaded ({error}); pip install 'kvparams[mooncake]' on "
            "machines with CUDA, 'kvparams[mooncake-cpu]' on others, and the package libibverbs1; or transport=tcp"
        ) from error
    made: list[_Native] = []
    answers: list[int] = []

    def work() -> None:
        native = cast("_Native", module.TransferEngine())
        answers.append(native.initialize(local, "P2PHANDSHAKE", protocol, devices))
        made.append(native)

    thread = threading.Thread(target=work, name="kvparams-peer-setup", daemon=True)
    thread.start()
    thread.join(_SETUP_S)
    if not made or answers != [0]:
        raise StoreError(
            f"peer store: Mooncake's transfer engine cannot be set up as {local} over {protocol}: "
            f"{answers[0] if answers else 'no answer'}; its words stand on stderr"
        )
    return made[0]
