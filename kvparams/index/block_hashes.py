"""Block hashes: 64 bits that stand for a namespace and all tokens up to the end of a block (spec, section 16).

    H[i] = H[i - 1] + mix(a + p[i] + sum over j of w[j] * t[i, j])  mod 2^64

`w` and `p` follow from the deployment's seed and the block size, `a` from the seed and the namespace, `t` are the
tokens of block i. No step depends on the one before but the sum, so a whole prompt is a product, a few element-wise
operations and a cumulative sum.

A hash depends on nothing behind its block, and proves nothing. Two prompts with the same hash cost a detour, never a
wrong answer.
"""

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvparams.native import NATIVE

__all__ = [
    "INITIAL_STATE",
    "MAX_BLOCK_TOKENS",
    "BlockHasher",
    "BlockHashes",
    "HashState",
    "HashStates",
    "TokenSource",
    "join_hashes",
    "pack_hashes",
    "token_array",
    "unpack_hashes",
]

BlockHashes = NDArray[np.uint64]
TokenSource = NDArray[np.integer] | Sequence[int] | bytes | bytearray | memoryview
"""Token ids; bytes are ids as little-endian u32 (`kvparams.tokens.pack`)."""

MAX_BLOCK_TOKENS: Final = 1 << 16

_DEPLOYMENT_DOMAIN: Final = b"kvparams chain 1\n"
_NAMESPACE_DOMAIN: Final = b"kvparams chain namespace 1\n"
_GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


class HashState(NamedTuple):
    """A `HashState` is the state of the hash chain after any token of a sequence."""

    hash: int
    """Of the last full block; 0 where there is none."""
    part: int
    """The sum over the tokens of the block that has begun."""
    tokens: int
    """All of them."""


INITIAL_STATE: Final = HashState(0, 0, 0)


class HashStates(NamedTuple):
    """Several of one sequence, one behind the other."""

    hashes: BlockHashes
    parts: BlockHashes
    tokens: NDArray[np.int64]


class BlockHasher:
    """The hashes of one deployment: one seed, one block size."""

    __slots__ = ("_positions", "_positions_key", "_seed", "_weights", "block_size", "namespace")

    def __init__(self, seed: int, block_size: int) -> None:
        """Creates a hasher for one seed and block size.

        Args:
            seed: 64 bits that the deployment shares and clients do not know.
            block_size: tokens in a block.

        Raises:
            ValueError: the seed is not in [0, 2^64), or the block size not in [1, 65536].
        """
        if not 0 <= seed < 2**64:
            raise ValueError("a seed is in [0, 2^64)")
        if not 1 <= block_size <= MAX_BLOCK_TOKENS:
            raise ValueError(f"a block has 1 to {MAX_BLOCK_TOKENS} tokens, not {block_size}")
        self.block_size = block_size
        self._seed = struct.pack("<Q", seed)
        digest = sha256(_DEPLOYMENT_DOMAIN + self._seed + struct.pack("<I", block_size)).digest()
        weights_key, self._positions_key = struct.unpack_from("<QQ", digest)
        self._weights = _stream(weights_key, 0, block_size) | np.uint64(1)
        self._positions = _stream(self._positions_key, 0, 1024)
        self.namespace = lru_cache(maxsize=4096)(self._namespace)
        """`namespace(model, lora=None, salt=None)`: the number that stands for a namespace; remembered."""

    def _namespace(self, model: str, lora: str | None = None, salt: str | None = None) -> int:
        if not model:
            raise ValueError("model is empty: prompts of different models would be taken for each other")
        encoded = bytearray(_NAMESPACE_DOMAIN + self._seed)
        for name, text in ((b"model", model), (b"lora", lora), (b"cache_salt", salt)):
            encoded += struct.pack("<I", len(name)) + name
            if text is None:
                encoded += b"\0"
            else:
                raw = text.encode()
                encoded += struct.pack("<BI", 1, len(raw)) + raw
        return int.from_bytes(sha256(encoded).digest()[:8], "little")

    def hashes(self, tokens: TokenSource, namespace: int, start: int = 0, parent: int = 0) -> BlockHashes:
        """Returns a hash for each full block; a partial one at the end has none.

        Args:
            tokens: the ids, from the first one of block `start` on.
            namespace: what `namespace` gave.
            start: how many blocks of the sequence lie in front of them.
            parent: the hash of the last of those; 0 where there is none.

        Raises:
            ValueError: an id is no integer in [0, 2^32).
        """
        size = self.block_size
        if NATIVE is not None:
            ids = tokens if isinstance(tokens, list) else _words(token_array(tokens))
            found = np.empty(len(ids) // size, np.uint64)
            positions = self._positions_to(start + len(found))[start:]
            if NATIVE.hash_blocks(ids, self._weights, positions, namespace, parent, found):
                return found
        ids = token_array(tokens)
        count = len(ids) // size
        words = ids[: count * size].astype(np.uint64).reshape(count, size)
        return self._chained(words @ self._weights, namespace, start, parent)

    def extend(
        self, tokens: TokenSource, namespace: int, front: HashState, step: int
    ) -> tuple[BlockHashes, HashStates]:
        """Returns the hashes of the blocks that tokens complete, and the state after each `step` of them.

        So it follows a sequence that is reported in blocks of any other size. A partial step at the end is left out.

        Args:
            tokens: the ids behind `front`.
            namespace: what `namespace` gave.
            front: `INITIAL_STATE`, or what this gave for those before.
            step: tokens, at least one.

        Raises:
            ValueError: an id is no integer in [0, 2^32).
        """
        ids, size = token_array(tokens), self.block_size
        count = len(ids) // step * step
        begun, offset = divmod(front.tokens, size)
        sums = np.empty(count + 1, np.uint64)
        sums[0] = front.part
        places = (offset + np.arange(count)) % size
        np.multiply(ids[:count], self._weights.take(places), out=sums[1:], casting="unsafe", dtype=np.uint64)
        sums.cumsum(out=sums)
        full = sums[size - offset :: size]
        found = full.copy()
        found[1:] -= full[:-1]
        found = self._chained(found, namespace, begun, front.hash)
        ends = np.arange(step, count + 1, step)
        done = (offset + ends) // size  # blocks that are complete there
        hashes = np.concatenate((np.array([front.hash], np.uint64), found)).take(done)
        parts = sums.take(ends) - np.concatenate((np.zeros(1, np.uint64), full)).take(done)
        return found, HashStates(hashes, parts, front.tokens + ends)

    def _chained(self, sums: BlockHashes, namespace: int, start: int, parent: int) -> BlockHashes:
        """From the sum over the tokens of each block to its hash, in place."""
        end = start + len(sums)
        sums += self._positions_to(end)[start:end]
        sums += np.uint64(namespace)
        _mix(sums)
        if parent:
            sums[:1] += np.uint64(parent)
        return sums.cumsum(out=sums)

    def _positions_to(self, end: int) -> BlockHashes:
        """Returns the numbers of at least the first `end` positions."""
        if end > len(self._positions):
            self._positions = _stream(self._positions_key, 0, 1 << (end - 1).bit_length())
        return self._positions


def token_array(tokens: TokenSource) -> NDArray[np.integer]:
    """The ids as one row of a numpy array, every one in [0, 2^32); without a copy where they are one already.

    Raises:
        ValueError: an id is no integer in [0, 2^32).
    """
    if isinstance(tokens, bytes | bytearray | memoryview):
        raw = memoryview(tokens).cast("B")
        if len(raw) % 4:
            raise ValueError("packed ids have 4 bytes each")
        return np.frombuffer(raw, "<u4")
    if isinstance(tokens, np.ndarray):
        return _checked(tokens)
    try:
        # Five times faster than numpy reads a list.
        return np.frombuffer(array("I", tokens), np.uint32)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids are integers in [0, 2^32): {error}") from error


def pack_hashes(hashes: BlockHashes) -> bytes:
    """Returns 8 bytes for each hash, little-endian."""
    return hashes.astype("<u8", copy=False).tobytes()


def unpack_hashes(data: bytes) -> BlockHashes:
    """Returns the hashes that `pack_hashes` has packed.

    Raises:
        ValueError: their length is no multiple of 8.
    """
    return np.frombuffer(data, "<u8").astype(np.uint64, copy=False)


def join_hashes(front: BlockHashes, behind: BlockHashes) -> BlockHashes:
    """Returns the hashes of one piece of a prompt and those of the next."""
    return np.concatenate((front, behind))


def _checked(ids: NDArray[np.integer]) -> NDArray[np.integer]:
    kind, width = ids.dtype.kind, ids.dtype.itemsize
    if kind not in "iu" or ids.ndim != 1:
        raise ValueError(f"token ids are one row of integers, not {ids.dtype} in {ids.ndim} dimensions")
    if len(ids) and ((kind == "i" and ids.min() < 0) or (width == 8 and ids.max() >= 2**32)):
        raise ValueError("token ids are integers in [0, 2^32)")
    return ids


def _words(ids: NDArray[np.integer]) -> NDArray[np.uint32]:
    """Returns ids, each in [0, 2^32), as u32 in one piece."""
    words = ids.astype(np.uint32, copy=False)
    return words if words.flags.c_contiguous and words.flags.aligned else words.copy()


def _stream(key: int, start: int, count: int) -> BlockHashes:
    """Numbers `start` to `start + count` of the stream of `key`."""
    found = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    found *= np.uint64(_GOLDEN)
    found += np.uint64(key)
    return _mix(found)


def _mix(words: BlockHashes) -> BlockHashes:
    """The finaliser of SplitMix64, in place."""
    words ^= words >> _30
    words *= _FIRST
    words ^= words >> _27
    words *= _SECOND
    words ^= words >> _31
    return words
