"""Defines the errors of KV parameters documents as classes that carry data.

    KVParamsError
    ├── JSONTextError           the bytes are not JSON that we accept
    ├── InvalidParams           a document breaks the protocol; every problem is listed
    │   └── UnsupportedVersion  it declares a version that this SDK does not speak
    ├── LossyTranslation        a dialect cannot say all of a document (kvparams.dialects.translation)
    ├── AmbiguousDialect        several dialects write such a message: say which (kvparams.dialects.detection)
    ├── UnrecognizedDialect     none does (kvparams.dialects.detection)
    ├── InvalidEvents           a message is no batch of KV events (kvparams.kv_events)
    ├── NotCanonical            a value cannot be signed (kvparams.signing)
    ├── UntrustedParams         a signature is missing or wrong (kvparams.signing)
    └── PluginError             a name is not registered, or what is registered does not load

Callers tell errors apart by class and by `Problem.kind`, never by message.
"""

import json
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "InvalidParams",
    "JSONTextError",
    "KVParamsError",
    "PluginError",
    "Problem",
    "ProblemKind",
    "UnsupportedVersion",
    "printable",
]

ProblemKind = Literal[
    "missing",  # a required field is absent
    "type",  # the wrong JSON type
    "value",  # the right type, but not a value the field may have
    "range",  # a number outside its bounds
    "length",  # a string or list too short or too long
    "conflict",  # two fields contradict each other
    "version",  # a protocol version that is not spoken here
    "critical",  # `must_understand` names a field that is not understood here
    "json",  # not JSON at all, or JSON that we refuse (duplicate keys, NaN, too deep)
]


class KVParamsError(Exception):
    """The root of every error this project raises on purpose."""


def printable(text: str) -> str:
    """The text as it is, or as JSON in ASCII where it has what a terminal would obey or cannot show."""
    return text if text.isprintable() else json.dumps(text)


@dataclass(frozen=True, slots=True)
class Problem:
    """A `Problem` is one fault in a document: its path, its kind, and a message."""

    path: tuple[str | int, ...]
    """Keys and list indexes from the document's root; empty for the document itself."""
    kind: ProblemKind
    message: str

    def __str__(self) -> str:
        where = ".".join(printable(str(part)) for part in self.path) or "document"
        return f"{where}: {self.message} [{self.kind}]"


class JSONTextError(KVParamsError, ValueError):
    """The text is not JSON, or is JSON that this project refuses (duplicate keys, NaN, too deep, too long)."""


class InvalidParams(KVParamsError, ValueError):
    """The document breaks the protocol. `problems` holds every fault found, not only the first."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)  # args kept whole, so that it survives a trip between processes
        self.problems = problems

    def __str__(self) -> str:
        return "; ".join(str(problem) for problem in self.problems)


class UnsupportedVersion(InvalidParams):
    """The document declares a protocol version that this SDK does not speak."""


class PluginError(KVParamsError, LookupError):
    """A name is not registered in its group, or what is registered under it cannot be loaded."""
