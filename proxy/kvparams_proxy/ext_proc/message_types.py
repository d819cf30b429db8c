"""Defines the messages of Envoy's ext_proc service that the picker reads and writes, with the fields that it uses.

The numbers are those of external_processor.proto, base.proto and http_status.proto of Envoy 1.40. The package
xds-protos 1.85 has all of Envoy's messages, but also modules of `opentelemetry.proto` that replace those of
opentelemetry-proto, so tracing and the picker could not be installed together. Other fields are kept as unknown ones.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

__all__ = ["ProcessingRequest", "ProcessingResponse"]

_descriptors: Final[Any] = import_module("google.protobuf.descriptor_pb2")
_pools: Final[Any] = import_module("google.protobuf.descriptor_pool")
_factory: Final[Any] = import_module("google.protobuf.message_factory")
_struct: Final[Any] = import_module("google.protobuf.struct_pb2")

_PACKAGE: Final = "kvparams.ext_proc"
"""Names do not travel: the service's path and the numbers of fields do."""
_STRUCT: Final = "google.protobuf.Struct"
_SCALARS: Final[Mapping[str, int]] = {"string": 9, "bytes": 12, "bool": 8, "int32": 5}
"""Type numbers of `FieldDescriptorProto`. An enumeration is an int32 on the wire."""
_REPEATED: Final = 3
_OPTIONAL: Final = 1
_MESSAGE: Final = 11

_MESSAGES: Final[Mapping[str, str]] = {
    "HeaderValue": "key:1:string value:2:string raw_value:3:bytes",
    "HeaderMap": "headers:1:HeaderValue*",
    "HttpHeaders": "headers:1:HeaderMap end_of_stream:3:bool",
    "HttpBody": "body:1:bytes end_of_stream:2:bool",
    "HttpTrailers": "trailers:1:HeaderMap",
    "Metadata": "filter_metadata:1:Struct%",
    "ProtocolConfiguration": "request_body_mode:1:int32 response_body_mode:2:int32",
    "ProcessingRequest": (
        "request_headers:2:HttpHeaders! response_headers:3:HttpHeaders! request_body:4:HttpBody! "
        "response_body:5:HttpBody! request_trailers:6:HttpTrailers! response_trailers:7:HttpTrailers! "
        "metadata_context:8:Metadata attributes:9:Struct% protocol_config:11:ProtocolConfiguration"
    ),
    "HeaderValueOption": "header:1:HeaderValue append_action:3:int32",
    "HeaderMutation": "set_headers:1:HeaderValueOption* remove_headers:2:string*",
    "StreamedBodyResponse": "body:1:bytes end_of_stream:2:bool",
    "BodyMutation": "body:1:bytes! streamed_response:3:StreamedBodyResponse!",
    "CommonResponse": "header_mutation:2:HeaderMutation body_mutation:3:BodyMutation clear_route_cache:5:bool",
    "HeadersResponse": "response:1:CommonResponse",
    "BodyResponse": "response:1:CommonResponse",
    "TrailersResponse": "header_mutation:1:HeaderMutation",
    "HttpStatus": "code:1:int32",
    "ImmediateResponse": "status:1:HttpStatus headers:2:HeaderMutation body:3:bytes details:5:string",
    "ProcessingResponse": (
        "request_headers:1:HeadersResponse! response_headers:2:HeadersResponse! request_body:3:BodyResponse! "
        "response_body:4:BodyResponse! request_trailers:5:TrailersResponse! response_trailers:6:TrailersResponse! "
        "immediate_response:7:ImmediateResponse! dynamic_metadata:8:Struct"
    ),
}
"""Each field is name:number:type, `*` if repeated, `%` for a map from texts, `!` for one of which only one is set."""
_ONE_OF: Final[Mapping[str, str]] = {
    "ProcessingRequest": "request",
    "ProcessingResponse": "response",
    "BodyMutation": "mutation",
}


def _define(message: Any, fields: str) -> None:
    """Adds the fields of a message to its descriptor."""
    for written in fields.split():
        name, number, kind = written.split(":")
        is_map = kind.endswith("%")
        field = message.field.add(name=name, number=int(number), label=_OPTIONAL)
        if is_map or kind.endswith("*"):
            field.label = _REPEATED
        if kind.endswith("!"):
            field.oneof_index = 0
        kind = kind.rstrip("*%!")
        if is_map:
            entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
            entry.options.map_entry = True
            _define(entry, f"key:1:string value:2:{kind}")
            kind = f"{message.name}.{entry.name}"
        scalar = _SCALARS.get(kind)
        field.type = _MESSAGE if scalar is None else scalar
        if scalar is None:
            field.type_name = f".{_STRUCT}" if kind == "Struct" else f".{_PACKAGE}.{kind}"


def _classes() -> Mapping[str, Any]:
    """Returns the classes of all messages, in a pool of their own."""
    file = _descriptors.FileDescriptorProto(
        name="kvparams/ext_proc.proto", package=_PACKAGE, syntax="proto3", dependency=["google/protobuf/struct.proto"]
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if name in _ONE_OF:
            message.oneof_decl.add(name=_ONE_OF[name])
        _define(message, fields)
    pool = _pools.DescriptorPool()
    struct = _descriptors.FileDescriptorProto()
    _struct.DESCRIPTOR.CopyToProto(struct)
    pool.Add(struct)
    pool.Add(file)
    return {name: _factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES}


_made: Final = _classes()
ProcessingRequest: Final[Any] = _made["ProcessingRequest"]
"""A part of a request or of a response, as Envoy shows it."""
ProcessingResponse: Final[Any] = _made["ProcessingResponse"]
"""The answer to a part."""
