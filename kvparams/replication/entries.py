"""Entries: the facts that one proxy tells the others.

An engine is named by `engine_key`. `entry_codec.py` has the binary form.
"""

from typing import NamedTuple

from xxhash import xxh3_64_intdigest

__all__ = [
    "AdapterUsed",
    "BlocksChanged",
    "BlocksHeld",
    "BlocksRouted",
    "EngineFailed",
    "EngineLoad",
    "EngineRestarted",
    "Entry",
    "LegDequeued",
    "LegQueued",
    "PrefillBegan",
    "PrefillEnded",
    "PrefillLoadsAdapter",
    "PromptComputed",
    "RoomOffered",
    "SettingChanged",
    "engine_key",
]


def engine_key(id: str, url: str, role: str) -> int:
    """Returns the 64 bits that name an engine between proxies.

    Proxies that give one id to different engines give them different keys.
    """
    return xxh3_64_intdigest(f"{id}\n{url}\n{role}".encode())


class EngineLoad(NamedTuple):
    """An `EngineLoad` is the load that the sender has on an engine now. A later one replaces it; zeros end it."""

    engine: int
    in_flight: int
    """Legs."""
    tokens: int
    """Prompt tokens of these."""


class PrefillBegan(NamedTuple):
    """A prefill leg of the sender began, and what its cache model expects of it."""

    leg: int
    """A number that the sender uses once."""
    engine: int
    prompt_tokens: int
    compute_s: float
    fetch_s: float
    cached_tokens: int
    """Expected."""
    fetched_tokens: int
    """Expected."""
    held_blocks: int
    """Blocks of the prompt that the engine was believed to have; `parent` is the hash of the last of them."""
    parent: int
    """0 where there is none."""
    hashes: bytes
    """The block hashes behind them, 8 bytes each; empty where the prompt has no token ids."""


class PrefillLoadsAdapter(NamedTuple):
    """A prefill leg of the sender, which has begun, should have to load its LoRA adapter first."""

    leg: int
    load_s: float


class AdapterUsed(NamedTuple):
    """A LoRA adapter is the one that an engine used last, as the sender believes: it is loaded from then on."""

    engine: int
    adapter: str
    """What requests call it."""


class PromptComputed(NamedTuple):
    """The prompt of a leg that goes on with the answer is computed."""

    leg: int
    new_tokens: int
    prompt_tokens: int


class PrefillEnded(NamedTuple):
    """A prefill leg of the sender ended."""

    leg: int
    answered: bool
    """Whether it ended well."""
    prompt_tokens: int | None
    """Reported by the engine."""
    cached_tokens: int | None
    """Reported by the engine."""


class BlocksRouted(NamedTuple):
    """An engine has these blocks of a prompt from now on, without a prefill leg. The fields are `PrefillBegan`'s."""

    engine: int
    held_blocks: int
    parent: int
    hashes: bytes


class BlocksChanged(NamedTuple):
    """A KV event of an engine has changed what it is known to have."""

    engine: int
    kind: str
    """`stored`, `removed` or `cleared`."""
    level: int
    parent: int
    """The hash of the block in front of those that are stored; 0 where there is none."""
    owner: str | None
    """Who keeps the blocks, where that is not the engine."""
    hashes: bytes


class BlocksHeld(NamedTuple):
    """Tells a proxy that has just started what an engine is believed to have."""

    engine: int
    capacity: int
    """Blocks that its cache seems to hold; 0 where its KV events say what it has."""
    level: int
    hashes: bytes
    """8 bytes for each block, the one used last first."""
    parents: bytes
    """As many: the block in front of each, or 0."""


class EngineFailed(NamedTuple):
    """A leg of the sender failed, and the engine is to blame."""

    engine: int
    connected: bool
    """Whether there was a connection."""
    why: str
    """The evidence, for the log; at most 200 characters."""


class EngineRestarted(NamedTuple):
    """The sender saw that an engine restarted: its cache is empty."""

    engine: int


class LegQueued(NamedTuple):
    """A leg of the sender waits for room."""

    leg: int
    """A number that the sender uses once."""
    role: str
    priority: int
    tokens: int
    """Of its prompt."""
    tenant: str
    model: str
    """Empty where the request names none."""


class RoomOffered(NamedTuple):
    """The sender holds room for a leg that waits at another proxy."""

    proxy: int
    """Whose leg it is."""
    leg: int
    engine: int


class LegDequeued(NamedTuple):
    """A leg of the sender waits no longer."""

    leg: int
    granted: bool
    """Whether it was given an engine."""


class SettingChanged(NamedTuple):
    """An operator changed a setting of the site. Of two with one name the one with the higher revision stands."""

    revision: int
    writer: int
    """Decides between equal revisions."""
    name: str
    value: bytes
    """JSON."""


Entry = (
    EngineLoad
    | PrefillBegan
    | PrefillLoadsAdapter
    | AdapterUsed
    | PromptComputed
    | PrefillEnded
    | BlocksRouted
    | BlocksHeld
    | BlocksChanged
    | EngineFailed
    | EngineRestarted
    | LegQueued
    | LegDequeued
    | RoomOffered
    | SettingChanged
)
