"""The listening sockets of a proxy with several workers.

The supervisor opens one listening socket for each worker number. All are on one port, in one `SO_REUSEPORT` group. A
worker inherits the socket of its number, and the supervisor keeps a copy until the proxy shuts down. So the queue of a
worker that was killed or replaced is never reset: its successor accepts the connections.

One socket shared by all workers would need no successor, but it spreads connections badly: uvloop accepts until the
queue is empty, so whichever worker is awake takes all. Measured: 64 connections that stay open, four workers, two
cores, uvloop 0.23, Linux 6.18. The numbers are connections per worker, in the most uneven of three runs:

    clients connect            one shared socket    a group
    all at once                29, 28, 4, 3         23, 16, 13, 12
    one after the other        31, 27, 5, 1         22, 18, 14, 10
    while 32 others are busy   53, 11, 0, 0         19, 16, 16, 13

The kernel would still put new connections into the queue of a worker that is down, to wait until its successor has
started. A classic BPF program therefore chooses at random among the workers that are up. It is replaced whenever these
change. Only Linux has such groups; on other systems workers share one socket.
"""

import ctypes
import logging
import socket
import struct
import sys
from collections.abc import Collection, Sequence
from typing import Final, Self

__all__ = ["WorkerListeners", "steering_program"]

_log: Final = logging.getLogger(__name__)
_SO_ATTACH_REUSEPORT_CBPF: Final = 51
"""Source: Linux, include/uapi/asm-generic/socket.h."""
_LOAD_WORD: Final = 0x20
"""BPF_LD | BPF_W | BPF_ABS; this and the following: Linux, include/uapi/linux/bpf_common.h."""
_MODULO: Final = 0x94
"""BPF_ALU | BPF_MOD | BPF_K."""
_JUMP_IF_EQUAL: Final = 0x15
"""BPF_JMP | BPF_JEQ | BPF_K."""
_RETURN: Final = 0x06
"""BPF_RET | BPF_K."""
_RANDOM: Final = 0xFFFFF000 + 56
"""SKF_AD_OFF + SKF_AD_RANDOM, where a load gives a random number (include/uapi/linux/filter.h)."""
_INSTRUCTION: Final = struct.Struct("HBBI")


def steering_program(indexes: Collection[int]) -> bytes:
    """Returns a classic BPF program that returns one of `indexes`, each with the same probability."""
    code = [(_LOAD_WORD, 0, 0, _RANDOM), (_MODULO, 0, 0, len(indexes))]
    for number, index in enumerate(indexes):
        code += [(_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, index)]
    code.append((_RETURN, 0, 0, next(iter(indexes))))
    return b"".join(_INSTRUCTION.pack(*each) for each in code)


class WorkerListeners:
    """The sockets of all worker numbers. Use it in a `with` block."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        self._sockets = sockets
        self._is_steered = len(sockets) > 1 and len(set(map(id, sockets))) == len(sockets)

    @classmethod
    def open(
        cls,
        host: str,
        port: int,
        count: int,
        backlog: int,
        inherited: Sequence[socket.socket] = (),
        *,
        grow: bool = True,
    ) -> Self:
        """Listens there; port 0 is any free one.

        Args:
            host: an address of this machine.
            port: the port.
            count: the number of workers.
            backlog: how many connections may wait in each socket.
            inherited: listening sockets to use instead, at most one for each worker.
            grow: whether further sockets are opened beside `inherited`. They close with this process, which resets
                what waits in them.

        Raises:
            OSError: the port is taken, also by another proxy with several workers, or the host is not one of this
                machine's, or `inherited` cannot be used.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        if inherited:
            _check_inherited(inherited, count)
            family = inherited[0].family
        # The first socket joins the group only after `listen`. Otherwise it would be admitted to an existing group, and
        # two proxies would share the port.
        first = inherited[0] if inherited else socket.create_server((host, port), family=family, backlog=backlog)
        sockets = list(inherited) or [first]
        try:
            if sys.platform == "linux" and (grow or not inherited) and len(sockets) < count:
                first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                where = first.getsockname()[:2]
                while len(sockets) < count:
                    sockets.append(socket.create_server(where, family=family, backlog=backlog, reuse_port=True))
        except OSError as error:
            _log.warning("the workers share one listening socket, which spreads connections unevenly: %s", error)
            kept = max(1, len(inherited))
            for other in sockets[kept:]:
                other.close()
            del sockets[kept:]
        return cls(sockets if len(sockets) == count else [sockets[number % len(sockets)] for number in range(count)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """The sockets, in the order of the worker numbers."""
        return self._sockets

    def __getitem__(self, number: int) -> socket.socket:
        """Returns the socket of a worker number, from 1 on."""
        return self._sockets[number - 1]

    @property
    def port(self) -> int:
        """The port."""
        return self._sockets[0].getsockname()[1]

    def steer(self, numbers: Collection[int]) -> None:
        """Sends new connections to the workers of these numbers only; to all if there are none."""
        if not self._is_steered:
            return
        indexes = [number - 1 for number in numbers] or range(len(self._sockets))
        code = steering_program(indexes)
        held = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("HP", len(code) // _INSTRUCTION.size, ctypes.addressof(held))
        try:
            self._sockets[0].setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)
        except OSError as error:
            self._is_steered = False
            _log.warning("new connections may wait for workers that are down: %s", error)

    def close(self) -> None:
        """Closes the sockets of this process. The copies of workers stay open."""
        for one in self._sockets:
            one.close()


def _check_inherited(sockets: Sequence[socket.socket], count: int) -> None:
    """Checks that sockets can be those of so many workers.

    Raises:
        OSError: they cannot.
    """
    if len(sockets) > count:
        raise OSError(f"{len(sockets)} listening sockets are given: --workers must be {len(sockets)} or more")
    if len({one.getsockname()[:2] for one in sockets}) > 1:
        raise OSError("the listening sockets that are given have different addresses")
