"""Mooncake's client library, guarded.

Called before it is set up or after it is closed it ends the process; its calls block for 4.5 s while the master is
dead, 30 s while an owner is stopped, and as long as the master is stopped; while it closes it holds the interpreter's
lock (seen with 0.3.13.post1). No other module calls the library, and `StallBreaker` counts every call from before it
begins until after it has ended.
"""

import ctypes
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Final, TypeVar, cast

from kvparams_connectors.store_url import StoreUnreachable
from kvparams_connectors.stores.mooncake.library import (
    MooncakeDistributedStore,
    ReplicaDescriptors,
    load_library,
    replicate_config,
    set_up_client,
)
from kvparams_connectors.stores.mooncake.settings import MooncakeSettings
from kvparams_connectors.stores.mooncake.stall_breaker import StallBreaker
from kvparams_connectors.stores.mooncake.status_codes import MASTER_UNREACHABLE

__all__ = ["PATIENCE_S", "MooncakeClient", "MooncakeClosedError", "master_address"]

T = TypeVar("T")

_NO_KEY: Final = "kvparams?"
"""Nobody stores anything under this key."""
PATIENCE_S: Final = 1.0
"""A call that takes no longer is never taken for a stall."""


class MooncakeClosedError(Exception):
    """The client was closed; nothing was called."""


_NO_REQUEST: Final = bytes(64)
"""A master that runs closes the connection on which it comes, at once (its frames begin with a magic number; seen with
0.3.13)."""


def master_address(settings: MooncakeSettings) -> str:
    """Returns this machine's own address towards the master, after checking that the master answers.

    The library's `setup` waits for its answer with the interpreter's lock held, so with a master that is stopped the
    whole process would stand still.

    Raises:
        StoreUnreachable: it does not answer in time.
    """
    try:
        where = (settings.host, settings.port)
        with closing(socket.create_connection(where, settings.connect_s)) as connection:
            own = str(connection.getsockname()[0])
            with suppress(ConnectionError):  # closed already
                connection.sendall(_NO_REQUEST)
                connection.recv(1)
            return own
    except TimeoutError as error:
        raise StoreUnreachable(
            f"mooncake store: the process at {settings.master} does not answer; check that it is a Mooncake "
            "master and not stopped"
        ) from error
    except OSError as error:
        raise StoreUnreachable(
            f"mooncake store: no master answers at {settings.master}: {error}; start it with: "
            f"mooncake_master --rpc_port={settings.port}"
        ) from error


class MooncakeClient:
    """A `MooncakeClient` is a connection to a Mooncake cluster; any thread may use it."""

    def __init__(self, settings: MooncakeSettings) -> None:
        """Connects to the master within a time limit.

        Args:
            settings: the address of the master, and the other settings.

        Raises:
            StoreError: there is no master (StoreUnreachable), or the client library is missing or cannot be set up.
        """
        local = settings.local or master_address(settings)
        if settings.local:
            master_address(settings)
        module = load_library()
        self.stalls: Final = StallBreaker(PATIENCE_S)
        self._claiming: Final = threading.Lock()
        self._claimed: set[str] = set()
        self._config = replicate_config(module, settings)
        self._native = set_up_client(module, replace(settings, local=local))

    def is_master_alive(self) -> bool:
        """Returns whether the master answers, and within patience. May itself be stuck."""
        before = time.monotonic()
        answer = self.exists([_NO_KEY], before)[0]
        return answer >= 0 and time.monotonic() - before < PATIENCE_S

    def claim(self, keys: Iterable[str]) -> set[str]:
        """Claims keys and returns those that were free: the library mixes up two threads that put the same key."""
        with self._claiming:
            free = set(keys) - self._claimed
            self._claimed |= free
        return free

    def unclaim(self, keys: set[str]) -> None:
        """End a claim."""
        with self._claiming:
            self._claimed -= keys

    # ---- calls; each raises ClientClosedError after `close`

    def register(self, address: int, nbytes: int) -> int:
        """Let the library read and write this memory, which must live as long as the client."""
        return self._call(time.monotonic(), lambda native: native.register_buffer(address, nbytes))

    def unregister(self, address: int) -> int:
        """The memory that was registered at this address is used no more."""
        return self._call(time.monotonic(), lambda native: native.unregister_buffer(address))

    def exists(self, keys: Sequence[str], deadline: float) -> list[int]:
        """1, 0, or a number below 0. Leases what is there."""
        return self._answers(deadline, lambda native: native.batch_is_exist(list(keys)))

    def copies(self, keys: Sequence[str], deadline: float) -> dict[str, "ReplicaDescriptors"]:
        """Returns the locations of complete values, and leases them.

        A failure looks like a miss: ask `exists`.
        """
        found = self._call(deadline, lambda native: native.batch_get_replica_desc(list(keys)))
        return (
            cast("dict[str, ReplicaDescriptors]", found)
            if all(found.values())
            else {key: one for key, one in found.items() if one}
        )

    def remove(self, keys: Sequence[str], deadline: float, *, leased: bool = True) -> list[int]:
        """Remove values; also those that somebody has leased, unless `leased` is False."""
        return self._answers(deadline, lambda native: native.batch_remove(list(keys), leased))

    def put_start(self, keys: Sequence[str], sizes: Sequence[int], deadline: float) -> list[int]:
        """Room for new values, each key once; EXISTS or INVALID for what is there or has been started."""
        return self._answers(
            deadline, lambda native: native.batch_put_session_start(list(keys), list(sizes), self._config)
        )

    def put_ranges(
        self,
        keys: Sequence[str],
        addresses: list[list[int]],
        sizes: list[list[int]],
        offsets: list[list[int]],
        deadline: float,
    ) -> list[int]:
        """Write parts of values that were started; the bytes written for each key."""
        return self._answers(
            deadline, lambda native: native.batch_put_from_multi_buffer_ranges(list(keys), addresses, sizes, offsets)
        )

    def put_end(self, keys: Sequence[str], deadline: float) -> list[int]:
        """Make values visible. Only if every part was written: the library does not check."""
        return self._answers(deadline, lambda native: native.batch_put_session_end(list(keys)))

    def put_revoke(self, keys: Sequence[str], deadline: float) -> list[int]:
        """Forget values that were started."""
        return self._answers(deadline, lambda native: native.batch_put_session_revoke(list(keys)))

    def get_whole(
        self, keys: Sequence[str], addresses: list[list[int]], sizes: list[list[int]], deadline: float
    ) -> list[int]:
        """Read values, whose sizes these are, into registered memory; the bytes read for each key."""

        def call(native: MooncakeDistributedStore) -> list[int]:
            if all(len(parts) == 1 for parts in addresses):
                return native.batch_get_into(
                    list(keys), [parts[0] for parts in addresses], [parts[0] for parts in sizes]
                )
            return native.batch_get_into_multi_buffers(list(keys), addresses, sizes)

        return self._answers(deadline, call)

    def get_ranges(
        self,
        keys: Sequence[str],
        address: int,
        targets: Sequence[int],
        sources: Sequence[int],
        sizes: Sequence[int],
        deadline: float,
    ) -> list[int]:
        """Read one part of each value to `address` plus its target; the bytes read for each key."""
        nested = self._call(
            deadline,
            lambda native: native.get_into_ranges(
                [address],
                [list(keys)],
                [[[target] for target in targets]],
                [[[source] for source in sources]],
                [[[size] for size in sizes]],
            ),
            lambda found: any(answer in MASTER_UNREACHABLE for parts in found[0] for answer in parts),
        )
        return [parts[0] for parts in nested[0]]

    def close(self, timeout_s: float) -> bool:
        """Let no call begin, wait for those in flight at most `timeout_s`, and let go; whether that was possible.

        If a call is stuck, or the master does not answer, the library is left as it is: to close it under a call ends
        the process, and with a segment and a silent master it would hold the interpreter's lock for as long as that.
        """
        asked = threading.Event()

        def ask() -> None:
            with suppress(MooncakeClosedError):
                if self.is_master_alive():
                    asked.set()

        threading.Thread(target=ask, name="kvparams-mooncake-last", daemon=True).start()
        sound = asked.wait(PATIENCE_S)
        if not self.stalls.finish(timeout_s) or not sound:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._native))  # its destructor would close it
            return False
        self._native.close()
        return True

    def _answers(self, deadline: float, call: Callable[[MooncakeDistributedStore], list[int]]) -> list[int]:
        return self._call(deadline, call, lambda answers: not MASTER_UNREACHABLE.isdisjoint(answers))

    def _call(
        self,
        deadline: float,
        call: Callable[[MooncakeDistributedStore], T],
        lost: Callable[[T], bool] = lambda _: False,
    ) -> T:
        number = self.stalls.begin(time.monotonic(), deadline)
        if number is None:
            raise MooncakeClosedError
        away = False
        try:
            answer = call(self._native)
            away = lost(answer)
            return answer
        finally:
            self.stalls.end(number, lost=away)
