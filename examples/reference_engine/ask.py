"""A request that can be served, and the error for one that cannot.

The rest of the engine knows nothing else of the request, whatever its endpoint was.
"""

from dataclasses import dataclass

from reference_engine.sampling import Sampling
from reference_engine.sequence import Limits
from reference_engine.tokenizer import Message

__all__ = ["Ask", "RequestError", "ToolUse"]


class RequestError(Exception):
    """The request cannot be served as it is; answered as OpenAI's API does."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.message, self.status, self.kind, self.param = message, status, kind, param


@dataclass(frozen=True, slots=True)
class ToolUse:
    """An answer that is a tool call."""

    required: bool
    """Whether the model had the choice among the tools; otherwise the client named one."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that can be served."""

    prompts: list[list[int]]
    choices: int
    sampling: Sampling
    """Its seed is that of the whole request; `seed_of` gives each sequence its own."""
    limits: Limits
    stream: bool
    include_usage: bool
    """Whether the stream ends with the usage."""
    continuous_usage: bool
    """Whether each of its events has the usage so far."""
    cache_salt: str | None
    kv_transfer_params: dict[str, object] | str | None
    return_token_ids: bool = False
    echo: bool = False
    tool_use: ToolUse | None = None
    response_id: str | None = None
    """What the client, or a proxy, calls a response of `/v1/responses`."""
    conversation: list[Message] | None = None
    """The messages that go on from a stored response; None where it is not stored."""

    def seed_of(self, index: int) -> bytes:
        """The seed of the choice `index`: every prompt of a batch draws as it would alone."""
        return self.sampling.seed + b"/%d" % (index % self.choices)
