"""Models the KV of a whole model as a plain array, and computes by loops what an engine's tensors must hold.

It uses none of the layout code that it checks.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvparams.keys import DTYPE_BYTES, Geometry, KVShard

Raw = npt.NDArray[np.uint8]

TORCH = {name: getattr(torch, name) for name in DTYPE_BYTES}
PHYSICAL = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""The orders of vLLM 0.32 (v1/kv_cache_layout.py)."""


def truth(shape: Geometry, tokens: int, dtype: str, seed: int) -> list[Raw]:
    """K and V, each `[layers, tokens, heads, dim, bytes]`, random bits; V has no elements for MLA."""
    random = np.random.default_rng(seed)
    return [
        random.integers(0, 256, (shape.layers, tokens, shape.kv_heads, dim, DTYPE_BYTES[dtype]), dtype=np.uint8)
        for dim in (shape.k_dim, shape.v_dim)
    ]


def payload(kv: Sequence[Raw], unit: KVShard, start: int, tokens: int) -> bytes:
    """The canonical payload of some tokens of a unit."""
    found = b""
    for layer in range(unit.layer_start, unit.layer_end):
        for one in kv:
            for head in range(unit.head_start, unit.head_end):
                for token in range(start, start + tokens):
                    found += one[layer, token, head].tobytes()
    return found


def engine_tensors(
    dims: str,
    kv: Sequence[Raw],
    part: KVShard,
    blocks: Sequence[int],
    *,
    num_blocks: int,
    block_size: int,
    dtype: str,
    physical: str | None = None,
    k_transposed: bool = False,
    tokens: int | None = None,
) -> list[torch.Tensor]:
    """One tensor per layer, as an engine in this form has them when the first `tokens` tokens stand in its blocks.

    Args:
        dims: letters as in `layout_forms`.
        kv: of the whole model.
        part: what this rank holds.
        blocks: the sequence's block table.
        num_blocks: of the whole cache.
        block_size: tokens per block.
        dtype: of the elements.
        physical: the order in memory of `L` and `dims`; None: one layer after the other, in the order of `dims`.
        k_transposed: a head of a block holds K as `[dim, tokens]`.
        tokens: None means all.
    """
    key, value = kv
    item = key.shape[-1]
    k_dim, v_dim = key.shape[3], value.shape[3]
    sizes = {
        "L": part.layers,
        "S": 2,
        "B": num_blocks,
        "N": block_size,
        "H": part.heads,
        "D": k_dim,
        "C": k_dim + v_dim,
    }
    logical, order = f"L{dims}", physical or f"L{dims}"
    memory = np.zeros([*(sizes[letter] for letter in order), item], dtype=np.uint8)
    array = memory.transpose([*(order.index(letter) for letter in logical), len(order)])
    for layer in range(part.layers):
        for token in range(key.shape[1] if tokens is None else tokens):
            block, inside = blocks[token // block_size], token % block_size
            for head in range(part.heads):
                for which, one in enumerate(kv):
                    row = one[part.layer_start + layer, token, part.head_start + head]  # [dim, bytes]
                    if k_transposed:
                        at = {"L": layer, "S": which, "B": block, "H": head}
                        region = array[tuple(at[letter] for letter in logical if letter in at)].reshape(-1, item)
                        skip = which * block_size * k_dim if "C" in dims else 0
                        for element in range(k_dim):
                            place = element * block_size + inside if which == 0 else inside * k_dim + element
                            region[skip + place] = row[element]
                    else:
                        elements = slice(which * k_dim, which * k_dim + row.shape[0]) if "C" in dims else slice(None)
                        at = {"L": layer, "S": which, "B": block, "N": inside, "H": head, "D": elements, "C": elements}
                        array[tuple(at[letter] for letter in logical)] = row
    tensor: torch.Tensor = torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
    return list(tensor.view(TORCH[dtype]).squeeze(-1))


def same_bits(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Whether all bits are equal, NaNs included."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return all(
        torch.equal(one.view(bits[one.element_size()]), other.view(bits[other.element_size()]))
        for one, other in zip(left, right, strict=True)
    )
