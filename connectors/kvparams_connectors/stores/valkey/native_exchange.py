"""Puts or gets all values of a batch in native code, as far as replies are ordinary.

The Python code of `pipeline` goes on behind the first reply that is not, and does everything where there is no native
code, over TLS, and for values in several pieces of memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvparams_connectors.store import Result, ResultCode, Results
from kvparams_connectors.stores.valkey.connection import NativeGet, ValkeyConnection, Window
from kvparams_connectors.stores.valkey.requests import GetRequest, PutRequest, ValkeyRequest

__all__ = ["NativeResults", "do_natively"]


@dataclass(frozen=True, slots=True)
class NativeResults:
    """The `NativeResults` are what came of several requests."""

    results: Results
    """Of the first requests."""
    sent: int
    """So many requests were sent."""
    error: OSError | None
    """Why the connection is over; None: it goes on."""


def do_natively(
    connection: ValkeyConnection, requests: Sequence[ValkeyRequest], window: Window
) -> NativeResults | None:
    """Puts or gets values in native code; None if it is not for these requests.

    Raises:
        ValueError: a buffer was released; nothing was done.
        BufferError: a page cannot be written to; nothing was done.
    """
    puts = [request for request in requests if isinstance(request, PutRequest)]
    if puts and len(puts) == len(requests):
        return _put(connection, puts, window)
    gets = [request for request in requests if isinstance(request, GetRequest)]
    return _get(connection, gets, window) if gets and len(gets) == len(requests) else None


def _put(connection: ValkeyConnection, puts: Sequence[PutRequest], window: Window) -> NativeResults:
    done = connection.put_values([put.native_parts() for put in puts], window)
    results = [
        Result(ResultCode.OK, put.nbytes) if is_stored else Result(ResultCode.EXISTS)
        for put, is_stored in zip(puts, done.answers, strict=False)
    ]
    return NativeResults(results, done.sent, done.error)


def _get(connection: ValkeyConnection, gets: Sequence[GetRequest], window: Window) -> NativeResults | None:
    values: list[NativeGet] = []
    for get in gets:
        parts = get.native_parts()
        if parts is None:
            return None
        values.append(parts)
    done = connection.get_values(values, window, are_hashed=any(get.wants_checksum for get in gets))
    results = [get.on_answer(*answer) for get, answer in zip(gets, done.answers, strict=False)]
    return NativeResults(results, done.sent, done.error)
