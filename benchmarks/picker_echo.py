"""Runs the smallest endpoint picker that there can be, as a floor: it names one endpoint and echoes bodies.

python -m benchmarks.picker_echo PORT ENDPOINT
"""

import sys
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import uvloop
from grpc import aio

from kvparams_proxy.ext_proc.message_types import ProcessingRequest, ProcessingResponse

_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_grpc: Final[Any] = grpc
_aio: Final[Any] = aio
_NAME: Final = "x-gateway-destination-endpoint"


def _answer(request: Any, endpoint: str) -> Any:
    kind = request.WhichOneof("request")
    answer = ProcessingResponse()
    if kind == "request_headers":
        common = answer.request_headers.response
        common.clear_route_cache = True
        header = common.header_mutation.set_headers.add().header
        header.key, header.raw_value = _NAME, endpoint.encode()
        answer.dynamic_metadata["envoy.lb"] = {_NAME: endpoint}
    elif kind in ("request_body", "response_body"):
        part = getattr(request, kind)
        streamed = getattr(answer, kind).response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = part.body, part.end_of_stream
    else:
        getattr(answer, kind).SetInParent()
    return answer


async def _serve(port: str, endpoint: str) -> None:
    async def process(requests: AsyncIterator[Any], _call: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield _answer(request, endpoint)

    codec = (ProcessingRequest.FromString, ProcessingResponse.SerializeToString)
    method = {"Process": _grpc.stream_stream_rpc_method_handler(process, *codec)}
    server = _aio.server()
    server.add_generic_rpc_handlers((_grpc.method_handlers_generic_handler(_SERVICE, method),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(_serve(*sys.argv[1:3]))
