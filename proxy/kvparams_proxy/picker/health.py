"""The gRPC health service of the picker, with the services that the endpoint picker protocol names."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2

from kvparams_proxy.ext_proc.messages import SERVICE

__all__ = ["HealthService", "health_handler"]

_pb: Final[Any] = health_pb2
_grpc: Final[Any] = grpc
"""grpcio has no types."""
_NAME: Final = "grpc.health.v1.Health"
_LIVENESS: Final = "liveness"
_READINESS: Final = ("", "readiness", SERVICE)
_LOOK_S: Final = 0.5
"""How often a watcher's service is looked at."""


class HealthService:
    """Answers whether the picker lives, and whether it is ready to pick."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready

    async def check(self, request: Any, context: Any) -> object:
        """Answers once."""
        status = self._status(request.service)
        if status is None:
            await context.abort(_grpc.StatusCode.NOT_FOUND, f"there is no service {request.service[:200]!r}")
        return _pb.HealthCheckResponse(status=status)

    async def watch(self, request: Any, context: Any) -> AsyncIterator[object]:
        """Answers now and whenever the answer changes."""
        last: object = None
        while True:
            status = self._status(request.service)
            if status is None:
                status = _pb.HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                last = status
                yield _pb.HealthCheckResponse(status=status)
            await asyncio.sleep(_LOOK_S)

    def _status(self, service: str) -> object:
        if service == _LIVENESS:
            return _pb.HealthCheckResponse.SERVING
        if service not in _READINESS:
            return None
        return _pb.HealthCheckResponse.SERVING if self._is_ready() else _pb.HealthCheckResponse.NOT_SERVING


def health_handler(is_ready: Callable[[], bool]) -> object:
    """Returns the service's handler for a gRPC server."""
    service = HealthService(is_ready)
    codec = (_pb.HealthCheckRequest.FromString, _pb.HealthCheckResponse.SerializeToString)
    methods = {
        "Check": _grpc.unary_unary_rpc_method_handler(service.check, *codec),
        "Watch": _grpc.unary_stream_rpc_method_handler(service.watch, *codec),
    }
    return _grpc.method_handlers_generic_handler(_NAME, methods)
