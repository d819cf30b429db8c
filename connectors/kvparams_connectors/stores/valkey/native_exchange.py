"""Puts or gets all values of a batch in native code, as far as replies are ordinary.

The Python code of `pipeline` goes on behind the first reply that is not, and does everything where there is no native
code, over TLS, and for values in several pieces of memory.
"""

from collections.abc import Sequence

from kvparams_connectors.store import Result, ResultCode, Results
from kvparams_connectors.stores.valkey.connection import NativeGet, ValkeyConnection, Window
from kvparams_connectors.stores.valkey.requests import GetRequest, PutRequest, ValkeyRequest
from kvparams_connectors.stores.valkey.transfer_turns import TransferTurns

__all__ = ["NativeResults", "get_natively", "put_natively"]

NativeResults = tuple[Results, int, OSError | None]
"""The results of the first requests, how many were sent, and why the connection is over, if it is."""


def put_natively(
    connection: ValkeyConnection, requests: Sequence[ValkeyRequest], window: Window, turns: TransferTurns
) -> NativeResults | None:
    """Puts values, when there is a turn; None if nothing was done.

    Raises:
        TimeoutError: there was no turn until the deadline; nothing was done.
        ValueError: a buffer was released; nothing was done.
        BufferError: a page cannot be written to; nothing was done.
    """
    puts = [request for request in requests if isinstance(request, PutRequest)]
    if not connection.is_native or len(puts) != len(requests):
        return None
    values = [put.native_parts() for put in puts]
    with turns.held(connection.deadline):
        done = connection.put_values(values, window)
    results = [
        Result(ResultCode.OK, put.nbytes) if is_stored else Result(ResultCode.EXISTS)
        for put, is_stored in zip(puts, done.answers, strict=False)
    ]
    return results, done.sent, done.error


def get_natively(
    connection: ValkeyConnection, requests: Sequence[ValkeyRequest], window: Window, turns: TransferTurns
) -> NativeResults | None:
    """Gets values; as `put_natively`."""
    gets = [request for request in requests if isinstance(request, GetRequest)]
    if not connection.is_native or len(gets) != len(requests):
        return None
    values: list[NativeGet] = []
    for get in gets:
        parts = get.native_parts()
        if parts is None:
            return None
        values.append(parts)
    are_hashed = any(get.wants_checksum for get in gets)
    with turns.held(connection.deadline):
        done = connection.get_values(values, window, are_hashed=are_hashed)
    results = [get.on_answer(*answer) for get, answer in zip(gets, done.answers, strict=False)]
    return results, done.sent, done.error
