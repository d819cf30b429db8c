"""A process that lends memory to a Mooncake cluster: without one a cluster stores nothing.

    python -m kvparams_connectors.stores.mooncake.owner --master 127.0.0.1:50051 --size 4GiB

It says `ready` when the memory can be used, and stays until SIGTERM or SIGINT; what it stores is then gone. Memory for
a cache is lent by a process that does nothing else, so that an engine may end without it.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence

from kvparams_connectors.store_url import StoreError, StoreURL, parse_size
from kvparams_connectors.stores.mooncake.client import MooncakeClient
from kvparams_connectors.stores.mooncake.settings import MooncakeSettings

__all__ = ["main"]

_CLOSE_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Lend memory until a signal; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvparams_connectors.stores.mooncake.owner",
        description="Lend memory to a Mooncake cluster until SIGTERM.",
    )
    parser.add_argument("--master", required=True, metavar="HOST:PORT", help="where mooncake_master listens")
    parser.add_argument("--size", required=True, help="the size of the memory, at least 16MiB, for example 4GiB")
    parser.add_argument("--local", default="", help="the address at which clients reach this machine")
    parser.add_argument("--protocol", default="tcp", help="tcp or rdma")
    parser.add_argument("--devices", default="", help="RDMA devices, separated by commas")
    given = parser.parse_args(arguments)
    ended = threading.Event()

    def end(_number: int, _frame: object) -> None:
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        url = StoreURL("mooncake", "mooncake", given.master, "", {
            name: value
            for name, value in (
                ("segment", str(parse_size(given.size))),
                ("local", given.local),
                ("protocol", given.protocol),
                ("devices", given.devices),
            )
            if value
        })  # fmt: skip
        client = MooncakeClient(MooncakeSettings.of(url))
    except StoreError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    ended.wait()
    if not client.close(_CLOSE_S):
        os._exit(1)  # the library would wait for the master before it lets the process end
    return 0


if __name__ == "__main__":
    sys.exit(main())
