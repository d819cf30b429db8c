"""Values read from an `lm://` server, and what is found there that is no value put right.

Two things can stand under a name and be none: what remains of a put that was broken off (see `connection.py`; the
server answers with the value's length and closes the connection), and a value that was buried by one client while
another put it, so that its record still says that it is there. Both are a MISS, and are buried with their records, or
else every lookup would find them and no put replace them.

Nothing is buried on one sight of it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvparams_connectors.store import Result, ResultCode
from kvparams_connectors.stores.lmcache.connection import LMCacheAddress, TruncatedReply
from kvparams_connectors.stores.lmcache.pipeline import (
    WINDOW_BYTES,
    FetchValueRequest,
    LMCacheConnectionPool,
    TombstoneRequest,
    read_records,
    result_of_error,
    run_requests,
)
from kvparams_connectors.stores.lmcache.wire import LMCacheProtocolError

__all__ = ["ValueRead", "read_values"]

_LOGGER: Final = logging.getLogger(__name__)

_MISS: Final = Result(ResultCode.MISS)


@dataclass(frozen=True, slots=True)
class ValueRead:
    """A value that is to be read."""

    value: bytes
    """Its name."""
    record: bytes
    """That of its record."""
    fetch: FetchValueRequest


def read_values(
    pool: LMCacheConnectionPool, server: LMCacheAddress, wanted: Sequence[ValueRead], deadline: float
) -> list[Result]:
    """Read values; one result for each, as `KVStore.get` has them.

    Args:
        deadline: on the clock of `time.monotonic`; what was not read by then is TIMEOUT.
    """
    results, broken = _read(pool, server, wanted, deadline)
    gone = [at for at, one in enumerate(wanted) if one.fetch.gone]
    if gone:
        records = read_records(pool, server, [wanted[at].record for at in gone], deadline)
        doubtful = [at for at, record in zip(gone, records, strict=True) if record.code is ResultCode.OK]
        again, more = _read(pool, server, [wanted[at] for at in doubtful], deadline)
        for at, result in zip(doubtful, again, strict=True):
            results[at] = result  # it was put again meanwhile, or its record has outlived it
        broken += [doubtful[at] for at in more] + [at for at in doubtful if wanted[at].fetch.gone]
    if broken:
        _LOGGER.warning("lmcache: %s:%s: %d of %d values were only remains", *server, len(broken), len(wanted))
        run_requests(pool, server, [TombstoneRequest(wanted[at].value, wanted[at].record) for at in broken], deadline)
    return results


def _read(
    pool: LMCacheConnectionPool, server: LMCacheAddress, wanted: Sequence[ValueRead], deadline: float
) -> tuple[list[Result], list[int]]:
    """The results, and which of them are only remains.

    When a connection is lost, the rest is asked for one by one over others, so that it is seen at which value the
    server breaks off.
    """
    results: list[Result] = []
    broken: list[int] = []
    suspect: int | None = None
    lost = False
    window = WINDOW_BYTES
    while len(results) < len(wanted):
        came = run_requests(pool, server, [one.fetch for one in wanted[len(results) :]], deadline, window=window)
        results += came.results
        error = came.error
        at = len(results)
        if error is None:
            break
        if isinstance(error, TruncatedReply):
            if suspect == at:
                broken.append(at)
                results.append(_MISS)
            suspect = at
        elif (
            lost
            or not came.connected
            or isinstance(error, LMCacheProtocolError)
            or not isinstance(error, ConnectionError)
        ):
            results += [result_of_error(error, server)] * (len(wanted) - at)
            break
        else:
            lost = True
        window = 0
    return results, broken
