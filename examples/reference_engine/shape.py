"""The model's geometry, for those who only have to know how large its KV is.

Importing this module costs nothing; in particular it imports no torch.
"""

from dataclasses import dataclass

__all__ = ["ModelShape"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The model's geometry; `seed` stands for its weights."""

    layers: int = 3
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    feed_forward: int = 320
    rope_theta: float = 10_000.0
    seed: int = 12_957
