"""The messages of a worker's start, as JSON: its identity and arguments, and the reason if it cannot start.

They travel through the channel: other users can read a command line.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self, cast

from kvparams_proxy.worker_identity import WorkerIdentity

__all__ = ["StartFailure", "WorkerStart"]


class WorkerStart(NamedTuple):
    """The payload of `FrameKind.START`."""

    identity: WorkerIdentity
    listener: int
    """The descriptor of the listening socket."""
    arguments: Mapping[str, object]
    """The arguments of the command by name, as argparse has parsed them."""

    def encode(self) -> bytes:
        """Returns it as JSON."""
        who = self.identity
        document = {"number": who.number, "count": who.count, "serial": who.serial, "directory": str(who.directory)}
        return json.dumps({**document, "listener": self.listener, "arguments": dict(self.arguments)}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Reads what `encode` has written."""
        found = json.loads(data)
        identity = WorkerIdentity(found["number"], found["count"], found["serial"], Path(found["directory"]))
        return cls(identity, found["listener"], found["arguments"])


class StartFailure(NamedTuple):
    """The payload of `FrameKind.FAILED`: the reason why a worker could not start, in its own words."""

    status: int
    """The exit status that `kvparams proxy` has for it."""
    message: str

    def encode(self) -> bytes:
        """Returns it as JSON."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Reads what `encode` has written."""
        return cls(*cast("list[object]", json.loads(data)))  # pyright: ignore[reportArgumentType]  member by member
