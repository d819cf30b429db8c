"""Defines what the scheduler's half tells the workers' half in one step: loads to begin, saves to make.

An order is complete: it names its tokens, its blocks and what else the KV depends on. So a worker remembers nothing of
a request, and a reused request id has no effect.
"""

from dataclasses import dataclass, field

from kvparams.keys import ExtraKey
from kvparams.params import KVTransferParams
from kvparams_connectors.engines.vllm.grouped_plan import PageChains

__all__ = ["ConnectorMetadata", "LoadSpec", "SaveSpec", "TokenSequence"]


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens, and what else their KV depends on."""

    token_ids: tuple[int, ...]
    shared_params: KVTransferParams | None
    """Cache salt and LoRA, where its producer's pages can be read, which keys may be stored; no more of a document."""
    extras: tuple[ExtraKey, ...]
    pages: PageChains = ()
    """By group of layers those that the scheduler has computed already, so that a worker need not."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Fill the blocks with the stored KV of the tokens [start, end)."""

    request_id: str
    sequence: TokenSequence
    block_ids: tuple[int, ...]
    """The group's block table from token 0."""
    start: int
    end: int
    group: int = 0
    """Of layers. A request whose layers have several groups is loaded when its orders of all of them are."""


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """Store the pages that end in (start, end], which this step has computed."""

    sequence: TokenSequence
    block_ids: tuple[int, ...]
    start: int
    end: int
    required: bool
    """Somebody has been promised them, so wait for room rather than drop some."""
    pin_id: int | None = None
    """The engine keeps the blocks as they are until every worker has said that this order is copied. None: it keeps
    none, so they must be copied before the step ends."""
    group: int = 0
    """Of layers."""


@dataclass(slots=True)
class ConnectorMetadata:
    """A `ConnectorMetadata` holds the scheduler's orders of one step."""

    loads: list[LoadSpec] = field(default_factory=list[LoadSpec])
    saves: list[SaveSpec] = field(default_factory=list[SaveSpec])
