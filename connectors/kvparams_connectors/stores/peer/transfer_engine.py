"""Mooncake's transfer engine, guarded: reads from another process's memory into a landing area of ours.

What decides how it is used, by reading (`mooncake-integration/transfer_engine/transfer_engine_py.cpp` at commit 007354c
and `multi_transport.cpp` of Mooncake): `batch_transfer_sync_read` blocks, and turns round on a core, for up to 30 s
where the other side is stopped; when it gives up, or when one part of a batch has failed, other parts may still be on
their way and be written later. So it never gets a caller's buffer. The landing slot of a failed read is never used
again; a new landing area takes its place, a few times.

To let go of it takes most of a second, in which it holds the interpreter's lock (seen with 0.3.13.post1). It listens on
all addresses of the machine and asks nobody for a proof: who reaches its port, which it chooses itself, may read and
write all memory that is registered with it. And it follows what the engine there says of itself: data is read from the
host and port that stand in that engine's descriptor, so who is read from at all can send it anywhere.
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
from kvparams_connectors.jobs import Job, WorkerPool
from kvparams_connectors.store_url import StoreError
from kvparams_connectors.stores.extents import ByteArray

__all__ = ["GuardedTransferEngine"]

_LOGGER: Final = logging.getLogger(__name__)

_SETUP_S: Final = 20.0
_CLOSE_S: Final = 2.0
_SLOTS: Final = 8
_MOST_AREAS: Final = 4
"""Landing areas, one after the other, as all slots of one are lost."""


class _NativeTransferEngine(Protocol):
    """Describes what is used of `mooncake.engine.TransferEngine`."""

    def initialize(self, local: str, metadata: str, protocol: str, devices: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, address: int, nbytes: int, /) -> int: ...
    def unregister_memory(self, address: int, /) -> int: ...
    def batch_transfer_sync_read(
        self, session: str, targets: list[int], sources: list[int], lengths: list[int], /
    ) -> int: ...


class GuardedTransferEngine:
    """A transfer engine, its landing area, and the threads that wait for it. Any thread may use it."""

    def __init__(self, local: str, *, protocol: str, devices: str, buffer_bytes: int, threads: int) -> None:
        """Sets up the library, registers a landing area, and starts the worker threads.

        Args:
            local: the host name or address under which other processes find this one.
            protocol: `tcp` or `rdma`.
            devices: RDMA devices, separated by commas.
            buffer_bytes: the size of a landing area, in bytes.
            threads: the number of reads at a time.

        Raises:
            StoreError: the library cannot be loaded or set up.
        """
        self._native = _set_up(local, protocol, devices)
        self.session: Final = (
            f"[{local}]:{self._native.get_rpc_port()}" if ":" in local else (f"{local}:{self._native.get_rpc_port()}")
        )
        """How others call this process."""
        self._buffer_bytes: Final = buffer_bytes
        self._areas: list[Arena] = []
        self._registered: list[ByteArray] = []
        self._lost: list[Slot] = []
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        self._threads: Final = threads
        self._busy = 0
        self._add_area()
        self._lane = WorkerPool("kvparams-peer-transfer", threads=threads)

    @property
    def landing_area(self) -> Arena:
        """Returns where values arrive."""
        return self._areas[-1]

    @property
    def lost_slots(self) -> int:
        """Slots, of all landing areas so far, that are not used any more."""
        with self._lock:
            return len(self._lost)

    @property
    def is_exhausted(self) -> bool:
        """Returns whether all slots of all landing areas that there may be are lost: nothing is read any more."""
        return self._left() == 0

    @property
    def is_idle(self) -> bool:
        """Returns whether a read would begin at once: it does not where reads that were given up are still stuck."""
        return self._busy < self._threads

    def register_memory(self, memory: ByteArray) -> None:
        """Let the engine read and write this memory, which is kept alive.

        Raises:
            StoreError: it does not take it.
        """
        answer = self._native.register_memory(memory.ctypes.data, memory.size)
        if answer != 0:
            raise StoreError(f"peer store: Mooncake's transfer engine does not take {memory.size} bytes: {answer}")
        self._registered.append(memory)

    def unregister_memory(self, memory: ByteArray) -> None:
        """It is not to be read any more, if it was offered."""
        where = memory.ctypes.data
        if any(one.ctypes.data == where for one in self._registered):
            self._native.unregister_memory(where)
            self._registered = [one for one in self._registered if one.ctypes.data != where]

    def read(self, session: str, slot: Slot, pieces: Sequence[tuple[int, int]], deadline: float) -> bool:
        """Read these addresses and lengths there, one after the other, into the beginning of `slot`.

        Whether they are there; if not, the slot is not the caller's any more.
        """
        start = _address(slot.view)
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
                slot.release()
            else:
                self._lose(slot)

        job.add_settled_callback(settle)
        return False

    def _lose(self, slot: Slot) -> None:
        with self._lock:
            self._lost.append(slot)
            lost, last = len(self._lost), len(self._areas) == _MOST_AREAS
        _LOGGER.warning("peer: a read by Mooncake's transfer engine failed; %d landing slots are lost so far", lost)
        with self._renewing:
            if self._left():
                return
            try:
                if not last:
                    self._add_area()
                    return
            except StoreError as error:
                _LOGGER.error("%s", error)
        _LOGGER.error("peer: no landing slot is left; from now on all values are read over the connections")

    def _left(self) -> int:
        """Slots of the landing area in use that are not lost."""
        landing = self.landing_area
        start = _address(landing.memory)
        with self._lock:
            gone = sum(start <= _address(slot.view) < start + landing.memory.nbytes for slot in self._lost)
        return landing.slots - gone

    def _add_area(self) -> None:
        area = Arena(self._buffer_bytes, max(64, self._buffer_bytes // _SLOTS // 64 * 64))
        self.register_memory(np.frombuffer(area.memory, dtype=np.uint8))
        self._areas.append(area)

    def close(self) -> None:
        """Wait, within bounds, for reads, and let go; a read that is stuck keeps the memory and the engine for ever."""
        if not self._lane.close(_CLOSE_S) or self.lost_slots:
            for kept in (self._native, self._registered, self._areas):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
            _LOGGER.error("peer: a transfer was stuck when its store was closed; its memory is kept")
            return
        for memory in self._registered:
            self._native.unregister_memory(memory.ctypes.data)


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def _set_up(local: str, protocol: str, devices: str) -> _NativeTransferEngine:
    """By a thread of its own: it is not known how long that takes."""
    try:
        module: Any = importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise StoreError(
            f"peer store: Mooncake's transfer engine cannot be loaded ({error}); pip install 'kvparams[mooncake]' on "
            "machines with CUDA, 'kvparams[mooncake-cpu]' on others, and the package libibverbs1; or transport=tcp"
        ) from error
    made: list[_NativeTransferEngine] = []
    answers: list[int] = []

    def work() -> None:
        native = cast("_NativeTransferEngine", module.TransferEngine())
        answers.append(native.initialize(local, "P2PHANDSHAKE", protocol, devices))
        made.append(native)

    thread = threading.Thread(target=work, name="kvparams-peer-setup", daemon=True)
    thread.start()
    thread.join(_SETUP_S)
    if not made or answers != [0]:
        raise StoreError(
            f"peer store: Mooncake's transfer engine cannot be set up as {local} over {protocol}: "
            f"{answers[0] if answers else 'no answer'}; its messages are on stderr"
        )
    return made[0]
