"""The gRPC server of the endpoint picker: Envoy's ext_proc service and health checks."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
from grpc import aio

from kvparams_proxy.ext_proc import messages as ext_proc
from kvparams_proxy.fleet.health import has_usable_pair, unserved_groups
from kvparams_proxy.picker.context import PickerContext
from kvparams_proxy.picker.health import health_handler
from kvparams_proxy.picker.settings import PickerTLS
from kvparams_proxy.picker.stream import PickerStream
from kvparams_proxy.server.draining import DrainService

__all__ = ["PickerListenError", "serve_picks"]

_log: Final = logging.getLogger(__name__)
_METHOD: Final = "Process"
_MESSAGE_BYTES: Final = 64 << 20
"""A whole body comes in one message where the data plane buffers it."""
_PING_MS: Final = 500
"""The shortest time between two pings of a data plane that the server takes for well-meant."""
_KEEPALIVE_MS: Final = 10_000
_KEEPALIVE_TIMEOUT_MS: Final = 5_000
"""A connection that does not answer a ping for so long is closed."""
_CUT_S: Final = 0.5
"""For what was said last to reach data planes, when the picker ends."""
_grpc: Final[Any] = grpc
_aio: Final[Any] = aio
"""grpcio has no types."""


class PickerListenError(OSError):
    """The port of the gRPC server cannot be used."""


@asynccontextmanager
async def serve_picks(context: PickerContext) -> AsyncGenerator[DrainService]:
    """Serves picks until the block is left, which cuts what runs. Yields what lets it end before.

    Args:
        context: what streams share.

    Raises:
        PickerListenError: the address cannot be used.
        OSError: a TLS file cannot be read.
    """
    settings = context.settings
    server: Any = _aio.server(
        options=[
            ("grpc.max_receive_message_length", _MESSAGE_BYTES),
            ("grpc.max_send_message_length", _MESSAGE_BYTES),
            ("grpc.max_concurrent_streams", settings.max_streams),
            ("grpc.so_reuseport", 0),
            # Data planes ask by ping whether the picker lives, also while nothing else is said.
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS),
            ("grpc.http2.max_ping_strikes", 0),
            # A data plane that has vanished does not keep its streams, whose load counts.
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ],
        maximum_concurrent_rpcs=settings.max_streams,
    )
    service = _Service(context)
    handler: Any = _grpc.stream_stream_rpc_method_handler(service.process, ext_proc.parse, ext_proc.encode)
    picks: Any = _grpc.method_handlers_generic_handler(ext_proc.SERVICE, {_METHOD: handler})
    server.add_generic_rpc_handlers((picks, health_handler(lambda: is_ready(context))))
    address = f"[{settings.host}]:{settings.port}" if ":" in settings.host else f"{settings.host}:{settings.port}"
    try:
        if settings.tls is None:
            port: int = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, _credentials(settings.tls))
    except RuntimeError as error:
        raise PickerListenError(f"cannot listen on {address}: {error}") from None
    await server.start()
    _log.info("endpoint picker: gRPC on %s:%d", settings.host, port)
    try:
        yield server.stop
    finally:
        await server.stop(_CUT_S)


def is_ready(context: PickerContext) -> bool:
    """Returns whether requests can be picked: some model's roles have engines, and the process does not drain."""
    fleet = context.resources.fleet
    if context.is_draining():
        return False
    unserved = unserved_groups(fleet.role_groups, fleet.health(), has_pair=has_usable_pair(fleet.members))
    return len(unserved) < len(fleet.role_groups)


class _Service:
    """The ext_proc service."""

    def __init__(self, context: PickerContext) -> None:
        self._context = context

    async def process(self, requests: AsyncIterator[ext_proc.Message], call: Any) -> None:
        """Serves one stream."""
        metrics = self._context.metrics
        metrics.streams += 1
        try:
            await PickerStream(self._context, requests, call.write).run()
        except ext_proc.MalformedGatewayMessage as malformed:
            await call.abort(_grpc.StatusCode.INVALID_ARGUMENT, str(malformed))
        except Exception:
            metrics.faults += 1
            _log.exception("a request ended with a fault of the picker")
            raise
        finally:
            metrics.streams -= 1


def _credentials(tls: PickerTLS) -> Any:
    """Returns the server's credentials, for gRPC."""
    pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
    authority = None if tls.client_ca is None else tls.client_ca.read_bytes()
    return _grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)
