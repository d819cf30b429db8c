"""The paged KV cache: the tensors, which blocks are free, and which hold a prefix that another request can use.

A block is in exactly one state: free (nothing of use), cached (holds a known prefix, nobody uses it, may be taken at
any time) or in use (counted once per sequence that holds it).
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

__all__ = ["BlockPool", "PagedCache", "chain"]


class PagedCache:
    """K and V of all layers, each `[blocks, block_size, kv_heads, head_dim]` in float32 (why: see `model.COMPUTE`)."""

    def __init__(self, layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int) -> None:
        self.block_size = block_size
        shape = (blocks, block_size, kv_heads, head_dim)
        self.keys = [torch.zeros(shape, dtype=torch.float32) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=torch.float32) for _ in range(layers)]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Round and store one row `[kv_heads, head_dim]` per slot (block * block_size + offset)."""
        self.keys[layer].flatten(0, 1)[slots] = keys.to(torch.float32)
        self.values[layer].flatten(0, 1)[slots] = values.to(torch.float32)

    def read(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of the blocks in `table` [sequences, blocks]: each [sequences, tokens, kv_heads, head_dim]."""
        rows, (_, _, kv_heads, dim) = table.flatten(), self.keys[layer].shape
        keys, values = (
            tensor.flatten(1).index_select(0, rows).view(len(table), -1, kv_heads, dim)
            for tensor in (self.keys[layer], self.values[layer])
        )
        return keys, values


def chain(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """A name for each full block of `tokens` that stands for everything up to its end.

    `root` keeps apart what must not be shared (another cache salt, another LoRA).
    """
    names: list[bytes] = []
    name = root
    for end in range(block_size, len(tokens) + 1, block_size):
        block = b"".join(token.to_bytes(4, "little") for token in tokens[end - block_size : end])
        name = blake2b(name + block, digest_size=16).digest()
        names.append(name)
    return names


class BlockPool:
    """Gives blocks out and takes them back; remembers what full ones hold until they are needed for something else."""

    def __init__(self, blocks: int) -> None:
        self.size = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._users: dict[int, int] = {}
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def in_use(self) -> int:
        """Blocks that a sequence holds; cached ones, which may be taken at any time, do not count."""
        return len(self._users)

    @property
    def cached(self) -> int:
        """Blocks that nobody holds but that still name a prefix."""
        return len(self._cached)

    def allocate(self, names: Sequence[bytes], count: int) -> tuple[list[int], int] | None:
        """`count` blocks, the first ones being those that already hold the prefix `names`.

        Returns:
            The blocks and how many of them hold their prefix already, or None when not enough are free.
        """
        held: list[int] = []
        for name in names[:count]:
            block = self._named.get(name)
            if block is None:
                break
            held.append(block)
        revived = sum(block in self._cached for block in held)
        if count - len(held) > len(self._free) + len(self._cached) - revived:
            return None
        for block in held:
            self._cached.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
        fresh = [self._take() for _ in range(count - len(held))]
        return held + fresh, len(held)

    def name(self, block: int, name: bytes) -> None:
        """Say what the full block in use now holds. The first block of a name keeps it."""
        if name not in self._named and block not in self._names:
            self._named[name] = block
            self._names[block] = name

    def release(self, blocks: Sequence[int]) -> None:
        """Take one sequence's blocks back."""
        for block in reversed(blocks):  # the end of a prefix is evicted before its beginning
            self._users[block] -= 1
            if self._users[block]:
                continue
            del self._users[block]
            if block in self._names:
                self._cached[block] = None
            else:
                self._free.append(block)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._named[self._names.pop(block)]
        self._users[block] = 1
        return block
