"""Generates the workload of the index benchmark.

Prompts have 8,192 tokens, of which the first 2,048 are one of 100 system prompts, each held by 1 to 4 workers; 73 % of
the questions are held by some worker. Dynamo's side uses it, too: numpy is all that it needs.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK", "PROMPT", "Tokens", "questions", "sequences"]

BLOCK: Final = 16
PROMPT: Final = 8_192
SYSTEM: Final = 2_048
HELD: Final = 6_000

Tokens = NDArray[np.int32]


def sequences(blocks: int, workers: int) -> Iterator[tuple[Tokens, list[int]]]:
    """Prompts that make so many different blocks, and who holds each."""
    rng = np.random.default_rng(11)
    systems = [rng.integers(1000, 128_000, SYSTEM, dtype=np.int32) for _ in range(100)]
    made, number = min(100, -(-blocks * BLOCK // (PROMPT - SYSTEM))) * SYSTEM // BLOCK, 0
    while made < blocks:
        rest = rng.integers(1000, 128_000, PROMPT - SYSTEM, dtype=np.int32)
        holders = rng.choice(workers, int(rng.integers(1, 5)), replace=False).tolist()
        yield np.concatenate([systems[number % 100], rest]), holders
        number += 1
        made += (PROMPT - SYSTEM) // BLOCK


def questions(held: list[Tokens]) -> list[Tokens]:
    """These prompts with another end."""
    rng = np.random.default_rng(7)
    return [np.concatenate([one[:HELD], rng.integers(1000, 128_000, PROMPT - HELD, dtype=np.int32)]) for one in held]
