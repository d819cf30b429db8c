"""Asks the bootstrap servers of prefill engines who the engine is, where a dialect has them.

Probes query them; requests never do. They require no key and are sent none.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

from kvparams.dialects.interface import BootstrapInfo, BootstrapProtocol, Dialect, HandoffMissing
from kvparams.errors import JSONTextError
from kvparams.instances import DataParallelRank, Instance, Role
from kvparams.jsontext.document import JSONLimits, loads
from kvparams_proxy.event_loop.clock import Clock
from kvparams_proxy.upstream.connection_pool import UpstreamConnectionPool
from kvparams_proxy.upstream.exchange import UpstreamExchange
from kvparams_proxy.upstream.types import ResponseCollector, ResponseHead, UpstreamError, UpstreamLimits

__all__ = ["BootstrapServer", "BootstrapServers", "bootstrap_url"]

_LIMITS: Final = JSONLimits(max_bytes=256 << 10, max_containers=4_000, max_strings=16_000)
"""Of an answer: some thousand workers, read within some milliseconds."""
_CONNECTIONS: Final = 2

BootstrapCallback = Callable[[BootstrapInfo | None, str], None]
"""What was found, or None and why not, in words."""


def bootstrap_url(instance: Instance, bootstrap: BootstrapProtocol) -> str:
    """Returns the bootstrap server's URL for `instance`: as declared, or the dialect's port on the engine's host."""
    if instance.bootstrap is not None:
        return instance.bootstrap
    host = urlsplit(instance.url).hostname or ""
    return f"http://[{host}]:{bootstrap.port}" if ":" in host else f"http://{host}:{bootstrap.port}"


class BootstrapServers:
    """Knows which instances have one."""

    def __init__(self, dialects: Mapping[str, Dialect], limits: UpstreamLimits, clock: Clock | None = None) -> None:
        """`dialects` by name, as instances name them; `clock`: see `UpstreamConnectionPool`."""
        self._clock = clock
        self._dialects = dialects
        self._limits = replace(limits, connections=_CONNECTIONS)

    def for_instance(self, instance: Instance) -> "BootstrapServer | None":
        """Returns the bootstrap server of an instance, or None where it has none."""
        dialect = self._dialects.get(instance.dialect)
        if dialect is None or dialect.bootstrap is None or instance.role is not Role.PREFILL:
            return None
        url = bootstrap_url(instance, dialect.bootstrap)
        return BootstrapServer(dialect.bootstrap, url, self._limits, self._clock, instance.rank)


class BootstrapServer:
    """The bootstrap server of one instance."""

    def __init__(
        self,
        bootstrap: BootstrapProtocol,
        url: str,
        limits: UpstreamLimits,
        clock: Clock | None = None,
        rank: DataParallelRank | None = None,
    ) -> None:
        self._bootstrap = bootstrap
        self._rank = rank
        self._url = url
        self._pool = UpstreamConnectionPool(url, limits, clock=clock)

    def query(self, found: BootstrapCallback) -> UpstreamExchange:
        """Sends the query. `found` is called once, unless the exchange is discarded."""

        def answered(head: ResponseHead, raw: bytes, error: UpstreamError | None) -> None:
            found(*self._read(head, raw, error))

        request = self._pool.get(self._bootstrap.path.encode())
        return self._pool.exchange(request, ResponseCollector(_LIMITS.max_bytes, answered))

    def close(self) -> None:
        """Ends the queries."""
        self._pool.close()

    def _read(self, head: ResponseHead, raw: bytes, error: UpstreamError | None) -> tuple[BootstrapInfo | None, str]:
        where = f"its bootstrap server ({self._url})"
        if error is not None:
            return None, f"{where}: {error.reason.replace('the engine', 'it')}"
        if head.status != 200:
            return None, f"{where} answers {head.status} to GET {self._bootstrap.path}"
        try:
            answer = loads(raw, _LIMITS)
            if self._rank is None:  # a third party's protocol may know of no ranks
                return self._bootstrap.parse_info(self._url, answer), ""
            return self._bootstrap.parse_info(self._url, answer, self._rank), ""
        except HandoffMissing as refused:
            return None, f"{refused} ({self._url})"
        except JSONTextError:
            return None, f"{where} does not answer with JSON"
