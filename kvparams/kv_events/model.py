"""Defines the events that any engine publishes about its KV cache: blocks stored, blocks removed, all blocks cleared.

An event belongs to the batch it came in, and the batch says who sent it and which one it is. Everything that there is
per block or per token is packed: hashes as big-endian bytes of one width, token ids as the bytes that the rest of the
protocol packs (`kvparams.tokens.pack`), so that `numpy.frombuffer` or `array` takes them without a loop.

An event never says more than the engine did. Facts that an engine leaves open (which tokens, which medium) stay open
here.
"""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from kvparams.errors import KVParamsError, Problem

__all__ = [
    "MAX_BYTES",
    "MAX_EVENTS",
    "MAX_PROBLEMS",
    "MEDIA",
    "AllBlocksCleared",
    "BlockLocation",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventSource",
    "InvalidEvents",
    "KVCacheEvent",
    "Medium",
]

Medium = Literal["device", "host", "disk", "remote", "other"]
"""Where blocks are, seen from the engine; `other` is a place that has no name here."""

MEDIA: Final[dict[str, Medium]] = {
    "gpu": "device",  # vLLM, SGLang
    "device": "device",  # Dynamo
    "cpu": "host",  # vLLM
    "cpu_pinned": "host",  # SGLang
    "cpu_tier1": "host",  # Dynamo
    "host_pinned": "host",  # Dynamo
    "cpu_tier2": "disk",  # Dynamo
    "disk": "disk",  # SGLang
    "nvme": "disk",  # Dynamo
    "fs": "disk",  # vLLM 0.26
    "storage": "disk",  # vLLM 0.32
    "obj": "remote",  # vLLM 0.26: an object store
    "external": "remote",  # SGLang
    "network": "remote",  # Dynamo, with the next two
    "remote": "remote",
    "shared": "remote",
}
"""What engines call their media, in small letters. Sources: vLLM 0.26 and 0.32 `distributed/kv_events.py`, SGLang
0.5.23 `disaggregation/kv_events.py`, Dynamo `lib/kv-router/src/protocols.rs`. vLLM's Mooncake store writes `cpu` in
small letters, so case says nothing."""


class EventSource(NamedTuple):
    """An `EventSource` is a stream of events: an engine's, or that of one of its data-parallel ranks."""

    instance: str
    """The name that the deployment has for the engine; no engine puts it into its events."""
    rank: int = 0


class BlockLocation(NamedTuple):
    """A `BlockLocation` says where blocks are stored and which cache group they belong to.

    A block is removed from the location that is equal to the one where it was stored; the same hash may be stored in
    several locations.
    """

    medium: Medium
    native: str | None = None
    """The engine's own word for the medium."""
    group: int | None = None
    """Which of the model's groups of layers the blocks belong to; engines number them as they like."""
    owner: str | None = None
    """Who keeps the blocks, where that is not the engine itself (vLLM's `ownership`)."""


class BlockStored(NamedTuple):
    """Blocks that follow one another in a sequence are now in `place`."""

    place: BlockLocation
    hashes: bytes
    """The engine's names for the blocks, `width` bytes each. An integer is its 64 bits, sign or not."""
    width: int
    """8 for integers; a digest has its full width. In vLLM the integer is the digest's last 8 bytes."""
    parent: bytes | None = None
    """The hash of the block in front of the first one. None: there is none, or, without tokens, it was not said."""
    tokens: bytes | None = None
    """The token ids as little-endian u32, `block_size` for each block. None: the engine did not say which tokens, or
    not which of them belong to which block."""
    block_size: int | None = None
    """Tokens in each of these blocks; may differ between events of one engine, for partial blocks. None: not said."""
    following: int | None = None
    """The token behind the last block, where its hash depends on that too (SGLang with EAGLE)."""
    extras: tuple[tuple[object, ...] | None, ...] | None = None
    """For each block what its KV depends on besides tokens (images, salts, embeddings), as the engine says it; None
    for a block, or for all of them, where there is nothing."""
    lora: str | None = None
    """The adapter's name."""
    lora_id: int | None = None
    salt: str | None = None
    """The cache salt; of the whole sequence, also where only the first block's hash holds it."""
    kind: str | None = None
    """What the group of layers is (`full_attention`, `sliding_window`, `mamba` ...), in the engine's words."""
    window: int | None = None
    """Tokens that a sliding window looks back."""
    session: str | None = None
    """Which session caused it. Nothing about who may use the blocks."""
    contents: bytes | None = None
    """Dynamo says 8 bytes for each block in place of its tokens: XXH3-64 of the tokens and what else it hashes."""

    @property
    def blocks(self) -> int:
        """Returns the number of blocks."""
        return len(self.hashes) // self.width


class BlockRemoved(NamedTuple):
    """Blocks are no longer in `place`."""

    place: BlockLocation
    hashes: bytes
    width: int

    @property
    def blocks(self) -> int:
        """Returns the number of blocks."""
        return len(self.hashes) // self.width


class AllBlocksCleared(NamedTuple):
    """No block is left, in no place; with an owner, none of that owner's."""

    owner: str | None = None


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """An `EventBatch` holds the events that an engine sent in one message."""

    source: EventSource
    events: tuple[KVCacheEvent, ...]
    """In the order in which they hold."""
    sequence: int | None = None
    """Its number in the stream, counted from 0 without gaps; see `kvparams.kv_events.sequence_tracker`."""
    time: float | None = None
    """Seconds, by the engine's clock."""
    mark: int | None = None
    """Tells this batch from another one with the same number: XXH3-64 of its bytes."""
    unknown: int = 0
    """Events of a type that is not known here, left out."""
    malformed: int = 0
    """Events that are not what their type says, left out."""
    problems: tuple[Problem, ...] = ()
    """What is wrong with them; the first few. Paths lead from the message."""


MAX_BYTES: Final = 16 << 20
"""Of one message; a longer one is refused unread, unless the caller says otherwise."""
MAX_EVENTS: Final = 65_536
"""In one message."""
MAX_PROBLEMS: Final = 16
"""That are described; the others are counted."""


class InvalidEvents(KVParamsError, ValueError):
    """A message is no batch of events; nothing of it can be used."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "; ".join(str(problem) for problem in self.problems)
