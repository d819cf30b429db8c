"""The package reads, writes and validates the one document that moves KV cache between prefill and decode.

Importing it opens nothing and needs nothing beyond pydantic.
"""

from kvparams.codec import dump, dump_json, parse, read_request, write
from kvparams.errors import (
    InvalidParams,
    JSONTextError,
    KVParamsError,
    PluginError,
    Problem,
    ProblemKind,
    UnsupportedVersion,
)
from kvparams.params import (
    PROTOCOL_VERSION,
    Endpoint,
    Isolation,
    KVTransferParams,
    Lease,
    Mode,
    OnLoadFailure,
    Phase,
    Signature,
    Transfer,
    Usage,
)
from kvparams.tokens import TokenPrefix
from kvparams.version import __version__

__all__ = [
    "PROTOCOL_VERSION",
    "Endpoint",
    "InvalidParams",
    "Isolation",
    "JSONTextError",
    "KVParamsError",
    "KVTransferParams",
    "Lease",
    "Mode",
    "OnLoadFailure",
    "Phase",
    "PluginError",
    "Problem",
    "ProblemKind",
    "Signature",
    "TokenPrefix",
    "Transfer",
    "UnsupportedVersion",
    "Usage",
    "__version__",
    "dump",
    "dump_json",
    "parse",
    "read_request",
    "write",
]
