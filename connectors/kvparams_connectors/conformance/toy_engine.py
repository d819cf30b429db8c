"""A toy of an engine: paged tensors, a block table, a connector. For tests of connectors and stores.

Everything is random but repeatable; the same seed gives the same tokens, blocks and KV.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Final

import torch

from kvparams.keys import Geometry, KVShard, Namespace
from kvparams.pages import HEADER_BYTES
from kvparams_connectors.store import KVStore
from kvparams_connectors.transfer.connector import ConnectorSettings, KVStoreConnector, SequencePlan
from kvparams_connectors.transfer.layout import PagedKVLayout

__all__ = [
    "BLOCKS",
    "PAGE_BYTES",
    "PART",
    "SHAPE",
    "SPACE",
    "WAIT_S",
    "ToyEngine",
    "block_table",
    "make_tokens",
    "save_sequence",
    "toy_engine",
]

WAIT_S: Final = 20.0
SHAPE: Final = Geometry(layers=2, kv_heads=2, k_dim=4, v_dim=4)
SPACE: Final = Namespace("model", "revision", "float32", SHAPE, page_tokens=8)
PART: Final = KVShard.whole(SHAPE)
BLOCKS: Final = 64
PAGE_BYTES: Final = HEADER_BYTES + SPACE.payload_bytes(8, PART)
"""Stored bytes of a full page of `SPACE`."""


@dataclass(frozen=True, slots=True)
class ToyEngine:
    """Paged tensors and a connector to a store."""

    tensor: torch.Tensor
    """`[layers, 2, BLOCKS, block_size, heads, dim]`."""
    connector: KVStoreConnector

    def sequence(self, blocks: Sequence[int]) -> torch.Tensor:
        """The KV of a sequence, `[layers, 2, make_tokens, heads, dim]`."""
        return self.tensor[:, :, list(blocks)].flatten(2, 3)


@contextmanager
def toy_engine(
    store: KVStore,
    *,
    block_size: int = 4,
    seed: int | None = None,
    namespace: Namespace = SPACE,
    settings: ConnectorSettings | None = None,
) -> Generator[ToyEngine]:
    """An engine: with a seed its blocks are full of random KV, without one they are zero."""
    shape = (SHAPE.layers, 2, BLOCKS, block_size, SHAPE.kv_heads, SHAPE.k_dim)
    tensor = torch.zeros(shape)
    if seed is not None:
        tensor = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 1
    settings = settings or ConnectorSettings(arena_bytes=1 << 20, deadline_s=WAIT_S)
    connector = KVStoreConnector(store, namespace, PagedKVLayout.from_stacked(tensor), settings)
    try:
        yield ToyEngine(tensor, connector)
    finally:
        connector.close()


def block_table(seed: int) -> list[int]:
    """A block table of all blocks."""
    return Random(seed).sample(range(BLOCKS), BLOCKS)


def make_tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids; a shorter list is the beginning of a longer one."""
    random = Random(seed)
    return [random.randrange(2**32) for _ in range(count)]


def save_sequence(store: KVStore, count: int, *, seed: int = 1) -> tuple[SequencePlan, torch.Tensor]:
    """A sequence of `count` tokens, all of it stored: its plan and its KV as `ToyEngine.sequence` gives it."""
    with toy_engine(store, seed=seed) as engine:
        plan = engine.connector.plan(make_tokens(count))
        report = engine.connector.save(plan, block_table(seed), 0, count).result()
        if report.saved != len(plan.pages):
            raise RuntimeError(f"the store did not take everything: {report}")
        return plan, engine.sequence(block_table(seed)).clone()
